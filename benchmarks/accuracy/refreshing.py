"""What runs again beside new residues, and what a fitted correction does in its place: freezing error against cost.

The last eight residues of a domain are new. Costs are tokens that run, times layers. A schedule says how many of the
context's last residues are refreshed in every layer; where the whole context joins, it goes on from its own hidden
states. All schedules are computed in one forward with one mask per layer, of the context, a second copy of its end, and
the new residues.

Corrections are fitted layer by layer to full runs of calibration proteins, by ridge regression of low rank, on top of
refreshing. One adds to the attention output of every token that runs; the other moves the keys and values of the
context's last residues as adding the new ones would. Both read the new residues' mean values. A correction costs its
multiplications, in units of those of a token in a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.embedded import evaluation_set, rounded, shipped_proteins, small_model
from benchmarks.harness.measure import Case, Check, Figures, largest_difference, worst
from esm_turbo import TurboEsm
from esm_turbo.codecs.base import rotate
from esm_turbo.evaluate.contexts import as_outputs, prefill
from esm_turbo.evaluate.metrics import Outputs, TokenErrors
from esm_turbo.model.sessions import KVSession
from esm_turbo.tasks.common.forwards import FROZEN

MODELS = ("esm2-mini", "esmc-mini")
_NEW, _REFRESHED = 8, 8
_DOMAINS = 57
_TRAINING, _SHORTEST, _LONGEST = 96, 80, 180
_WINDOW = 32
_RANK = 32
_PENALTIES = (0.1, 1.0, 10.0)
# Stored keys and values of the corrected arms are in half precision.
_TOLERANCE = 2e-3
_ALL = -1

Schedule = Sequence[int]


def schedules(num_layers: int) -> dict[str, Schedule]:
    """Refreshed residues of every layer, by name; -1 where the whole context runs."""
    even = {f"{count} in all layers": [count] * num_layers for count in (0, 8, 16, 32, 64)}
    upper, narrow = num_layers // 4, num_layers // 3
    return even | {
        f"8, and the whole context in the last {upper} layers": [8] * (num_layers - upper) + [_ALL] * upper,
        f"64 in the first {narrow} layers, then 16": [64] * narrow + [16] * (num_layers - narrow),
    }


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One row of each model.

    Args:
        max_proteins: at most so many of the 57 domains, and of the 160 proteins that corrections are fitted to.
    """
    for model in MODELS:
        shape = {"dtype": "float32", "max_proteins": max_proteins, "new_residues": _NEW}
        measure = functools.partial(_measure, model, max_proteins)
        yield Case(f"refreshing {model}", model, shape, functools.partial(_check, model), measure)


class _Observe(KVSession):
    """Collects queries, keys and values of a forward, layer by layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.layers.append((query, keys, values))


class _Masked(KVSession):
    """Lets tokens see what one mask per layer shows them, bool [n, n]."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        self.masks = masks

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return (query @ keys.mT).masked_fill(~self.masks[layer_idx], -torch.inf).softmax(-1) @ values


class _Protein:
    """A protein whose last residues are new, with the outputs of the full run.

    Args:
        turbo: the model.
        sequence: its residues.
    """

    def __init__(self, turbo: TurboEsm, sequence: str) -> None:
        self.turbo = turbo
        self.ids = [turbo.codes.cls, *turbo.codes.encode(sequence, "a protein"), turbo.codes.eos]
        self.new = _NEW + 1
        self.cached = len(self.ids) - self.new

    def full(self, session: KVSession | None = None) -> Outputs:
        """Outputs of the new residues in the full run."""
        return self._outputs(_run(self.turbo, self.ids, range(len(self.ids)), session))

    def scheduled(self, schedule: Schedule) -> Outputs:
        """Outputs of the new residues."""
        again = max(0, min(max(schedule), self.cached - 1))
        ids = self.ids[: self.cached] + self.ids[self.cached - again :]
        positions = [*range(self.cached), *range(self.cached - again, len(self.ids))]
        return self._outputs(_run(self.turbo, ids, positions, _Masked(self._masks(schedule, again, len(ids)))))

    def cost(self, schedule: Schedule) -> int:
        """Tokens that run, summed over layers."""
        whole = len(self.ids)
        return sum(whole if count == _ALL else min(count, self.cached - 1) + self.new for count in schedule)

    def _masks(self, schedule: Schedule, again: int, tokens: int) -> list[Tensor]:
        masks, count = [], 0
        for wanted in schedule:
            count = count if wanted == _ALL else min(wanted, again)
            extended = torch.ones(tokens, dtype=torch.bool)
            extended[self.cached - count : self.cached + again - count] = False
            mask = extended.repeat(tokens, 1)
            if wanted != _ALL:
                mask[: self.cached] = torch.arange(tokens) < self.cached
            masks.append(mask)
        return masks

    def _outputs(self, output: Any) -> Outputs:
        return as_outputs(output, 0, slice(-self.new, -1))


def _run(turbo: TurboEsm, ids: Sequence[int], positions: Sequence[int], session: KVSession | None) -> Any:
    rows = torch.tensor([ids])
    places = torch.tensor([list(positions)])
    options = {} if session is None else {"kv_session": session}
    return turbo.model(rows, torch.ones_like(rows), places, output_hidden_states=True, **options)


@dataclass
class _Frozen:
    """What a corrected extension of a protein reads, and what its full run would have read.

    Attributes:
        ids: of the refreshed and the new tokens.
        first: position of the first of them.
        stored: keys and values of the context before them, of every layer, [heads, n, head_dim].
        moved: the same of the full run, of the last `_WINDOW` tokens of these.
        outputs: attention outputs of the tokens in the full run, of every layer, [tokens, hidden_size].
        expected: outputs of the new residues in the full run.
    """

    ids: list[int]
    first: int
    stored: list[tuple[Tensor, Tensor]]
    moved: list[tuple[Tensor, Tensor]]
    outputs: list[Tensor]
    expected: Outputs

    @classmethod
    def of(cls, turbo: TurboEsm, sequence: str) -> _Frozen:
        protein = _Protein(turbo, sequence)
        first = protein.cached - _REFRESHED
        whole, context = _Observe(), _Observe()
        expected = protein.full(whole)
        _run(turbo, protein.ids[: protein.cached], range(protein.cached), context)
        window = slice(max(1, first - _WINDOW), first)
        return cls(
            protein.ids[first:],
            first,
            [(keys[0, :, :first].half(), values[0, :, :first].half()) for _, keys, values in context.layers],
            [(keys[0, :, window].half(), values[0, :, window].half()) for _, keys, values in whole.layers],
            [_joined(((q @ k.mT).softmax(-1) @ v)[0, :, first:]) for q, k, v in whole.layers],
            expected,
        )


@dataclass(frozen=True)
class _Map:
    """An affine map of low rank, of features [n, in] to corrections [n, out]."""

    mean: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) @ self.weight + self.bias

    @property
    def products(self) -> int:
        """Multiplications for each row of features."""
        return _RANK * sum(self.weight.shape)

    @classmethod
    def fit(cls, features: Tensor, targets: Tensor) -> _Map:
        """Ridge regression, its penalty chosen on the last eighth of the rows, then cut to `_RANK`."""
        kept = len(features) * 7 // 8
        mean, bias = features[:kept].mean(0), targets[:kept].mean(0)
        x, y = features - mean, targets - bias
        gram, product = x[:kept].T @ x[:kept], x[:kept].T @ y[:kept]
        scale = gram.diagonal().mean() * torch.eye(len(gram))
        weights = [torch.linalg.solve(gram + penalty * scale, product) for penalty in _PENALTIES]
        weight = min(weights, key=lambda one: float((y[kept:] - x[kept:] @ one).square().sum()))
        # The directions in which it changes most.
        _, vectors = torch.linalg.eigh(weight.T @ gram @ weight)
        return cls(mean, weight @ vectors[:, -_RANK:] @ vectors[:, -_RANK:].T, bias)


class _Corrected(KVSession):
    """Extends frozen contexts, with a correction in every layer but the first, which is exact.

    Args:
        turbo: the model.
        contexts: all rows of the forward.
        moves: whether keys and values are moved, rather than outputs.
        maps: of the layers; fitted to these contexts where there are none yet.
    """

    def __init__(self, turbo: TurboEsm, contexts: Sequence[_Frozen], moves: bool, maps: dict[int, Any]) -> None:
        self.contexts, self.moves, self.maps = contexts, moves, maps
        self.inv_freq = turbo.model.base_model.rotary_frequencies.float().reshape(-1)[: _half(turbo)]

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        stored = [tuple(x.float() for x in one.stored[layer_idx]) for one in self.contexts]
        plain = [
            self._unrotated(rows, torch.arange(one.first, one.first + rows.shape[1]))
            for rows, one in zip(keys, self.contexts, strict=True)
        ]
        summaries = [_joined(x)[_REFRESHED:].mean(0) for x in values]
        if self.moves and layer_idx:
            stored = self._moved(layer_idx, stored, summaries)
        outputs = torch.stack(
            [
                (q @ torch.cat([past_keys, k], 1).mT).softmax(-1) @ torch.cat([past_values, v], 1)
                for q, k, v, (past_keys, past_values) in zip(query, keys, values, stored, strict=True)
            ]
        )
        if not self.moves and layer_idx:
            joined, own = list(map(_joined, outputs)), [_joined(x) for x in values]
            tokens = torch.eye(joined[0].shape[0])
            features = [
                torch.cat([out, v, _joined(k), summary.expand(len(out), -1), tokens], 1)
                for out, v, k, summary in zip(joined, own, plain, summaries, strict=True)
            ]
            targets = [one.outputs[layer_idx] - out for one, out in zip(self.contexts, joined, strict=True)]
            changes = self._apply(layer_idx, features, targets)
            outputs = outputs + torch.stack([_split(change, outputs.shape[1]) for change in changes])
        return outputs

    def _moved(
        self, layer_idx: int, stored: Sequence[tuple[Tensor, ...]], summaries: Sequence[Tensor]
    ) -> list[tuple[Tensor, ...]]:
        features, targets, places = [], [], []
        for one, (keys, values), summary in zip(self.contexts, stored, summaries, strict=True):
            window = torch.arange(max(1, one.first - _WINDOW), one.first)
            own = [_joined(self._unrotated(keys[:, window], window)), _joined(values[:, window])]
            true_keys, true_values = (x.float() for x in one.moved[layer_idx])
            true = [_joined(self._unrotated(true_keys, window)), _joined(true_values)]
            distances = torch.eye(_WINDOW)[one.first - 1 - window]
            # The new residues change what is near them most.
            near = (1 / (one.first - window).float())[:, None] * summary
            features.append(torch.cat([*own, summary.expand(len(window), -1), near, distances], 1))
            targets.append(torch.cat(true, 1) - torch.cat(own, 1))
            places.append(window)
        found = []
        for (keys, values), window, change in zip(
            stored, places, self._apply(layer_idx, features, targets), strict=True
        ):
            of_keys, of_values = (_split(x, len(keys)) for x in change.chunk(2, dim=1))
            angles = window[:, None] * self.inv_freq
            keys, values = keys.clone(), values.clone()
            keys[:, window] += rotate(of_keys, angles)
            values[:, window] += of_values
            found.append((keys, values))
        return found

    def _apply(self, layer_idx: int, features: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        if layer_idx not in self.maps:
            self.maps[layer_idx] = _Map.fit(torch.cat(list(features)), torch.cat(list(targets)))
        return list(map(self.maps[layer_idx], features))

    def _unrotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        return rotate(keys, -positions[:, None] * self.inv_freq)


def _half(turbo: TurboEsm) -> int:
    config = turbo.model.config
    return int(config.hidden_size // config.num_attention_heads // 2)


def _joined(x: Tensor) -> Tensor:
    """Heads side by side, [heads, n, head_dim] to [n, hidden_size]."""
    return x.transpose(0, 1).flatten(1)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1)).transpose(0, 1)


def _extend(turbo: TurboEsm, contexts: Sequence[_Frozen], session: _Corrected) -> list[Outputs]:
    """Outputs of the new residues of all contexts, in one forward."""
    ids = torch.tensor([one.ids for one in contexts])
    places = torch.tensor([[*range(one.first, one.first + len(one.ids))] for one in contexts])
    output = turbo.model(ids, torch.ones_like(ids), places, kv_session=session, output_hidden_states=True)
    return [as_outputs(output, row, slice(_REFRESHED, -1)) for row in range(len(contexts))]


@torch.no_grad()
def _measure(model: str, max_proteins: int | None, repeats: int) -> Figures:
    turbo = small_model(model)
    layers = turbo.model.config.num_hidden_layers
    records = evaluation_set("cath_val200", min(_DOMAINS, max_proteins or _DOMAINS))
    domains = [_Protein(turbo, record.sequence) for record in records]
    expected = [domain.full() for domain in domains]
    arms: dict[str, Figures] = {}
    for name, schedule in schedules(layers).items():
        found = [domain.scheduled(schedule) for domain in domains]
        arms[name] = {"cost": np.mean([domain.cost(schedule) for domain in domains]), **_accuracy(expected, found)}
    chosen = [r for r in shipped_proteins() if _SHORTEST <= len(r.sequence) <= _LONGEST]
    count = min(_TRAINING, max_proteins or _TRAINING)
    training = [_Frozen.of(turbo, record.sequence) for record in chosen[:: len(chosen) // count][:count]]
    held_out = [_Frozen.of(turbo, record.sequence) for record in records]
    for name, moves in (("outputs", False), ("keys and values", True)):
        maps: dict[int, _Map] = {}
        _extend(turbo, training, _Corrected(turbo, training, moves, maps))
        found = _extend(turbo, held_out, _Corrected(turbo, held_out, moves, maps))
        tokens = _WINDOW if moves else _REFRESHED + _NEW + 1
        cost = sum(one.products for one in maps.values()) * tokens / _products(turbo)
        arms[f"8 in all layers, {name} corrected"] = {
            "cost": arms["8 in all layers"]["cost"] + cost,
            **_accuracy([one.expected for one in held_out], found),
        }
    return rounded({"domains": len(domains), "training_proteins": count, "arms": arms})


def _accuracy(expected: Sequence[Outputs], found: Sequence[Outputs]) -> Figures:
    return asdict(TokenErrors.join(map(TokenErrors.compare, expected, found)).accuracy())


def _products(turbo: TurboEsm) -> float:
    """Multiplications of a token in a layer, without attention."""
    encoder = turbo.model.base_model
    matrices = [p.numel() for name, p in encoder.named_parameters() if p.dim() == 2 and "embed" not in name]
    return sum(matrices) / encoder.config.num_hidden_layers


@torch.no_grad()
def _check(model: str) -> Check:
    """Compare eight refreshed residues with an extension of a cache at full precision, both ways."""
    turbo = small_model(model)
    sequence = evaluation_set("cath_val200", 1)[0].sequence
    protein = _Protein(turbo, sequence)
    ids = torch.tensor([protein.ids[: protein.cached]])
    _, caches = prefill(turbo.model, [FROZEN], ids, torch.ones_like(ids))
    logits = turbo.extend(caches[FROZEN], [sequence[-_NEW:]], refresh=_REFRESHED).logits[0, :-1]
    scheduled = protein.scheduled([_REFRESHED] * turbo.model.config.num_hidden_layers).logits
    context = _Frozen.of(turbo, sequence)
    width, layers = turbo.model.config.hidden_size, range(turbo.model.config.num_hidden_layers)
    nothing = dict.fromkeys(layers, lambda features: torch.zeros(len(features), width))
    [corrected] = _extend(turbo, [context], _Corrected(turbo, [context], False, nothing))
    errors = [largest_difference(logits, torch.from_numpy(x)) for x in (scheduled, corrected.logits)]
    what = "logits with eight refreshed residues, masked and corrected by nothing, against a cache, largest difference"
    return Check(what, worst(errors), _TOLERANCE)
