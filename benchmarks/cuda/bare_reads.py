"""What two launches that read contexts take at least: those of attention, without its arithmetic (`launches.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
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
    sdpa_backends,
)
from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, ratio
from benchmarks.harness.names import BARE, EMPTY, LAYER, SDPA

# Numbers of programs a head; the fastest one counts.
_PARTS = (1, 2, 4, 8, 16)
# Words of a part, and of an output.
_PART = 64
# Words of the maps of a query and of an output, in half precision.
_QUERY_MAP, _OUTPUT_MAP = 64 * 64 // 2, 64 * 64 // 2


def bare_reads_reference(words: Tensor, query_map: Tensor, output_map: Tensor) -> Tensor:
    """The same by PyTorch."""
    items, parts, count = words.shape
    padded = torch.nn.functional.pad(words, (0, -count % _PART)).reshape(items, -1, _PART)
    maps = parts * query_map.unflatten(1, (-1, _PART)).sum(1) + output_map.unflatten(1, (-1, _PART)).sum(1)
    # Sums of 64 bits, cut to those that are left of a sum of 32 bits.
    return (padded.sum(1) + maps.repeat(items // len(maps), 1)).to(torch.int32)


def read_cases(shapes: Sequence[Shape], presets: Sequence[str]) -> Iterator[Case]:
    """One row per shape with a single query: SDPA, attention of each preset, and its reads and writes alone."""
    if not cuda_timing.available():
        return
    for shape in shapes:
        yield Case(
            name=name_of(shape),
            model=LAYER,
            shape={
                "batch_size": shape[0],
                "context_tokens": shape[1],
                "queries": shape[2],
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "dtype": "bfloat16",
                "device": "cuda",
            },
            check=_check,
            measure=partial(_measure, shape, presets),
        )


def _random_words(items: int, parts: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = partial(torch.randint, -(2**31), 2**31, dtype=torch.int32, device=cuda_timing.DEVICE)
    return draw((items, parts, count)), draw((HEADS, _QUERY_MAP)), draw((HEADS, _OUTPUT_MAP))


def _check() -> Check:
    from benchmarks.cuda.launches import bare_reads

    errors = []
    for parts, count in ((1, 700), (4, 1024)):
        tensors = _random_words(2 * HEADS, parts, count)
        errors.append((bare_reads(*tensors) != bare_reads_reference(*tensors)).sum())
    return Check("sums that differ from PyTorch's", float(sum(errors)), 0.0)


def _measure(shape: Shape, presets: Sequence[str], repeats: int) -> Figures:
    from benchmarks.cuda.launches import bare_reads, empty_launches
    from esm_turbo.ops import triton_attention as triton_kernels

    rows, columns, _ = shape
    new = new_tokens(shape)
    dense = [
        torch.randn((rows, HEADS, columns, HEAD_DIM), device=cuda_timing.DEVICE, dtype=torch.bfloat16) for _ in range(2)
    ]
    by_backend, _ = sdpa_backends(new[0], dense)
    best = min(by_backend, key=by_backend.__getitem__)
    arms: dict[str, Callable[[], object]] = {
        SDPA: partial(sdpa, SDPBackend.__members__[best], new[0], *dense),
        EMPTY: partial(empty_launches, 2),
    }
    for preset in presets:
        codec = embedded_codec(preset)
        context = random_context(codec, rows, columns)
        arms[preset] = partial(triton_kernels.extend_attention, *new, None, context, codec, 0)
        stored = sum(slab.nbytes for slab in context.packed.values())
        for parts in _PARTS:
            words = -(-stored // (4 * rows * HEADS * parts))
            arms[f"{BARE} of {preset}, {parts} parts"] = partial(bare_reads, *_random_words(rows * HEADS, parts, words))
    figures = cuda_timing.figures(*cuda_timing.captured_seconds(arms, repeats))
    seconds = figures["seconds"]
    fastest = {}
    for preset in presets:
        found = {name: seconds[name] for name in arms if name.startswith(f"{BARE} of {preset},") and name in seconds}
        if found:
            fastest[f"{BARE} of {preset}"] = min(found.values(), key=lambda row: row["p50"])
    seconds |= fastest
    pairs = [(SDPA, name) for name in (*presets, *fastest)] + [(p, f"{BARE} of {p}") for p in presets]
    return figures | {
        "SDPA bf16 backend": best,
        "ratios": {f"{a} / {b}": ratio(seconds, a, b) for a, b in pairs if a in seconds and b in seconds},
    }
