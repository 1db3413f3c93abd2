"""Many targets in one batch on a CUDA device: rates against one target, and a full pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.cuda.memory import prefilled
from benchmarks.cuda.steps import extend
from benchmarks.harness import cuda_timing, gpu_models
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, spread, worst
from benchmarks.harness.models import Architecture
from esm_turbo import TurboEsmModel, TurboKVCache
from esm_turbo.store.flat import ContextSpec, FlatContext
from esm_turbo.store.pool import ContextPool, PoolHold

ONE, MANY = "one target", "many targets"
# Hidden states of the new tokens, by two paths in bfloat16.
_TOLERANCE = 0.25


def pool_cases(
    architecture: Architecture,
    preset: str,
    targets: int,
    lengths: tuple[int, int],
    peptides: int,
    rows_per_peptide: int,
    new_tokens: int,
    rows_at_once: int,
    at_least: float,
) -> Iterator[Case]:
    """Rows of peptides on many targets of a pool, in random order, against as many rows on one target.

    Args:
        architecture: of a model of random weights.
        preset: of the contexts.
        targets: in the pool, all of which are read.
        lengths: shortest and longest target, in tokens.
        peptides: per target.
        rows_per_peptide: one for each of its residues.
        new_tokens: per row.
        rows_at_once: rows of a batch.
        at_least: target for the rate of many targets as a part of that of one.
    """
    if not cuda_timing.available():
        return
    [model] = gpu_models.presets_of(architecture, [preset]).values()
    yield Case(
        name=f"{targets} targets x {peptides} peptides, {preset}",
        model=architecture.name,
        shape=architecture.on_device(
            batch_size=rows_at_once,
            targets=targets,
            context_tokens=list(lengths),
            peptides=peptides,
            rows=targets * peptides * rows_per_peptide,
            new_tokens=new_tokens,
            preset=preset,
        ),
        check=partial(_check, model, new_tokens),
        measure=partial(_rates, model, targets, lengths, peptides * rows_per_peptide, new_tokens, rows_at_once),
        targets=[Target(("ratios", f"{MANY} / {ONE}"), at_least=at_least)],
    )


@torch.no_grad()
def _check(model: TurboEsmModel, new_tokens: int) -> Check:
    """Compare rows that name contexts of a pool with the same contexts one by one."""
    lengths, index = (70, 20, 130), [2, 0, 1, 0]
    caches = [prefilled(model, gpu_models.tokens(1, length - 1, seed=length)) for length in lengths]
    new = gpu_models.tokens(len(index), new_tokens, cls=False, seed=2)
    pool = ContextPool(2**28)
    hold, keys = pool.hold(), [("check", str(number)) for number in range(len(caches))]
    for key, cache in zip(keys, caches, strict=True):
        _put(pool, hold, key, cache)
    contexts = hold.contexts(keys, _spec(model, caches[0]))
    with torch.no_grad():
        together = model(new, past_key_values=contexts, context_index=index).last_hidden_state
    errors = [
        largest_difference(together[row], extend(model, caches[context], new[row : row + 1])[0])
        for row, context in enumerate(index)
    ]
    return Check(
        "states of rows that name contexts of a pool, and one by one, largest difference", worst(errors), _TOLERANCE
    )


def _spec(model: TurboEsmModel, cache: TurboKVCache) -> ContextSpec:
    assert cache.codec is not None
    return ContextSpec(cache.config, cache.geometry, cache.identity, cache.codec, "random")


def _put(pool: ContextPool, hold: PoolHold, key: tuple[str, str], cache: TurboKVCache) -> bool:
    """Put a cache of one row into a pool and hold it there; whether there was room."""
    return pool.put(key, FlatContext.of(cache), cache.device) and hold.add(key, cache.device)


@torch.no_grad()
def _rates(
    model: TurboEsmModel,
    targets: int,
    lengths: tuple[int, int],
    rows_per_target: int,
    new_tokens: int,
    rows_at_once: int,
    repeats: int,
) -> Figures:
    generator = np.random.default_rng(0)
    pool = ContextPool(2**36)
    hold, keys = pool.hold(), [("targets", str(number)) for number in range(targets)]
    longest = prefilled(model, gpu_models.tokens(1, lengths[1] - 1, seed=0))
    for number, key in enumerate(keys):
        length = int(generator.integers(lengths[0], lengths[1] + 1))
        if not _put(pool, hold, key, prefilled(model, gpu_models.tokens(1, length - 1, seed=1 + number))):
            raise MemoryError("the pool is full")
    contexts = hold.contexts(keys, _spec(model, longest))
    # The mean length, so that one target costs as much to read as many.
    length = int(contexts.lengths.float().mean())
    one = prefilled(model, gpu_models.tokens(1, length - 1, seed=0))
    of_target = generator.permutation(targets)
    rows = np.repeat(of_target, rows_per_target)
    batches = [rows[start : start + rows_at_once].tolist() for start in range(0, len(rows), rows_at_once)]
    new = gpu_models.tokens(rows_at_once, new_tokens, cls=False, seed=2)

    def many() -> None:
        for index in batches:
            _states(model, contexts, new[: len(index)], index)

    def single(cache: TurboKVCache) -> None:
        for index in batches:
            _states(model, cache, new[: len(index)], None)

    arms: dict[str, Callable[[], object]] = {
        MANY: many,
        ONE: partial(single, one),
        f"{ONE}, decoded once": partial(single, model.decoded(one)),
    }
    times, failed = cuda_timing.synchronized_seconds(arms, min(repeats, 5))
    figures = cuda_timing.figures(times, failed)
    median = {name: row["p50"] for name, row in spread(times).items()}
    fastest = min(median[name] for name in median if name != MANY)
    return figures | {
        "per_second": {name: len(rows) / seconds for name, seconds in median.items()},
        "ratios": {f"{MANY} / {ONE}": fastest / median[MANY]},
        "pool": pool.info(),
    }


def _states(model: TurboEsmModel, cache: TurboKVCache, new: Tensor, index: list[int] | None) -> Tensor:
    states: Tensor = model(new, past_key_values=cache, context_index=index).last_hidden_state
    return states
