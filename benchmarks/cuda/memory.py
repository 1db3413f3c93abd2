"""Memory of a CUDA device: extra memory of an extension, and number of contexts that fit with a model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
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


Resident = Callable[[TurboEsmModel, int, int, int, float], Figures]
"""Fills a device: a model, tokens per context, contexts per batch, bytes to leave free, and seconds at most."""


def resident_cases(
    architecture: Architecture,
    preset: str,
    tokens: int,
    at_once: int,
    spare: int,
    seconds: float,
    at_least: int,
    *,
    place: str = "",
    check: Callable[[TurboEsmModel], Check] | None = None,
    resident: Resident | None = None,
) -> Iterator[Case]:
    """Contexts of different random proteins, encoded batch by batch until the device is full.

    Args:
        architecture: of a model of random weights.
        preset: of the caches.
        tokens: per context.
        at_once: contexts per batch.
        spare: bytes of the device to leave free.
        seconds: after which encoding stops.
        at_least: target for the number of contexts.
        place: of the contexts, as the case's name shows it.
        check: of the results; None compares rows of a batch with the same contexts one by one.
        resident: takes the measurement; None keeps the batches as they are.
    """
    if not cuda_timing.available():
        return
    [model] = gpu_models.presets_of(architecture, [preset]).values()
    fill = _resident if resident is None else resident
    yield Case(
        name=f"contexts of {tokens} tokens{place}, {preset}",
        model=architecture.name,
        shape=architecture.on_device(
            tokens=tokens,
            batch_size=at_once,
            spare_bytes=spare,
            seconds_at_most=seconds,
            device_bytes=torch.cuda.get_device_properties(0).total_memory,
            preset=preset,
        ),
        check=partial(_check if check is None else check, model),
        measure=lambda repeats: fill(model, tokens, at_once, spare, seconds),
        targets=[Target(("contexts",), at_least=at_least)],
    )


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


def _resident(model: TurboEsmModel, tokens: int, at_once: int, spare: int, seconds: float) -> Figures:
    gc.collect()
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated()
    caches: list[TurboKVCache] = []
    begin, stopped_by = time.perf_counter(), "memory"
    while _free() > spare + _needed(model, tokens, at_once):
        if time.perf_counter() - begin > seconds:
            stopped_by = "time"
            break
        try:
            caches.append(prefilled(model, proteins(tokens, at_once, len(caches))))
        except torch.OutOfMemoryError as error:
            print(f"  {cuda_timing.reason(error)}")
            torch.cuda.empty_cache()
            break
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    held = torch.cuda.memory_allocated() - empty
    count = at_once * len(caches)
    total = torch.cuda.get_device_properties(0).total_memory
    found: Figures = {
        "contexts": count,
        "stopped_by": stopped_by,
        "seconds_for_all": took,
        "distinct_token_sequences": _distinct(caches),
        "read_again": _read_again(model, caches, tokens, at_once),
        "bytes": {
            "of a context": sum(cache.nbytes for cache in caches) / max(count, 1),
            "of a context, allocated": held / max(count, 1),
            "allocated in all": held,
            "model": sum(parameter.nbytes for parameter in model.parameters()),
            "device": total,
        },
    }
    if stopped_by == "time" and count:
        found["contexts_extrapolated"] = int((total - spare - empty) / (held / count))
    return found


def proteins(tokens: int, at_once: int, batch: int) -> Tensor:
    """The tokens of a batch of random proteins, others for each number of a batch."""
    return gpu_models.tokens(at_once, tokens - 1, seed=1000 + batch)


def _free() -> int:
    """Free bytes of the device, including those reserved by the allocator."""
    return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _needed(model: TurboEsmModel, tokens: int, at_once: int) -> int:
    """Upper bound of the temporary memory of a prefill: a few arrays as wide as the feed-forward network."""
    return 6 * at_once * tokens * int(model.config.intermediate_size) * 2


def _distinct(caches: Sequence[TurboKVCache]) -> int:
    """Number of distinct contexts, by all their tokens."""
    return len({row.tobytes() for cache in caches for row in cache.token_ids.cpu().numpy()})


def _read_again(model: TurboEsmModel, caches: Sequence[TurboKVCache], tokens: int, at_once: int) -> Figures:
    """Compare extensions of the first, a middle and the last batch with those of the same contexts encoded again."""
    new = gpu_models.tokens(at_once, 1, cls=False, seed=2)
    differences = []
    torch.cuda.empty_cache()
    places = sorted({0, len(caches) // 2, len(caches) - 1}) if caches else []
    for place in places:
        again = prefilled(model, proteins(tokens, at_once, place))
        difference = extend(model, caches[place], new) - extend(model, again, new)
        differences.append(float(difference.float().abs().max()))
    return {"batches": len(places), "largest_difference": worst(differences) if differences else 0.0}
