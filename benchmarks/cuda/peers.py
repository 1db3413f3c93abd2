"""Attention over quantised contexts by other packages, on our shapes; each needs an optional package.

aither-kvcache reads its 4-bit codes in a kernel. Hugging Face's quantised caches, on optimum-quanto or HQQ, pass their
keys and values to an ordinary attention: a step dequantises both, appends the new token, and attends. A package that is
missing or fails is reported in the row.
"""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from benchmarks.cuda.decode_attention import (
    HEAD_DIM,
    HEADS,
    Shape,
    embedded_codec,
    name_of,
    new_tokens,
    random_context,
    sdpa,
)
from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, ratio, spread, worst
from benchmarks.harness.names import AITHER, HQQ, PACKAGES, PEER_PRESETS, PEER_SDPA, QUANTO

# Page size of aither-kvcache, its default.
_PAGE = 16
# Number of pages from which aither-kvcache splits contexts.
_SPLIT_PAGES = 64
# Kernels in float32 against the package's own PyTorch path; 4-bit caches against attention to their contents.
_TOLERANCE = 2e-2
_Built = tuple[Callable[[], object], int]
"""The timed call, and the bytes of its cache."""


def peer_cases(shapes: Sequence[Shape]) -> Iterator[Case]:
    """One row per shape, one query: peers, two of our presets, and SDPA."""
    if not cuda_timing.available():
        return
    failed: dict[str, str] = {}
    for shape in shapes:
        yield Case(
            name=name_of(shape),
            model="random keys and values",
            shape={
                "batch_size": shape[0],
                "context_tokens": shape[1],
                "queries": shape[2],
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "dtype": "bfloat16",
                "device": "cuda",
                "versions": {package: _version(package) for package in PACKAGES.values()},
            },
            check=partial(_check, failed),
            measure=partial(_measure, shape, failed),
        )


def _measure(shape: Shape, failed: dict[str, str], repeats: int) -> Figures:
    gc.collect()
    torch.cuda.empty_cache()
    query, new_keys, new_values = new = new_tokens(shape)
    size = (shape[0], HEADS, shape[1], HEAD_DIM)
    dense = [torch.randn(size, device=cuda_timing.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    built: dict[str, _Built] = {
        PEER_SDPA: (partial(sdpa, SDPBackend.FLASH_ATTENTION, query, *dense), 2 * dense[0].nbytes)
    }
    built |= {preset: _ours(preset, new, shape) for preset in PEER_PRESETS}
    failed = dict(failed)
    for name, build in _BUILDERS.items():
        if name in failed:
            continue
        try:
            built[name] = build(query, dense, (new_keys, new_values))
        except Exception as error:
            failed[name] = cuda_timing.reason(error)
            torch.cuda.empty_cache()
    captured, not_captured = cuda_timing.captured_seconds({name: call for name, (call, _) in built.items()}, repeats)
    eager, not_eager = cuda_timing.synchronized_seconds({name: call for name, (call, _) in built.items()}, repeats)
    failed |= {f"{name}, captured": why for name, why in not_captured.items()} | not_eager
    seconds = spread({f"{name}, captured": row for name, row in captured.items()})
    seconds |= spread({f"{name}, eager": row for name, row in eager.items()})
    pairs = [
        (f"{peer}, {kind}", f"{preset}, {kind}")
        for peer in (PEER_SDPA, *PACKAGES)
        for preset in PEER_PRESETS
        for kind in ("captured", "eager")
    ]
    return {
        "seconds": seconds,
        "ratios": {f"{a} / {b}": ratio(seconds, a, b) for a, b in pairs if a in seconds and b in seconds},
        "bytes": {name: size for name, (_, size) in built.items()},
        "failed": failed,
    }


def _check(failed: dict[str, str]) -> Check:
    """Check the peers that run; one that fails or is wrong is left out and reported."""
    failed.clear()
    errors = [0.0]
    for name, check in _CHECKS.items():
        try:
            error = check()
            if not error <= _TOLERANCE:
                failed[name] = f"its result is off by {error:.2g} of the largest"
            else:
                errors.append(error)
        except Exception as error:
            failed[name] = cuda_timing.reason(error)
            torch.cuda.empty_cache()
    what = "aither's kernels against its own PyTorch path, Hugging Face's caches against attention to what they return"
    return Check(f"{what}, relative to the largest", worst(errors), _TOLERANCE)


def _ours(preset: str, new: tuple[Tensor, Tensor, Tensor], shape: Shape) -> _Built:
    from esm_turbo.ops import triton_attention as triton_kernels

    codec = embedded_codec(preset)
    context = random_context(codec, shape[0], shape[1])
    call = partial(triton_kernels.extend_attention, *new, None, context, codec, 0)
    return call, sum(x.nbytes for x in context.packed.values())


def _aither(query: Tensor, dense: Sequence[Tensor], new: tuple[Tensor, Tensor]) -> _Built:
    """The kernel of aither-kvcache, without the new token, which is in its favour."""
    from turboquant import TurboQuant
    from turboquant.fused_attention import TQPagedAttention

    quantizer = TurboQuant(head_dim=HEAD_DIM, bits=4, device=cuda_timing.DEVICE)
    rows, heads, tokens, _ = dense[0].shape
    pages = -(-tokens // _PAGE)
    stored: list[Tensor] = []
    for x in dense:
        codes, norms = quantizer.encode(x.transpose(1, 2).contiguous())
        stored += [codes.view(rows * pages, _PAGE, heads, -1), norms.view(rows * pages, _PAGE, heads).contiguous()]
    attention = TQPagedAttention(quantizer, num_query_heads=heads)
    table = torch.arange(rows * pages, dtype=torch.int32, device=cuda_timing.DEVICE).view(rows, pages)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=cuda_timing.DEVICE)
    # It divides scores by the square root of the head size, which our queries already are.
    scaled = (query[:, :, 0] * HEAD_DIM**0.5).contiguous()
    call = partial(attention.forward, scaled, *stored, table, lengths, block_size=_PAGE)
    return call, sum(x.nbytes for x in stored)


def _check_aither() -> float:
    from turboquant import TurboQuant
    from turboquant.fused_attention import TQPagedAttention

    quantizer = TurboQuant(head_dim=HEAD_DIM, bits=4, device=cuda_timing.DEVICE)
    attention = TQPagedAttention(quantizer, num_query_heads=2)
    errors = []
    # A table of this many pages is read in splits, however short the context.
    for pages in (4, _SPLIT_PAGES):
        x = torch.randn(2, pages, _PAGE, 2, HEAD_DIM, device=cuda_timing.DEVICE)
        (keys, key_norms), (values, value_norms) = quantizer.encode(x[0]), quantizer.encode(x[1])
        table = torch.arange(pages, dtype=torch.int32, device=cuda_timing.DEVICE)[None]
        length = torch.full((1,), 60, dtype=torch.int32, device=cuda_timing.DEVICE)
        query = torch.randn(1, 2, HEAD_DIM, device=cuda_timing.DEVICE)
        stored = keys, key_norms, values, value_norms, table, length
        output = attention.forward(query, *stored, block_size=_PAGE)
        attention._ref.num_kv_heads, attention._ref.gqa_ratio, attention._ref.block_size = 2, 1, _PAGE
        expected = attention._ref.forward(query, *stored)
        errors.append(float((output - expected).abs().max() / expected.abs().max()))
    return worst(errors)


def _hugging_face(layer_class: str, axis: int, query: Tensor, dense: Sequence[Tensor], new: Sequence[Tensor]) -> _Built:
    layer = _layer(layer_class, axis)
    layer.update(*dense)
    return partial(_step, layer, query, *new), _stored_bytes(layer)


def _step(layer: Any, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The `update` of the cache and the attention that follows, without growing the cache."""
    past = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    both = [torch.cat(pair, dim=2) for pair in zip(past, (keys, values), strict=True)]
    return functional.scaled_dot_product_attention(query, *both, scale=1.0)


def _check_hugging_face(layer_class: str, axis: int) -> float:
    shape = (2, 128, 1)
    query, *new = new_tokens(shape)
    dense = [torch.randn(2, HEADS, 128, HEAD_DIM, device=cuda_timing.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    layer = _layer(layer_class, axis)
    layer.update(*dense)
    output = _step(layer, query, *new).float()
    keys, values = (x.float() for x in layer.update(*new))
    expected = torch.softmax(query.float() @ keys.transpose(2, 3), dim=-1) @ values
    return float((output - expected).abs().max() / expected.abs().max())


def _layer(layer_class: str, axis: int) -> Any:
    from transformers import cache_utils

    return getattr(cache_utils, layer_class)(4, axis, axis, 64)


def _stored_bytes(layer: Any) -> int:
    """Bytes of codes, scales and shifts; 0 for an unknown kind."""
    total = 0
    for stored in (layer._quantized_keys, layer._quantized_values):
        tensors: list[Any] = []
        if isinstance(stored, tuple):
            tensors = [stored[0], stored[1]["scale"], stored[1]["zero"]]
        elif hasattr(stored, "_scale"):
            tensors = [getattr(stored._data, "_data", stored._data), stored._scale, stored._shift]
        total += sum(x.numel() * x.element_size() for x in tensors)
    return total


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_BUILDERS: dict[str, Callable[..., _Built]] = {
    AITHER: _aither,
    HQQ: partial(_hugging_face, "HQQQuantizedLayer", 1),
    QUANTO: partial(_hugging_face, "QuantoQuantizedLayer", 0),
}
_CHECKS: dict[str, Callable[[], float]] = {
    AITHER: _check_aither,
    HQQ: partial(_check_hugging_face, "HQQQuantizedLayer", 1),
    QUANTO: partial(_check_hugging_face, "QuantoQuantizedLayer", 0),
}
