"""Attention over packed contexts on a CUDA device, compared with SDPA on dense ones.

A call includes the map of the query, all splits of the context, their merge, and the map of the output. It is captured
in a CUDA graph and timed with the device's cache flushed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, Target, ratios, spread, worst
from benchmarks.harness.names import COMPRESSED, LAYER, SDPA
from esm_turbo import Calibration
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.codecs import KVCodec, PackedContext
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.kinds import CALIBRATION_FILE

Shape = tuple[int, int, int]
"""Rows of a batch, context tokens per row, and new tokens per row."""

HEADS, HEAD_DIM = 20, 64
_LAYER = 6
_SLOTS = 2
# Rounding of the kernels and of PyTorch in bfloat16, relative to the largest output.
_TOLERANCE = 1.5e-2
_BACKENDS = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
)  # fmt: skip


def attention_cases(
    shapes: Sequence[Shape],
    targets: Mapping[Shape, Mapping[str, float]],
) -> Iterator[Case]:
    """One row per shape, 20 heads of 64: every preset, and SDPA.

    Args:
        shapes: of the batches.
        targets: target speedups by shape and "slower arm / faster arm".
    """
    if not cuda_timing.available():
        return
    for shape in shapes:
        rows, tokens, queries = shape
        arms = Arms(shape)
        yield Case(
            name=f"batch {rows} x {tokens}, {queries} {'query' if queries == 1 else 'queries'}",
            model=LAYER,
            shape=arms.described(),
            check=arms.check,
            measure=arms.measure,
            targets=[Target(("ratios", name), at_least=bound) for name, bound in targets.get(shape, {}).items()],
        )


@functools.cache
def embedded_codec(preset: str) -> KVCodec:
    """Codec of a middle layer of the embedded model, with its heads repeated."""
    codec = Calibration.load(EMBEDDED_MODEL / CALIBRATION_FILE).codec(preset)
    state, heads = {}, codec.geometry.num_heads
    for name, stack in codec.state.items():
        layer = stack[_LAYER : _LAYER + 1]
        by_head = layer.dim() > 1 and layer.shape[1] == heads and "widths" not in name
        state[name] = layer.repeat(1, HEADS // heads, *[1] * (layer.dim() - 2)) if by_head else layer
    return type(codec)(TurboConfig.from_preset(preset), Geometry(1, HEADS, HEAD_DIM), state)


def bits_of(codec: KVCodec) -> dict[str, dict[str, int]]:
    """Number of components of keys and values by slab and field width."""
    return {
        f"{kind}s": {f"{slab.name}, {slab.bits} bits": len(slab.components) for slab in codec.field_slabs(0, kind)}
        for kind in ("key", "value")
    }


def new_tokens(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of new tokens, bfloat16."""
    device = cuda_timing.DEVICE
    generator = torch.Generator(device).manual_seed(0)
    size = (shape[0], HEADS, shape[2], HEAD_DIM)
    draw = partial(torch.randn, size, device=device, generator=generator, dtype=torch.bfloat16)
    return draw() * 0.125, draw(), draw()


def random_context(codec: KVCodec, rows: int, columns: int) -> PackedContext:
    """Contexts of random codes as an extension reads them; the first token is protected if the preset does so."""
    device, packed = cuda_timing.DEVICE, {}
    for kind in ("key", "value"):
        for slab in codec.field_slabs(0, kind):
            size = (rows, HEADS, columns, len(slab.components) * slab.bits // 8)
            packed[slab.name] = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    # As in a cache on a device; the second slot is empty.
    slots = _SLOTS if codec.config.protect_special_tokens else 0
    protected = torch.zeros(rows, HEADS, slots, HEAD_DIM, dtype=torch.bfloat16, device=device)
    protected_columns = torch.full((rows, slots), -1, dtype=torch.int32, device=device)
    protected_columns[:, :1] = 0
    per_row = torch.zeros(rows, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device=device)
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
    mask[:, : min(slots, 1)] = False
    return PackedContext(
        packed,
        mask,
        dict.fromkeys(("keys", "values"), protected) if slots else {},
        protected_columns >= 0 if slots else None,
        dict.fromkeys(("key_residual", "value_residual"), per_row) if codec.block_size is not None else {},
        torch.full((rows,), columns, device=device),
        protected_columns,
        None,
    )


class Arms:
    """Everything that is timed for one shape, built on demand."""

    def __init__(self, shape: Shape) -> None:
        self.rows, self.columns, self.queries = self.shape = shape
        self.codecs = {preset: embedded_codec(preset) for preset in COMPRESSED}

    def described(self) -> dict[str, object]:
        return {
            "batch_size": self.rows,
            "context_tokens": self.columns,
            "queries": self.queries,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "dtype": "bfloat16",
            "device": "cuda",
            "bits": {preset: bits_of(codec) for preset, codec in self.codecs.items()},
        }

    def check(self) -> Check:
        from esm_turbo.ops import torch_ops
        from esm_turbo.ops import triton_attention as triton_kernels

        rows, columns = min(self.rows, 2), min(self.columns, 1024)
        new = new_tokens((rows, columns, self.queries))
        errors = []
        for codec in self.codecs.values():
            context = random_context(codec, rows, columns)
            expected = torch_ops.extend_attention(*(x.float() for x in new), None, context, codec, 0)
            output = triton_kernels.extend_attention(*new, None, context, codec, 0).float()
            errors.append(float((output - expected).abs().max() / expected.abs().max()))
        what = "bfloat16 kernels against PyTorch in float32, largest difference relative to the largest output"
        return Check(what, worst(errors), _TOLERANCE)

    def measure(self, repeats: int) -> Figures:
        from esm_turbo.ops import triton_attention as triton_kernels

        gc.collect()
        torch.cuda.empty_cache()
        query, *_ = new_tokens(self.shape)
        size = (self.rows, HEADS, self.columns, HEAD_DIM)
        dense = [torch.randn(size, device=cuda_timing.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        by_backend, failed = sdpa_backends(query, dense)
        best = min(by_backend, key=by_backend.__getitem__)
        contexts = {preset: random_context(codec, self.rows, self.columns) for preset, codec in self.codecs.items()}
        new = new_tokens(self.shape)
        arms: dict[str, Callable[[], object]] = {SDPA: partial(sdpa, SDPBackend.__members__[best], query, *dense)}
        for preset, context in contexts.items():
            arms[preset] = partial(triton_kernels.extend_attention, *new, None, context, self.codecs[preset], 0)
        cold, not_cold = cuda_timing.captured_seconds(arms, repeats)
        figures = cuda_timing.figures(cold, {**failed, **not_cold})
        seconds = figures["seconds"]
        stored = {preset: sum(x.nbytes for x in context.packed.values()) for preset, context in contexts.items()}
        stored[SDPA] = sum(x.nbytes for x in dense)
        return figures | {
            "ratios": ratios(seconds, *((SDPA, preset) for preset in self.codecs)),
            "SDPA bf16 backend": best,
            "SDPA bf16 seconds by backend": by_backend,
            "bytes": stored,
            "GB/s": {name: size / seconds[name]["p50"] / 1e9 for name, size in stored.items() if name in seconds},
        }


def sdpa(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """PyTorch's attention by one of its backends, with queries already scaled."""
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(query, keys, values, scale=1.0)


def sdpa_backends(query: Tensor, dense: list[Tensor]) -> tuple[dict[str, float], dict[str, str]]:
    """Medians of SDPA's backends, and the reasons why some cannot run."""
    arms = {backend.name: partial(sdpa, backend, query, *dense) for backend in _BACKENDS}
    times, failed = cuda_timing.captured_seconds(arms, 3)
    medians = {name: row["p50"] for name, row in spread(times).items()}
    return medians, {f"SDPA bf16, {name}": why for name, why in failed.items()}
