"""A whole extension of a context on a CUDA device, eager and captured, and recomputing all tokens without a cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import cuda_timing, gpu_models
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, spread, worst
from benchmarks.harness.models import Architecture
from esm_turbo import TurboEsmModel, TurboKVCache
from esm_turbo.model.static_cache import StaticKVCache

RECOMPUTE = "recompute"
# Two paths through all layers in bfloat16; hidden states after the last layer norm are of size one.
_TOLERANCE = 0.25


def step_cases(
    architecture: Architecture,
    context_tokens: int,
    new_tokens: Sequence[int],
    presets: Sequence[str],
    at_most: float | None = None,
) -> Iterator[Case]:
    """One row per number of new tokens, batch of one, bfloat16.

    Args:
        architecture: of a model of random weights.
        context_tokens: of the context.
        new_tokens: of the extensions.
        presets: of the cache.
        at_most: target for the seconds of a captured extension with a compressed cache.
    """
    if not cuda_timing.available():
        return
    models = gpu_models.presets_of(architecture, presets)
    context = gpu_models.tokens(1, context_tokens - 1, seed=3)
    caches = {preset: _cached(model, context) for preset, model in models.items()}
    for n in new_tokens:
        new = gpu_models.tokens(1, n, cls=False, seed=2)
        yield Case(
            name=f"{n} on {context_tokens}",
            model=architecture.name,
            shape=architecture.on_device(
                context_tokens=context_tokens,
                new_tokens=n,
            ),
            check=partial(_check, models, caches, new),
            measure=partial(_measure, gpu_models.calibrated(architecture)[0], models, caches, context, new),
            targets=[
                Target(("seconds", f"extend {preset}, captured", "p50"), at_most=at_most)
                for preset in presets
                if at_most is not None and preset != "exact"
            ],
        )
        gc.collect()
        torch.cuda.empty_cache()


def extend(model: TurboEsmModel, cache: TurboKVCache, new: Tensor) -> Tensor:
    """Hidden states of new tokens, without changing the cache."""
    with torch.no_grad():
        output: Tensor = model(new, past_key_values=cache).last_hidden_state
    return output


def _cached(model: TurboEsmModel, context: Tensor) -> TurboKVCache:
    with torch.no_grad():
        cache: TurboKVCache = model(context, use_cache=True).past_key_values
    return cache


def _check(models: dict[str, TurboEsmModel], caches: dict[str, TurboKVCache], new: Tensor) -> Check:
    errors = []
    for preset, model in models.items():
        output = extend(model, caches[preset], new)
        model.kv.backend = "torch"
        try:
            expected = extend(model, caches[preset], new)
        finally:
            model.kv.backend = "auto"
        errors.append(largest_difference(output, expected))
    what = "hidden states of the new tokens, kernels against PyTorch in bfloat16, largest difference over all presets"
    return Check(what, worst(errors), _TOLERANCE)


def _measure(
    plain: Any,
    models: dict[str, TurboEsmModel],
    caches: dict[str, TurboKVCache],
    context: Tensor,
    new: Tensor,
    repeats: int,
) -> Figures:
    whole = torch.cat([context, new], dim=1)
    arms: dict[str, Callable[[], object]] = {f"{RECOMPUTE}, eager": partial(forward, plain, whole)}
    failed, differences = {}, {}
    kept: list[StaticKVCache] = []
    for preset, model in models.items():
        arms[f"extend {preset}, eager"] = partial(extend, model, caches[preset], new)
        try:
            static, found = StaticKVCache.like(caches[preset]), list[Tensor]()
            # A graph knows only addresses.
            kept.append(static)
            captured = cuda_timing.capture(partial(_append_states, found, model, static, new))
            arms[f"extend {preset}, captured"] = captured.replay
            captured.replay()
            differences[preset] = largest_difference(found[-1], extend(model, caches[preset], new))
        except Exception as error:
            failed[f"extend {preset}, captured"] = cuda_timing.reason(error)
    try:
        # After the others, which share and move its parameters.
        outputs: list[Tensor] = []
        graph = cuda_timing.capture(lambda: outputs.append(forward(plain, whole)))
        arms[f"{RECOMPUTE}, captured"] = graph.replay
        graph.replay()
        differences[RECOMPUTE] = largest_difference(outputs[-1], forward(plain, whole))
    except Exception as error:
        failed[f"{RECOMPUTE}, captured"] = cuda_timing.reason(error)
    times, more = cuda_timing.synchronized_seconds(arms, repeats)
    figures = cuda_timing.figures(times, failed | more)
    median = {name: row["p50"] for name, row in spread(times).items()}
    ratios = {}
    for kind in ("eager", "captured"):
        for preset in models:
            names = f"{RECOMPUTE}, {kind}", f"extend {preset}, {kind}"
            if all(name in median for name in names):
                ratios[" / ".join(names)] = median[names[0]] / median[names[1]]
    return figures | {
        "ratios": ratios,
        "captured against eager, largest difference": differences,
        "bytes": {
            "weights": sum(parameter.nbytes for parameter in plain.parameters()),
            **{preset: cache.nbytes for preset, cache in caches.items()},
        },
    }


def _append_states(found: list[Tensor], model: TurboEsmModel, cache: TurboKVCache, new: Tensor) -> None:
    found.append(extend(model, cache, new))


def forward(model: Any, ids: Tensor) -> Tensor:
    """Hidden states without a cache."""
    with torch.no_grad():
        output: Tensor = model(ids).last_hidden_state
    return output
