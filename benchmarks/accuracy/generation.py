"""Predictions of generation from a cache against full recomputation at every step, by refresh setting.

The residues of real proteins are given one after another, so that all arms see the same sequence and differ only in the
distribution from which a residue would be drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from benchmarks.harness.embedded import embedded, evaluation_set, plain_model, rounded
from benchmarks.harness.measure import Case, Check, Figures, worst
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.evaluate.contexts import to_float64
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.generation.left_to_right import LeftToRight
from esm_turbo.tasks.generation.unmasking import MaskedBatch

_SET = "cath_val200"
_STRIDE, _PROTEINS, _SHORTEST = 8, 12, 90
_NEW = 24
_LOOP = 12
ALL = 10_000
# Logits are of the order of ten.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Refresh:
    """A refresh setting.

    Attributes:
        residues: `refresh` of `GenerationOptions`.
        every: `refresh_every`.
    """

    residues: int
    every: int


def cases(
    append: Sequence[Refresh], fill: Sequence[Refresh], presets: Sequence[str], max_proteins: int | None = None
) -> Iterator[Case]:
    """One row per kind of generation, refresh setting and preset.

    Args:
        append: settings for 24 residues after the first three fifths of a protein.
        fill: settings for 12 masked residues, contiguous in the middle or scattered.
        presets: of the contexts; `exact` is the frozen arm.
        max_proteins: use only the first N of the 12 proteins.
    """
    for name, run, settings in (
        ("to the right", _append, append),
        ("12 in a row", functools.partial(_fill, scattered=False), fill),
        ("12 scattered", functools.partial(_fill, scattered=True), fill),
    ):
        for refresh in settings:
            for preset in presets:
                yield _case(name, run, refresh, preset, max_proteins)


def _case(
    name: str,
    run: Callable[[TurboEsm, Sequence[list[int]], Refresh], tuple[list[Tensor], float]],
    refresh: Refresh,
    preset: str,
    max_proteins: int | None,
) -> Case:
    def measure(repeats: int) -> Figures:
        given = proteins(max_proteins)
        expected, whole_tokens = _whole(name, run, max_proteins)
        found, tokens = run(turbo_of(preset), given, refresh)
        full, given = (log_softmax(to_float64(torch.cat(x)), axis=-1) for x in (expected, found))
        kl = np.maximum(0.0, (np.exp(full) * (full - given)).sum(-1))
        return rounded(
            {
                "proteins": f"{_SET}.fasta",
                "tested": len(given),
                "generated": name,
                "refresh": refresh.residues,
                "refresh_every": refresh.every,
                "preset": preset,
                "tokens_a_step": tokens,
                "tokens_a_step_in_full": whole_tokens,
                "against_full": {
                    "predictions": len(kl),
                    "kl_mean": float(kl.mean()),
                    "kl_q99": float(np.quantile(kl, 0.99)),
                    "top1_agreement": float((full.argmax(-1) == given.argmax(-1)).mean()),
                    "total_variation_mean": _total_variation(full, given),
                },
            }
        )

    return Case(
        name=f"{name}, refresh {refresh.residues} every {refresh.every}, {preset}",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "max_proteins": max_proteins},
        check=check,
        measure=measure,
    )


def _total_variation(full: np.ndarray, given: np.ndarray) -> float:
    """Mean half L1 distance over the standard residues: a lower bound on how often draws differ."""
    columns = [embedded().codes.residues[letter] for letter in STANDARD_RESIDUES]
    return float(np.abs(np.exp(full[:, columns]) - np.exp(given[:, columns])).sum(-1).mean() / 2)


def _append(turbo: TurboEsm, proteins: Sequence[list[int]], refresh: Refresh) -> tuple[list[Tensor], float]:
    """Predictions of the next residues, and the mean number of tokens run per step."""
    begins = [len(ids) * 3 // 5 for ids in proteins]
    cache = turbo.prefill([turbo.codes.decode(ids[:begin]) for ids, begin in zip(proteins, begins, strict=True)])
    decoder = LeftToRight(turbo, cache, refresh.residues, refresh.every)
    logits = []
    with _counted(turbo) as tokens:
        for step in range(_NEW):
            logits.append(decoder.logits())
            decoder.push([ids[begin + step] for ids, begin in zip(proteins, begins, strict=True)])
    return logits, sum(tokens) / _NEW / len(proteins)


def _fill(
    turbo: TurboEsm, proteins: Sequence[list[int]], refresh: Refresh, scattered: bool
) -> tuple[list[Tensor], float]:
    """Predictions of the residues still masked, as they are filled in one after another with the true ones."""
    codes = turbo.codes
    rows = [[codes.cls, *ids, codes.eos] for ids in proteins]
    generator = np.random.default_rng(0)
    chosen, orders = [], []
    for ids in proteins:
        if scattered:
            columns = generator.choice(np.arange(1, len(ids) + 1), _LOOP, replace=False)
        else:
            columns = len(ids) // 2 + np.arange(_LOOP)
        chosen.append(sorted(columns.tolist()))
        orders.append(generator.permutation(chosen[-1]).tolist())
    batch = MaskedBatch(turbo, rows, chosen, refresh.residues, refresh.every)
    batch.put(chosen, codes.mask)
    logits = []
    with _counted(turbo) as tokens:
        for step in range(_LOOP):
            for row, (found, columns) in enumerate(zip(batch.logits(), chosen, strict=True)):
                masked = [place for place, column in enumerate(columns) if batch.rows[row][column] == codes.mask]
                logits.append(found[masked])
                column = orders[row][step]
                batch.rows[row][column] = rows[row][column]
    return logits, sum(tokens) / _LOOP / len(proteins)


class _counted:
    """Counts the tokens of every forward pass of a model, padding included."""

    def __init__(self, turbo: TurboEsm) -> None:
        self.tokens: list[int] = []
        self.executor = turbo.model.esm.executor
        forward = self.executor.forward

        def counted(inputs: ForwardInputs, cache: TurboKVCache | None) -> ModelOutput:
            self.tokens.append(inputs.ids.numel())
            return forward(inputs, cache)

        self.executor.forward = counted  # type: ignore[method-assign]

    def __enter__(self) -> list[int]:
        return self.tokens

    def __exit__(self, *error: object) -> None:
        del self.executor.forward


_cached: dict[tuple[str, int | None], tuple[list[Tensor], float]] = {}


def _whole(
    name: str,
    run: Callable[[TurboEsm, Sequence[list[int]], Refresh], tuple[list[Tensor], float]],
    max_proteins: int | None,
) -> tuple[list[Tensor], float]:
    """The same with everything recomputed at every step."""
    key = (name, max_proteins)
    if key not in _cached:
        _cached[key] = run(turbo_of("exact"), proteins(max_proteins), Refresh(ALL, 1))
    return _cached[key]


def proteins(max_proteins: int | None) -> list[list[int]]:
    codes = embedded().codes
    long = [record for record in evaluation_set(_SET)[::_STRIDE] if len(record.sequence) >= _SHORTEST]
    return [codes.encode(record.sequence, record.id) for record in long[:_PROTEINS][:max_proteins]]


@functools.cache
def turbo_of(preset: str) -> TurboEsm:
    return TurboEsm.from_pretrained(preset=preset, device="cpu")


@functools.cache
@torch.no_grad()
def check() -> Check:
    """Compare the full run with a run of Hugging Face's model at every step."""
    model = plain_model()
    turbo = turbo_of("exact")
    codes, ids = turbo.codes, proteins(1)[0]
    begin = len(ids) * 3 // 5
    appended, _ = _append(turbo, [ids], Refresh(ALL, 1))
    errors = []
    for step in (0, 1, _NEW - 1):
        plain = model(torch.tensor([[codes.cls, *ids[: begin + step], codes.mask]])).logits[0, -1]
        errors.append(float((appended[step][0] - plain).abs().max()))
    filled, _ = _fill(turbo, [ids], Refresh(ALL, 1), scattered=False)
    columns = len(ids) // 2 + torch.arange(_LOOP)
    masked = torch.tensor([codes.cls, *ids, codes.eos])
    masked[columns] = codes.mask
    errors.append(float((filled[0] - model(masked[None]).logits[0, columns]).abs().max()))
    what = "logits with everything refreshed at every step against Hugging Face's model, largest difference"
    return Check(what, worst(errors), _TOLERANCE)
