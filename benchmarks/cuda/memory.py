"""Memory of a CUDA device: extra memory of an extension."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.cuda.steps import extend
from benchmarks.harness import cuda_timing, gpu_models
from benchmarks.harness.measure import Case, Check, Figures, Target, worst
from benchmarks.harness.models import Architecture
from esm_turbo import TurboEsmModel, TurboKVCache

_PREFILLED_AT_ONCE = 8
# Hidden states of the new tokens, by two paths in bfloat16.
_TOLERANCE = 0.25


def extension_cases(
    architecture: Architecture,
    rows: int,
    context_tokens: int,
    new_tokens: Sequence[int],
    presets: Sequence[str],
    at_most: float,
) -> Iterator[Case]:
    """Peak memory of an extension beyond model and caches, after warm-up.

    Args:
        architecture: of a model of random weights.
        rows: of the batch, each with its own context.
        context_tokens: per row.
        new_tokens: per row.
        presets: of the caches.
        at_most: target for the extra memory as a share of the packed cache.
    """
    if not cuda_timing.available():
        return
    for preset in presets:
        [model] = gpu_models.presets_of(architecture, [preset]).values()
        yield Case(
            name=f"batch {rows} x {context_tokens}, {preset}",
            model=architecture.name,
            shape=architecture.on_device(
                batch_size=rows,
                context_tokens=context_tokens,
                new_tokens=list(new_tokens),
                preset=preset,
            ),
            check=partial(_check, model),
            measure=partial(_extra, model, rows, context_tokens, new_tokens),
            targets=[Target(("part_of_cache", str(n)), at_most=at_most) for n in new_tokens],
        )
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def _check(model: TurboEsmModel) -> Check:
    """Compare rows of a batch with the same contexts one by one."""
    contexts, new = (
        gpu_models.tokens(3, 299, seed=1),
        gpu_models.tokens(3, 4, cls=False, seed=2),
    )
    together = extend(model, prefilled(model, contexts), new)
    errors = []
    for row in range(len(contexts)):
        alone = extend(model, prefilled(model, contexts[row : row + 1]), new[row : row + 1])
        errors.append(float((together[row] - alone[0]).float().abs().max()))
    return Check("states after extensions of a batch and of its rows, largest difference", worst(errors), _TOLERANCE)


@torch.no_grad()
def prefilled(model: TurboEsmModel, ids: Tensor) -> TurboKVCache:
    """A cache of contexts."""
    cache: TurboKVCache = model(ids, use_cache=True).past_key_values
    return cache


def _extra(model: TurboEsmModel, rows: int, context_tokens: int, new_tokens: Sequence[int], repeats: int) -> Figures:
    one = prefilled(model, gpu_models.tokens(min(rows, _PREFILLED_AT_ONCE), context_tokens - 1, seed=4))
    if rows > one.batch_size:
        one.batch_repeat_interleave(rows // one.batch_size)
    cache = one
    packed = sum(x.nbytes for layer in cache.layers for x in layer.packed.values())
    extra = {}
    for n in new_tokens:
        new = gpu_models.tokens(rows, n, cls=False, seed=6)
        # Libraries allocate their workspaces in the first call.
        for _ in range(2):
            extend(model, cache, new)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        states = extend(model, cache, new)
        torch.cuda.synchronize()
        extra[str(n)] = torch.cuda.max_memory_allocated() - before
        del states
    dense = rows * context_tokens * 2 * model.config.num_hidden_layers * model.config.hidden_size * 2
    return {
        "bytes": {"packed": packed, "cache": cache.nbytes, "extra": extra, "dense bfloat16": dense},
        "part_of_cache": {n: size / packed for n, size in extra.items()},
    }
