"""Attention over packed contexts on a CUDA device, beside PyTorch's on dense ones, and whole steps of an extension.

Everything is captured in CUDA graphs, so that no launch from Python is timed; a figure is one replay.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Case, Check, Figures, Target, spread
from benchmarks.models import Architecture, random_calibration, random_model, random_tokens
from esm_turbo import Calibration, TurboEsmModel
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.calibration import CALIBRATION_FILE
from esm_turbo.codecs import KVCodec, PackedContext
from esm_turbo.config import PRODUCT_PRESETS, Geometry, TurboConfig

COMPRESSED = tuple(preset for preset in PRODUCT_PRESETS if preset != "exact")
_HEADS = 20
# The kernels' and PyTorch's own rounding in bfloat16; outputs are compared by their largest.
_TOLERANCE = 1.5e-2
_ATTENTIONS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_REPEATS_IN_GRAPH = 20


def attention_cases(
    shapes: tuple[tuple[int, int, int], ...], targets: dict[tuple[int, int, int], dict[str, float]]
) -> Iterator[Case]:
    """One row a shape (batch size, context, queries), 20 heads of 64: every preset, SDPA and the paper's kernel."""
    if not torch.cuda.is_available():
        return
    codecs = {preset: embedded_codec(preset, _HEADS) for preset in COMPRESSED}
    for batch_size, columns, queries in shapes:
        arms = _Arms(codecs, batch_size, columns, queries)
        yield Case(
            name=f"batch {batch_size} x {columns}, {queries} queries",
            model="bit profiles and maps of esm2-mini's layers, random codes",
            shape={
                "batch_size": batch_size, "context_tokens": columns, "queries": queries, "heads": _HEADS,
                "head_dim": 64, "dtype": "bfloat16",
            },
            check=arms.check,
            measure=arms.measure,
            targets=[
                Target(("ratios", f"SDPA bf16 / {preset}"), at_least=bound)
                for preset, bound in targets.get((batch_size, columns, queries), {}).items()
            ],
        )  # fmt: skip


def embedded_codec(preset: str, heads: int, layer_idx: int = 6) -> KVCodec:
    """The embedded model's codec of a middle layer, its heads repeated to as many as are asked for."""
    codec = Calibration.load(EMBEDDED_MODEL / CALIBRATION_FILE).codec(preset)
    state = {}
    for name, stack in codec.state.items():
        layer = stack[layer_idx : layer_idx + 1]
        by_head = layer.dim() > 1 and layer.shape[1] == codec.geometry.num_heads and "widths" not in name
        state[name] = layer.repeat(1, heads // codec.geometry.num_heads, *[1] * (layer.dim() - 2)) if by_head else layer
    geometry = Geometry(num_layers=1, num_heads=heads, head_dim=codec.geometry.head_dim)
    return type(codec)(TurboConfig.from_preset(preset), geometry, state)


class _Arms:
    def __init__(self, codecs: dict[str, KVCodec], batch_size: int, columns: int, queries: int) -> None:
        self.codecs, self.batch_size, self.columns, self.queries = codecs, batch_size, columns, queries

    def _new(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (self.batch_size, _HEADS, self.queries, 64)
        draw = partial(torch.randn, shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        return draw() * 0.125, draw(), draw()

    def _context(self, codec: KVCodec) -> PackedContext:
        packed, shape = {}, (self.batch_size, _HEADS, self.columns)
        for kind in ("key", "value"):
            for slab in codec.field_slabs(0, kind):
                num_bytes = len(slab.components) * slab.bits // 8
                packed[slab.name] = torch.randint(0, 256, (*shape, num_bytes), dtype=torch.uint8, device="cuda")
        rows = {}
        if codec.block_size is not None:
            zeros = torch.zeros(self.batch_size, _HEADS, 1, 64, dtype=torch.bfloat16, device="cuda")
            rows = {"key_residual": zeros, "value_residual": zeros}
        lengths = torch.full((self.batch_size,), self.columns, device="cuda")
        hidden = torch.zeros(self.batch_size, 1, dtype=torch.int32, device="cuda")
        mask = torch.ones(self.batch_size, self.columns, dtype=torch.bool, device="cuda")
        mask[:, 0] = False
        return PackedContext(packed, mask, {}, None, rows, lengths, hidden, None)

    def check(self) -> Check:
        from esm_turbo import torch_ops, triton_kernels

        errors = []
        small = _Arms(self.codecs, min(self.batch_size, 2), min(self.columns, 1024), self.queries)
        new = small._new()
        for codec in self.codecs.values():
            context = small._context(codec)
            expected = torch_ops.extend_attention(*(x.float() for x in new), None, context, codec, 0)
            output = triton_kernels.extend_attention(*new, None, context, codec, 0).float()
            errors.append(float((output - expected).abs().max() / expected.abs().max()))
        return Check(
            "bfloat16 kernels against the PyTorch path in float32, relative to the largest", max(errors), _TOLERANCE
        )

    def measure(self, repeats: int) -> Figures:
        from esm_turbo import triton_kernels

        seconds, packed_bytes = {}, {}
        query, *_ = new = self._new()
        dense = [
            torch.randn(self.batch_size, _HEADS, self.columns, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv"
        ]
        by_backend = {}
        for backend in _ATTENTIONS:
            with sdpa_kernel(backend):
                times = replay_seconds(
                    partial(functional.scaled_dot_product_attention, query, *dense, scale=1.0), repeats
                )
            by_backend[backend.name] = statistics.median(times)
            if by_backend[backend.name] == min(by_backend.values()):
                seconds["SDPA bf16"] = times
        wide = [x.float() for x in (query, *dense)]
        seconds["SDPA fp32"] = replay_seconds(
            partial(functional.scaled_dot_product_attention, *wide, scale=1.0), repeats
        )
        dense_bytes = sum(x.nbytes for x in dense)
        del dense, wide
        copied = (
            torch.empty(2**30, dtype=torch.uint8, device="cuda"),
            torch.empty(2**30, dtype=torch.uint8, device="cuda"),
        )
        copy = statistics.median(replay_seconds(partial(copied[0].copy_, copied[1]), repeats))
        del copied
        for preset, codec in self.codecs.items():
            context = self._context(codec)
            packed_bytes[preset] = sum(x.nbytes for x in context.packed.values())
            seconds[preset] = replay_seconds(
                partial(triton_kernels.extend_attention, *new, None, context, codec, 0), repeats
            )
            if preset == "paper" and self.queries == 1:
                from benchmarks.paper_kernel import decode

                state = codec.layer_state(0, query.device)
                tables = state["key_fields"].contiguous(), state["value_fields"].contiguous()
                arm = partial(decode, query, context.packed["keys"], context.packed["values"], *tables)
                seconds["one program a head, table in memory"] = replay_seconds(arm, repeats)
            del context
        figures = spread(seconds)
        median = {name: row["p50"] for name, row in figures.items()}
        ratios = {f"SDPA bf16 / {preset}": median["SDPA bf16"] / median[preset] for preset in self.codecs}
        if "one program a head, table in memory" in median:
            for preset in self.codecs:
                ratios[f"one program a head / {preset}"] = (
                    median["one program a head, table in memory"] / median[preset]
                )
        speeds = {preset: packed_bytes[preset] / median[preset] / 1e9 for preset in self.codecs}
        return {
            "seconds": figures,
            "ratios": ratios,
            "SDPA bf16 by backend": by_backend,
            "bytes": {"dense bf16": dense_bytes, **packed_bytes},
            "GB/s": {"copy (read and write)": 2 * 2**30 / copy / 1e9, **speeds},
        }


def step_cases(
    architecture: Architecture, context_tokens: int, presets: tuple[str, ...], at_most: float
) -> Iterator[Case]:
    """A whole forward of one new token on a context, batch 1, bfloat16: eager and captured; and the prefill."""
    if not torch.cuda.is_available():
        return
    model = random_model(architecture)
    calibration = random_calibration(model)
    for preset in presets:
        turbo = TurboEsmModel.from_esm(model, calibration=calibration, preset=preset)
        turbo = turbo.to("cuda", torch.bfloat16)
        context = random_tokens(1, context_tokens - 1, seed=3).cuda()
        new = random_tokens(1, 1, cls=False, seed=2).cuda()
        with torch.no_grad():
            cache = turbo(context, use_cache=True).past_key_values

        @torch.no_grad()
        def step(turbo: TurboEsmModel = turbo, new: Tensor = new, cache: object = cache) -> Tensor:
            output: Tensor = turbo(new, past_key_values=cache).last_hidden_state
            return output

        @torch.no_grad()
        def prefill(turbo: TurboEsmModel = turbo, context: Tensor = context, use_cache: bool = True) -> Tensor:
            output: Tensor = turbo(context, use_cache=use_cache).last_hidden_state
            return output

        def check(turbo: TurboEsmModel = turbo, step: Callable[[], Tensor] = step) -> Check:
            output = step().float()
            turbo.backend = "torch"
            expected = step().float()
            turbo.backend = "auto"
            return Check(
                "hidden state of the new token, kernels against the PyTorch path in bfloat16, largest difference",
                float((output - expected).abs().max()),
                0.25,
            )

        def measure(
            repeats: int,
            step: Callable[[], Tensor] = step,
            prefill: Callable[..., Tensor] = prefill,
            cache: object = cache,
        ) -> Figures:
            seconds = {
                "extension step, eager": eager_seconds(step, repeats),
                "extension step, captured": replay_seconds(step, repeats),
                "prefill without cache, eager": eager_seconds(partial(prefill, use_cache=False), repeats),
                "prefill with cache, eager": eager_seconds(prefill, repeats),
            }
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - before
            return {
                "seconds": spread(seconds),
                "bytes": {"cache": cache.nbytes, "extra peak of an extension": extra},
            }

        yield Case(
            name=f"1 on {context_tokens}, {preset}",
            model=architecture.name,
            shape={
                "batch_size": 1,
                "context_tokens": context_tokens,
                "new_tokens": 1,
                "dtype": "bfloat16",
                "preset": preset,
            },
            check=check,
            measure=measure,
            targets=[Target(("seconds", "extension step, captured", "p50"), at_most=at_most)],
        )
        turbo.to("cpu")


def replay_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of a call, captured in a CUDA graph; short ones several times in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    inner = 1 if begin.elapsed_time(end) > 1.0 else _REPEATS_IN_GRAPH
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return [seconds / inner for seconds in eager_seconds(graph.replay, repeats)]


def eager_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of a call by the device's clock, after three that are not counted."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times
