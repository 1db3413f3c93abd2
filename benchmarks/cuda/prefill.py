"""Cost of writing a cache on a CUDA device: forward passes with and without, and encoding alone, eager and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EsmModel

from benchmarks.cuda import compile_ahead
from benchmarks.cuda.steps import forward
from benchmarks.harness import cuda_timing, gpu_models
from benchmarks.harness.measure import Case, Check, Figures, Target, ratio, worst
from benchmarks.harness.models import Architecture
from esm_turbo import TurboEsmModel
from esm_turbo.kv_cache import Append
from esm_turbo.model.sessions import Prefill

PLAIN = "forward"
# Hidden states of size one in bfloat16.
_TOLERANCE = 0.05
_KINDS = ("eager", "captured")


def prefill_cases(
    architecture: Architecture,
    tokens: Sequence[int],
    presets: Sequence[str],
    targets: Mapping[int, Sequence[Target]],
) -> Iterator[Case]:
    """One row per length, batch of one, bfloat16; the arms `encode` include all layers."""
    if not cuda_timing.available():
        return
    models = gpu_models.presets_of(architecture, presets)
    plain, _ = gpu_models.calibrated(architecture)
    compile_ahead.model([model.codec(model.turbo_config) for model in models.values()], [(1, n, 0) for n in tokens])
    for n in tokens:
        ids = gpu_models.tokens(1, n - 2, eos=True, seed=3)
        yield Case(
            name=f"{n} tokens",
            model=architecture.name,
            shape=architecture.on_device(
                tokens=n,
            ),
            check=partial(_check, plain, models, ids),
            measure=partial(_measure, plain, models, ids),
            targets=targets.get(n, ()),
        )


def _measure(plain: EsmModel, models: dict[str, TurboEsmModel], ids: Tensor, repeats: int) -> Figures:
    eager: dict[str, Callable[[], object]] = {PLAIN: partial(forward, plain, ids)}
    inside: dict[str, Callable[[], object]] = dict(eager)
    for preset, model in models.items():
        eager[f"prefill {preset}"] = partial(_prefill, model, ids)
        inside[f"prefill {preset}"] = _planned(model, ids)
        inside[f"encode {preset}"] = eager[f"encode {preset}"] = encoding(model, ids)
    times, failed = cuda_timing.synchronized_seconds(eager, repeats)
    captured, not_captured = cuda_timing.captured_seconds(inside, repeats)
    figures = cuda_timing.figures(
        _named(times, "eager") | _named(captured, "captured"),
        _named(failed, "eager") | _named(not_captured, "captured"),
    )
    seconds = figures["seconds"]
    ratios, overhead = {}, {}
    for kind in _KINDS:
        for preset in models:
            base, prefill, encode = f"{PLAIN}, {kind}", f"prefill {preset}, {kind}", f"encode {preset}, {kind}"
            if base in seconds and encode in seconds:
                ratios[f"{encode} / {PLAIN}"] = ratio(seconds, encode, base)
            if base in seconds and prefill in seconds:
                ratios[f"{prefill} / {PLAIN}"] = ratio(seconds, prefill, base)
                overhead[f"{preset}, {kind}"] = seconds[prefill]["p50"] - seconds[base]["p50"]
    return figures | {"ratios": ratios, "overhead_seconds": overhead}


def encoding(model: TurboEsmModel, ids: Tensor) -> Callable[[], Append]:
    """A call that encodes the keys and values of all layers; they and the plan are computed in advance."""
    record = gpu_models.Recorder()
    with torch.no_grad():
        model(ids, kv_session=record)
    cache = model.new_cache()
    append = cache.plan_append(ids, torch.ones_like(ids, dtype=torch.bool), None, model.special_ids)

    def encode() -> Append:
        append.layers.clear()
        append.counters = None
        for layer_idx, (_, keys, values) in enumerate(record.layers):
            cache.stage(append, layer_idx, keys, values, model.kv_backend)
        return append

    return encode


def _planned(model: TurboEsmModel, ids: Tensor) -> Callable[[], Tensor]:
    """A forward pass that encodes, without planning the append and committing it to the cache."""
    cache = model.new_cache()
    append = cache.plan_append(ids, torch.ones_like(ids, dtype=torch.bool), None, model.special_ids)

    def prefill() -> Tensor:
        append.layers.clear()
        append.counters = None
        with torch.no_grad():
            session = Prefill(cache, append, model.kv_backend)
            output: Tensor = model(ids, kv_session=session).last_hidden_state
        return output

    return prefill


def _prefill(model: TurboEsmModel, ids: Tensor) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True)


def _check(plain: EsmModel, models: dict[str, TurboEsmModel], ids: Tensor) -> Check:
    """Compare the hidden states of the prefill with those of the plain forward pass."""
    expected = forward(plain, ids)
    errors = []
    for model in models.values():
        output = _prefill(model, ids)
        stored = output.past_key_values.get_seq_length() == ids.shape[1]
        difference = float((output.last_hidden_state - expected).float().abs().max())
        errors.append(difference if stored else float("inf"))
    what = "hidden states of the prefill against Hugging Face's forward, largest difference"
    return Check(what, worst(errors), _TOLERANCE)


def _named(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {f"{name}, {kind}": value for name, value in values.items()}
