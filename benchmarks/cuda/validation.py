"""The paper's tables 2, 3 and 6 in the 650M geometry on a CUDA device: prefills, kernels, decode attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import EsmForMaskedLM, EsmModel

from benchmarks.cuda import compile_ahead
from benchmarks.harness import cuda_timing, gpu_models
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, worst
from benchmarks.harness.models import Architecture, with_head
from esm_turbo import TurboEsmForMaskedLM, TurboEsmModel, TurboKVCache
from esm_turbo.codecs import KVCodec, PackedContext
from esm_turbo.model.sessions import Extension
from esm_turbo.ops.backends import KVBackend, TorchBackend, TritonBackend

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Relative to the largest output of a layer.
_TOLERANCE = {"bfloat16": 3e-2, "float32": 1e-3}
Layers = list[tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values of every layer."""


def similarity_cases(architecture: Architecture, tokens: Sequence[int], preset: str) -> Iterator[Case]:
    """Table 2: hidden states of all layers and logits, our prefill against Hugging Face's forward pass."""
    if not cuda_timing.available():
        return
    for name, dtype in _DTYPES.items():
        models = _with_heads(architecture, dtype, preset)
        for n in tokens:
            ids = gpu_models.tokens(1, n - 2, eos=True, seed=n)
            yield Case(
                name=f"{n} tokens, {name}",
                model=architecture.name,
                shape=architecture.on_device(dtype=name, tokens=n, preset=preset),
                check=lambda: Check("nothing is timed: the figures are differences", 0.0, 0.0),
                measure=lambda repeats, models=models, ids=ids: _similarity(*models, ids),  # type: ignore[misc]
            )


def kernel_cases(
    architecture: Architecture, context_tokens: int, new_tokens: Sequence[int], presets: Sequence[str]
) -> Iterator[Case]:
    """Table 3: attention of every layer over packed contexts against dense attention in float64."""
    if not cuda_timing.available():
        return
    codecs = [model.codec(model.turbo_config) for model in gpu_models.presets_of(architecture, presets).values()]
    compile_ahead.model(codecs, [(1, context_tokens, n) for n in (0, *new_tokens)], list(_DTYPES.values()))
    for n in new_tokens:
        ids, layers = _recorded(architecture, context_tokens + n)
        for name, dtype in _DTYPES.items():
            typed = [(q.to(dtype), k.to(dtype), v.to(dtype)) for q, k, v in layers]
            for preset, model in gpu_models.presets_of(architecture, presets).items():
                found: Figures = {}

                def check(
                    model: TurboEsmModel = model, typed: Layers = typed, found: Figures = found, name: str = name,
                    ids: Tensor = ids,
                ) -> Check:  # fmt: skip
                    found |= _validate(model, ids[:, :context_tokens], typed)
                    what = "output of a layer against dense attention in float64, largest relative to the largest"
                    return Check(what, worst(found["relative_errors"]), _TOLERANCE[name])

                yield Case(
                    name=f"{preset}, {n} on {context_tokens}, {name}",
                    model=architecture.name,
                    shape=architecture.on_device(
                        dtype=name, context_tokens=context_tokens, new_tokens=n, preset=preset
                    ),
                    check=check,
                    measure=lambda repeats, found=found: found,  # type: ignore[misc]
                    targets=[Target(("ratios", "error / SDPA's error"), at_most=2.0)],
                )


def decode_cases(architecture: Architecture, context_tokens: Sequence[int], presets: Sequence[str]) -> Iterator[Case]:
    """Table 6: attention of one new token in all layers, by the kernels and by PyTorch, eager and captured."""
    if not cuda_timing.available():
        return
    for n in context_tokens:
        ids, layers = _recorded(architecture, n + 1)
        caches = {
            preset: _encoded(model, ids[:, :n], layers)
            for preset, model in gpu_models.presets_of(architecture, presets).items()
        }
        yield Case(
            name=f"1 on {n}",
            model=architecture.name,
            shape=architecture.on_device(context_tokens=n, new_tokens=1),
            check=partial(_check_decode, caches, layers),
            measure=partial(_measure_decode, caches, layers),
        )


def _with_heads(
    architecture: Architecture, dtype: torch.dtype, preset: str
) -> tuple[EsmForMaskedLM, TurboEsmForMaskedLM]:
    model, calibration = gpu_models.calibrated(architecture)
    if dtype != torch.bfloat16:
        model = copy.deepcopy(model).to(dtype)
    whole = with_head(model)
    return whole, TurboEsmForMaskedLM.from_esm(whole, calibration=calibration, preset=preset)


@torch.no_grad()
def _similarity(plain: EsmForMaskedLM, turbo: TurboEsmForMaskedLM, ids: Tensor) -> Figures:
    expected = plain(ids, output_hidden_states=True)
    output = turbo(ids, use_cache=True, output_hidden_states=True)
    pairs = list(zip(output.hidden_states, expected.hidden_states, strict=True))
    cosines = [_cosine(ours, theirs) for ours, theirs in pairs]
    return {
        "layers": len(pairs) - 1,
        "stored_tokens": output.past_key_values.get_seq_length(),
        "hidden_states": {
            "cosine_mean_by_layer": [mean for mean, _ in cosines],
            "cosine_min": min(lowest for _, lowest in cosines),
            "largest_difference": worst(largest_difference(ours, theirs) for ours, theirs in pairs),
        },
        "logits": {
            "cosine_mean": _cosine(output.logits, expected.logits)[0],
            "cosine_min": _cosine(output.logits, expected.logits)[1],
            "largest_difference": largest_difference(output.logits, expected.logits),
        },
    }


@torch.no_grad()
def _validate(model: TurboEsmModel, context: Tensor, layers: Layers) -> Figures:
    """Errors of the kernels, and of PyTorch in the same dtype, on the decoded contexts."""
    n = context.shape[1]
    cache = _encoded(model, context, layers)
    kernel, dense = Extension(cache, TritonBackend(), None, None), _Dense()
    decoded = Extension(cache, dense, None, None)
    rows = []
    for layer_idx, (query, keys, values) in enumerate(layers):
        new = query[:, :, n:], keys[:, :, n:], values[:, :, n:]
        output = kernel.attend(layer_idx, *new)
        expected = decoded.attend(layer_idx, *new)
        largest = float(expected.abs().max())
        assert dense.same_dtype is not None
        error = largest_difference(output, expected)
        of_pytorch = largest_difference(dense.same_dtype, expected) / largest
        rows.append((error, error / largest, of_pytorch, *_cosine(output, expected)))
    errors, relative, relative_of_pytorch, means, lowest = (list(column) for column in zip(*rows, strict=True))
    return {
        "layers": len(rows),
        "absolute_errors": errors,
        "relative_errors": relative,
        "relative_errors_of_sdpa": relative_of_pytorch,
        "ratios": {"error / SDPA's error": worst(relative) / worst(relative_of_pytorch)},
        "cosine_means": means,
        "cosine_min": min(lowest),
    }


class _Dense(KVBackend):
    """A backend that decodes the whole context and attends to it in float64; one row, only the mask of the cache."""

    def __init__(self) -> None:
        self.same_dtype: Tensor | None = None

    def extend_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, context: PackedContext, codec: KVCodec,
        layer_idx: int,
    ) -> Tensor:  # fmt: skip
        past = codec.decode(layer_idx, context.packed | context.rows)
        if context.mask is not None:
            past = past[0][:, :, context.mask[0]], past[1][:, :, context.mask[0]]
        parts = [past, (keys.float(), values.float())]
        if context.protected:
            assert context.protected_mask is not None
            here = torch.zeros(1, context.protected["keys"].shape[2], dtype=torch.int64, device=query.device)
            both = codec.inverse_transform(layer_idx, context.protected["keys"], context.protected["values"], here)
            shown = context.protected_mask[0]
            parts.append((both[0][:, :, shown], both[1][:, :, shown]))
        all_keys, all_values = (torch.cat([part[kind] for part in parts], dim=2) for kind in (0, 1))
        self.same_dtype = functional.scaled_dot_product_attention(
            query, all_keys.to(query.dtype), all_values.to(query.dtype), scale=1.0
        )
        weights = torch.softmax(query.double() @ all_keys.double().transpose(2, 3), dim=-1)
        return weights @ all_values.double()


@torch.no_grad()
def _recorded(architecture: Architecture, tokens: int) -> tuple[Tensor, Layers]:
    [model] = gpu_models.presets_of(architecture, ["exact"]).values()
    ids, record = gpu_models.tokens(1, tokens - 1, seed=5), gpu_models.Recorder()
    EsmModel.forward(model, ids, kv_session=record)
    return ids, record.layers


@torch.no_grad()
def _encoded(model: TurboEsmModel, context: Tensor, layers: Layers) -> TurboKVCache:
    """A cache of the keys and values of the first tokens."""
    cache, n = model.new_cache(), context.shape[1]
    append = cache.plan_append(context, torch.ones_like(context, dtype=torch.bool), None, model.special_ids)
    for layer_idx, (_, keys, values) in enumerate(layers):
        cache.stage(append, layer_idx, keys[:, :, :n], values[:, :, :n], model.kv_backend)
    cache.commit(append)
    return cache


def _attend_all(session: Extension, new: Layers) -> Tensor:
    output = new[0][0]
    for layer_idx, tokens in enumerate(new):
        output = session.attend(layer_idx, *tokens)
    return output


def _decode_arms(caches: dict[str, TurboKVCache], layers: Layers) -> dict[str, Callable[[], Tensor]]:
    new = [(query[:, :, -1:], keys[:, :, -1:], values[:, :, -1:]) for query, keys, values in layers]
    arms: dict[str, Callable[[], Tensor]] = {}
    for preset, cache in caches.items():
        for name, backend in (("kernels", TritonBackend()), ("PyTorch", TorchBackend())):
            arms[f"{preset}, {name}"] = partial(_attend_all, Extension(cache, backend, None, None), new)
    return arms


@torch.no_grad()
def _check_decode(caches: dict[str, TurboKVCache], layers: Layers) -> Check:
    arms = _decode_arms(caches, layers)
    errors = []
    for preset in caches:
        output, expected = arms[f"{preset}, kernels"]().float(), arms[f"{preset}, PyTorch"]().float()
        errors.append(float((output - expected).abs().max() / expected.abs().max()))
    what = "last layer's output, kernels against PyTorch, largest difference relative to the largest"
    return Check(what, worst(errors), _TOLERANCE["bfloat16"])


@torch.no_grad()
def _measure_decode(caches: dict[str, TurboKVCache], layers: Layers, repeats: int) -> Figures:
    arms = _decode_arms(caches, layers)
    eager, failed = cuda_timing.synchronized_seconds(arms, repeats)
    captured, not_captured = cuda_timing.captured_seconds(arms, repeats)
    times = {f"{name}, eager": row for name, row in eager.items()}
    times |= {f"{name}, captured": row for name, row in captured.items()}
    figures = cuda_timing.figures(times, failed | {f"{name}, captured": why for name, why in not_captured.items()})
    median = {name: row["p50"] for name, row in figures["seconds"].items()}
    ratios = {}
    for preset in caches:
        for kind in ("eager", "captured"):
            names = f"{preset}, PyTorch, {kind}", f"{preset}, kernels, {kind}"
            if all(name in median for name in names):
                ratios[" / ".join(names)] = median[names[0]] / median[names[1]]
    return figures | {"ratios": ratios}


def _cosine(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean and minimum over tokens (and heads)."""
    cosines = torch.cosine_similarity(ours.double(), theirs.double(), dim=-1)
    return float(cosines.mean()), float(cosines.min())
