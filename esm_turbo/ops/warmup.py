"""All variants of all kernels that a model's calls launch, whatever their lengths, batches and numbers of candidates.

The launchers themselves say which: they run on empty tensors of few shapes, and their launches are listed.
`tests/ops/test_warmup.py` compares the list with what calls launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esm_turbo.codecs import ExactCodec, KVCodec, PackedContext, TurboCodec
from esm_turbo.ops import copies, decoded_attention, triton_attention, triton_encode, triton_encoder, triton_layer
from esm_turbo.ops.compilation import compile_together
from esm_turbo.ops.triton_launch import capability_of, per_codec, recorded
from esm_turbo.ops.triton_layout import key_view, value_view
from esm_turbo.ops.variants import Variant

# Rows and new tokens: a single query of one context and of many, few queries and many of them.
_EXTENSIONS = ((1, 1), (256, 1), (1, 8), (1, 16))
_COLUMNS = 64
_HALF = (torch.float16, torch.bfloat16)
_compiling = threading.Lock()


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        heads: per layer.
        head_dim: components per head.
        operations: names of those that packed layers run, see `triton_encoder`; empty where nothing runs packed.
    """

    heads: int
    head_dim: int
    operations: frozenset[str] = frozenset()


def compile_ahead(sizes: Sizes, codecs: Sequence[KVCodec], dtype: torch.dtype, device: torch.device) -> int:
    """Compiles what calls of a model on a CUDA device need, side by side, unless Triton's cache holds it; once.

    Args:
        sizes: of the model.
        codecs: of the caches; none for forwards without caches.
        dtype: of the model.
        device: of the model.

    Returns:
        Number of kernels that calls need.

    Raises:
        KernelError: a kernel does not compile.
        KernelCacheError: the cache of compiled kernels cannot be used.
    """
    with _compiling:
        if not codecs:
            return _compile_encoder(sizes, dtype, device)
        if len(codecs) == 1:
            return _compile(codecs[0], sizes, dtype, device)
        return _compile_codecs(codecs, sizes, dtype, device)


@functools.cache
def _compile_encoder(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> int:
    return _compile_codecs((), sizes, dtype, device)


@per_codec
def _compile(codec: KVCodec, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> int:
    return _compile_codecs((codec,), sizes, dtype, device)


def _compile_codecs(codecs: Sequence[KVCodec], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> int:
    capability = _capability(device)
    variants = encoder_variants(sizes, dtype, device, capability)
    for codec in codecs:
        variants += cache_variants(codec, sizes, dtype, device, capability)
    distinct = list(dict.fromkeys(variants))
    compile_together(distinct)
    return len(distinct)


def _capability(device: torch.device) -> int:
    major, minor = capability_of(device)
    return 10 * major + minor


@torch.inference_mode(False)
@torch.no_grad()
def encoder_variants(sizes: Sizes, dtype: torch.dtype, device: torch.device, capability: int) -> list[Variant]:
    """List the variants that the packed encoder launches; none where it does not run."""
    if dtype not in _HALF:
        return []
    x = torch.empty(16, sizes.heads * sizes.head_dim, dtype=dtype, device=device)
    angles = torch.empty(16, sizes.head_dim // 2, dtype=torch.float32, device=device)
    with recorded(capability) as variants:
        qkv = _qkv(1, 16, sizes, dtype, device)[0]
        launches: dict[str, Callable[[], object]] = {
            "add_layer_norm": lambda: triton_encoder.add_layer_norm(x, x, x[0], x[0], 1e-5),
            "add_rms_norm": lambda: triton_encoder.add_rms_norm(x, x, x[0], 1e-5),
            "norm_rotate_": lambda: triton_encoder.norm_rotate_(qkv, x[0], x[0], 1e-5, angles, angles, 1.0),
            "rotate_": lambda: triton_encoder.rotate_(qkv, angles, angles, 1.0),
            "swiglu": lambda: triton_encoder.swiglu(x),
            "gelu_": lambda: triton_encoder.gelu_(x),
            "linear": lambda: triton_encoder.linear(x, x.new_empty(x.shape[1], x.shape[1]), x[0]),
        }
        for name in sorted(sizes.operations):
            launches[name]()
    return variants


@torch.inference_mode(False)
@torch.no_grad()
def cache_variants(
    codec: KVCodec, sizes: Sizes, dtype: torch.dtype, device: torch.device, capability: int
) -> list[Variant]:
    """List the variants that writing and reading caches of a codec launches."""
    with recorded(capability) as variants:
        query, keys, values = _heads(1, 16, sizes, dtype, device)
        cos, sin = torch.empty(2, 1, 16, sizes.head_dim, dtype=dtype, device=device)
        triton_layer.rotate(query, keys, cos, sin, 1.0)
        triton_layer.gelu(torch.empty(16, 16, dtype=dtype, device=device))
        if dtype in _HALF:
            lengths = torch.empty(1, dtype=torch.int64, device=device)
            decoded_attention.attend_shared(query, keys, values, None, query, query, lengths, None, None)
        else:
            lse = torch.empty(query.shape[:3], dtype=torch.float32, device=device)
            decoded_attention.attend_new(query, keys, values, None, query, lse)
        table = torch.empty(1, 4, dtype=torch.int64, device=device)
        for words in (True, False):
            copies.launch_copies(table, table, words)
        if not isinstance(codec, ExactCodec):
            for layer_idx in _distinct_layers(codec):
                _record_layer(codec, layer_idx, sizes, dtype, device)
    return variants


def _record_layer(codec: KVCodec, layer_idx: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    if triton_encode.can_run(codec, layer_idx):
        _, keys, values = _heads(1, 16, sizes, dtype, device)
        for summarize in (True, False):
            triton_encode.encode(codec, layer_idx, keys, values, summarize=summarize)
    if triton_attention.can_run(codec):
        for rows, n in _EXTENSIONS:
            context = _empty_context(codec, layer_idx, rows, device)
            new = _heads(rows, n, sizes, dtype, device)
            triton_attention.extend_attention(*new, None, context, codec, layer_idx)


def _distinct_layers(codec: KVCodec) -> list[int]:
    """The first layer of each combination of slabs."""
    first = {}
    for layer_idx in reversed(range(codec.geometry.num_layers)):
        views = ((key_view, codec.field_slabs(layer_idx, "key")), (value_view, codec.field_slabs(layer_idx, "value")))
        first[tuple(tuple(view(slab).spec for slab in slabs) for view, slabs in views)] = layer_idx
    return list(first.values())


def _qkv(rows: int, n: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Queries, keys and values as a fused projection leaves them, [rows, n, 3, heads, head_dim]."""
    return torch.empty(rows, n, 3, sizes.heads, sizes.head_dim, dtype=dtype, device=device)


def _heads(rows: int, n: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The same, [rows, heads, n, head_dim] each."""
    query, keys, values = _qkv(rows, n, sizes, dtype, device).permute(2, 0, 3, 1, 4)
    return query, keys, values


def _empty_context(codec: KVCodec, layer_idx: int, rows: int, device: torch.device) -> PackedContext:
    heads, head_dim = codec.geometry.num_heads, codec.geometry.head_dim
    packed = {}
    for kind in ("key", "value"):
        for slab in codec.field_slabs(layer_idx, kind):
            num_bytes = len(slab.components) * slab.bits // 8
            packed[slab.name] = torch.empty(rows, heads, _COLUMNS, num_bytes, dtype=torch.uint8, device=device)
    residual = torch.empty(rows, heads, 1, head_dim, dtype=torch.bfloat16, device=device)
    residuals = dict.fromkeys(("key_residual", "value_residual"), residual) if isinstance(codec, TurboCodec) else {}
    return PackedContext(packed, None, {}, None, residuals)
