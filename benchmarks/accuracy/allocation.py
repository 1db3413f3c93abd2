"""Bytes of the turbo codec across layers and heads: the same in all, or where they are worth most.

What bytes are worth is measured end to end, on calibration proteins: a single layer, or a single head of one, is stored
with every budget in turn and everything else exactly. The errors are added, and the budgets with the least sum at the
same total are chosen and measured on other proteins. All budgets share the maps of the presets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.embedded import evaluation_set, rounded, shipped_proteins, small_model
from benchmarks.harness.measure import Case, Check, Figures
from esm_turbo import TurboEsm
from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.turbo import TurboCodec, fit_budgets
from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.contexts import prefill, to_float64
from esm_turbo.evaluate.metrics import Array, Outputs, TokenErrors
from esm_turbo.evaluate.protocols import extend_each_token
from esm_turbo.model.sessions import KVSession
from esm_turbo.proteins.fasta import ProteinRecord

MODELS = ("esm2-mini", "esmc-mini")
BUDGETS = (8, 12, 16, 20, 24, 32, 40, 48)
"""Bytes per token and head, key and value together; of a head of 64, 16 are one bit per element."""

_PRESETS = {"turbo1": 16, "turbo2": 32}
# Short ones, as every head of every layer is measured on them with every budget.
_CALIBRATION_PROTEINS, _SHORTEST, _LONGEST = 8, 60, 110
_HELD_OUT = 30
# A tenth of the error that is measured.
_TOLERANCE = 1e-3
_Units = Mapping[tuple[int, int], int]


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case of each model, with a row for each preset.

    Args:
        max_proteins: at most so many of the 30 domains, and of the 8 proteins of the calibration.
    """
    for model in MODELS:
        shape = {"dtype": "float32", "max_proteins": max_proteins, "budgets": list(BUDGETS)}
        measure = functools.partial(_measure, model, max_proteins)
        yield Case(f"allocation {model}", model, shape, functools.partial(_check, model), measure)


class _Collect(KVSession):
    """Collects keys and values of a forward, layer by layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.layers.append((keys, values))


class _LeaveOneOut(KVSession):
    """Lets every token attend to the stored keys and values of all others, and to its own.

    Args:
        stored: keys and values of every layer, [batch, heads, n, head_dim].
    """

    def __init__(self, stored: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.stored = stored

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        past_keys, past_values = self.stored[layer_idx]
        scores = query @ past_keys.mT
        scores.diagonal(dim1=-2, dim2=-1).copy_((query * keys).sum(-1))
        weights = scores.softmax(-1)
        own = weights.diagonal(dim1=-2, dim2=-1)[..., None]
        return weights @ past_values + own * (values - past_values)


class _Protein:
    """A protein with its exact outputs, keys and values."""

    def __init__(self, turbo: TurboEsm, record: ProteinRecord) -> None:
        codes, self.model = turbo.codes, turbo.model
        self.ids = torch.tensor([[codes.cls, *codes.encode(record.sequence, record.id), codes.eos]])
        self.residues = ~torch.isin(self.ids, torch.tensor(turbo.model.base_model.protected_ids))
        session = _Collect()
        [self.reference] = self._run(session, 1)
        self.exact = session.layers

    def stored(self, codec: KVCodec, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as read from a cache, those of special tokens in bfloat16."""
        mapped = codec.transform(layer_idx, *self.exact[layer_idx])
        packed = codec.quantize(layer_idx, *mapped)
        read = codec.decode(layer_idx, packed | codec.summarize(layer_idx, *mapped, packed, self.residues))
        protected = codec.inverse_transform(layer_idx, *(x.bfloat16().float() for x in mapped))
        chosen = self.residues[:, None, :, None]
        keys, values = (torch.where(chosen, *pair) for pair in zip(read, protected, strict=True))
        return keys, values

    def errors(self, stored: Sequence[tuple[Tensor, Tensor]]) -> list[TokenErrors]:
        """Errors of leave-one-out extensions, of as many contexts as `stored` holds."""
        count = max(len(keys) for keys, _ in stored)
        return [TokenErrors.compare(self.reference, one) for one in self._run(_LeaveOneOut(stored), count)]

    def _run(self, session: KVSession, count: int) -> list[Outputs]:
        ids = self.ids.expand(count, -1)
        output = self.model(ids, torch.ones_like(ids), kv_session=session, output_hidden_states=True)
        chosen = self.residues[0]
        return [
            Outputs(to_float64(hidden[chosen]), to_float64(logits[chosen]))
            for hidden, logits in zip(output.hidden_states[-1], output.logits, strict=True)
        ]


@torch.no_grad()
def _measure(model: str, max_proteins: int | None, repeats: int) -> list[Figures]:
    turbo = small_model(model)
    codecs = _codecs(model)
    chosen = [r for r in shipped_proteins() if _SHORTEST <= len(r.sequence) <= _LONGEST]
    count = min(_CALIBRATION_PROTEINS, max_proteins or _CALIBRATION_PROTEINS)
    calibration = [_Protein(turbo, record) for record in chosen[:: len(chosen) // count][:count]]
    geometry = turbo.model.base_model.calibration.statistics.geometry
    layers, heads = range(geometry.num_layers), range(geometry.num_heads)
    of_layers = {(layer, -1): _marginal(calibration, codecs, layer, heads) for layer in layers}
    of_heads = {(layer, head): _marginal(calibration, codecs, layer, [head]) for layer in layers for head in heads}
    held_out = [
        _Protein(turbo, record) for record in evaluation_set("cath_val200", min(_HELD_OUT, max_proteins or _HELD_OUT))
    ]
    rows = []
    for preset, budget in _PRESETS.items():
        arms: dict[str, Any] = {}
        for name, curves in (("same", of_layers), ("layers", of_layers), ("heads", of_heads)):
            chosen_bytes = dict.fromkeys(curves, budget) if name == "same" else _allocate(curves, budget)
            added = sum(curves[unit][BUDGETS.index(num)] for unit, num in chosen_bytes.items())
            accuracy = TokenErrors.join(_errors(held_out, codecs, chosen_bytes, heads)).accuracy()
            arms[name] = {
                "bytes": list(chosen_bytes.values()),
                "added_error_on_calibration": added,
                **asdict(accuracy),
            }
        rows.append(rounded({"preset": preset, "calibration_proteins": count, "proteins": len(held_out), "arms": arms}))
    return rows


def _codecs(model: str) -> dict[int, KVCodec]:
    """A codec for every budget, fitted to the statistics of the shipped calibration."""
    statistics = small_model(model).model.base_model.calibration.statistics
    states = fit_budgets(BUDGETS, statistics, protect=True)
    # What else a configuration says does not matter once the state is fitted.
    config = TurboConfig.from_preset("turbo1")
    return {
        budget: TurboCodec(config, statistics.geometry, state) for budget, state in zip(BUDGETS, states, strict=True)
    }


def _marginal(
    proteins: Sequence[_Protein], codecs: Mapping[int, KVCodec], layer_idx: int, heads: Iterable[int]
) -> Array:
    """Mean of 1 - cosine by budget, if these heads of one layer are stored with it and all else exactly."""
    errors: list[list[TokenErrors]] = []
    for protein in proteins:
        keys, values = (x.repeat(len(BUDGETS), 1, 1, 1) for x in protein.exact[layer_idx])
        for row, codec in enumerate(codecs.values()):
            read = protein.stored(codec, layer_idx)
            for head in heads:
                keys[row, head], values[row, head] = (x[0, head] for x in read)
        stored = [*protein.exact]
        stored[layer_idx] = keys, values
        errors.append(protein.errors(stored))
    return np.array([1 - TokenErrors.join(of_budget).cosine.mean() for of_budget in zip(*errors, strict=True)])


def _allocate(curves: Mapping[tuple[int, int], Array], mean: int) -> dict[tuple[int, int], int]:
    """Budgets of all units with the least sum of errors, at most `mean` bytes on average."""
    total = mean * len(curves)
    least, choices = np.zeros(total + 1), []
    for errors in curves.values():
        options = np.full((len(BUDGETS), total + 1), np.inf)
        for row, (budget, error) in enumerate(zip(BUDGETS, errors, strict=True)):
            options[row, budget:] = least[: max(0, total + 1 - budget)] + error
        choices.append(options.argmin(axis=0))
        least = options.min(axis=0)
    found = []
    for choice in reversed(choices):
        found.append(BUDGETS[choice[total]])
        total -= found[-1]
    return dict(zip(curves, reversed(found), strict=True))


def _errors(
    proteins: Sequence[_Protein], codecs: Mapping[int, KVCodec], units: _Units, heads: Sequence[int]
) -> Iterator[TokenErrors]:
    """Errors of each protein if every unit is stored with its budget; head -1 stands for all heads of a layer."""
    for protein in proteins:
        stored = []
        for layer_idx in range(len(protein.exact)):
            of_heads = [units.get((layer_idx, -1), units.get((layer_idx, head))) for head in heads]
            read = {budget: protein.stored(codecs[budget], layer_idx) for budget in set(of_heads)}
            keys, values = (
                torch.stack([read[budget][kind][:, head] for head, budget in enumerate(of_heads)], dim=1)
                for kind in (0, 1)
            )
            stored.append((keys, values))
        yield from protein.errors(stored)


@torch.no_grad()
def _check(model: str) -> Check:
    """Compare with leave-one-out extensions of a cache, by the codec of `turbo1` in both."""
    turbo, config = small_model(model), TurboConfig.from_preset("turbo1")
    protein = _Protein(turbo, evaluation_set("cath_val200", 1)[0])
    codec = turbo.model.base_model.codec(config)
    session = _LeaveOneOut([protein.stored(codec, layer) for layer in range(len(protein.exact))])
    [found] = protein._run(session, 1)
    _, caches = prefill(turbo.model, [config], protein.ids, torch.ones_like(protein.ids))
    expected = extend_each_token(turbo.model, caches[config], protein.ids[0])
    chosen = protein.residues[0].numpy()
    theirs = TokenErrors.compare(protein.reference, Outputs(expected.hidden[chosen], expected.logits[chosen]))
    # Single codes may differ where a number lies between two levels.
    difference = abs(TokenErrors.compare(protein.reference, found).cosine - theirs.cosine)
    what = "cosines of leave-one-out in one forward and by extensions of a cache of turbo1, largest difference"
    return Check(what, float(difference.max()), _TOLERANCE)
