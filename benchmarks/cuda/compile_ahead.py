"""Compile kernels in parallel processes before they are timed, which takes minutes in sequence.

A kernel is compiled for the bit widths of a layer, the shape of the tokens and their dtype, on random codes and values.
Triton caches compiled kernels on disk, where the measuring process finds them.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.cuda.decode_attention import Shape, embedded_codec, new_tokens, random_context
from benchmarks.harness import cuda_timing
from benchmarks.harness.names import COMPRESSED
from esm_turbo.codecs import KVCodec
from esm_turbo.config import Geometry, TurboConfig

_MOST_PROCESSES = 14
# Rows and columns of the check of `decode_attention`.
_CHECKED = (2, 1024)


@dataclass(frozen=True)
class Job:
    """Kernels to compile.

    Attributes:
        codec: class, options, geometry of one layer, and state.
        shape: rows, context tokens, and new tokens; 0 new tokens stands for encoding the context.
        dtype: of queries, keys and values.
        shared: whether all rows share one context.
    """

    codec: tuple[type[KVCodec], TurboConfig, Geometry, Mapping[str, np.ndarray[Any, Any]]]
    shape: Shape
    dtype: torch.dtype
    shared: bool = False


def embedded(shapes: Sequence[Shape]) -> None:
    """Compile the kernels of `decode_attention.attention_cases`."""
    checked = [(min(rows, _CHECKED[0]), min(columns, _CHECKED[1]), queries) for rows, columns, queries in shapes]
    compile_all(
        Job(parts, shape, torch.bfloat16)
        for shape in dict.fromkeys([*checked, *shapes])
        for preset in COMPRESSED
        for parts in _layers(embedded_codec(preset))
    )


def model(
    codecs: Iterable[KVCodec],
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    *,
    shared: bool = False,
) -> None:
    """Compile the kernels of all layers of some codecs; layers with the same bit widths share them."""
    compile_all(
        Job(parts, shape, dtype, shared)
        for codec in codecs
        for parts in _layers(codec)
        for shape in shapes
        for dtype in dtypes
    )


def compile_all(jobs: Iterable[Job], seconds: float = 120.0) -> None:
    """Run all jobs in parallel processes; a kernel that fails is compiled, or fails, when it is measured.

    Args:
        jobs: to run.
        seconds: to wait at most.
    """
    begin = time.perf_counter()
    # The largest last, when most of the others have freed their memory.
    work = sorted(jobs, key=lambda job: job.shape[0] * job.shape[1])
    futures = [_pool().submit(_compile, job) for job in work]
    try:
        errors = [future.exception() for future in as_completed(futures, timeout=seconds)]
        for error in [error for error in errors if error is not None][:3]:
            print(f"  not compiled ahead: {cuda_timing.reason(error)}")
        if any(isinstance(error, BrokenExecutor) for error in errors):
            close()
    except TimeoutError:
        print("  not all kernels were compiled ahead")
        close()
    print(f"\nkernels of {len(work)} cases compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def close() -> None:
    """Stop the processes, which occupy device memory."""
    if _pool.cache_info().currsize:
        _pool().shutdown(wait=False, cancel_futures=True)
        _pool.cache_clear()


@functools.cache
def _pool() -> ProcessPoolExecutor:
    """The processes, started once, since each takes seconds to start."""
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


def _layers(codec: KVCodec) -> Iterator[Any]:
    """One layer per combination of bit widths, as arguments of a codec of one layer; none for `exact`."""
    seen = set()
    geometry = Geometry(1, codec.geometry.num_heads, codec.geometry.head_dim)
    for layer_idx in range(codec.geometry.num_layers):
        slabs = [(kind, slab) for kind in ("key", "value") for slab in codec.field_slabs(layer_idx, kind)]
        widths = tuple((kind, slab.bits, len(slab.components)) for kind, slab in slabs)
        if widths and widths not in seen:
            seen.add(widths)
            state = {name: stack[layer_idx : layer_idx + 1].cpu().numpy() for name, stack in codec.state.items()}
            yield type(codec), codec.config, geometry, state


def _compile(job: Job) -> None:
    cls, config, geometry, state = job.codec
    codec = cls(config, geometry, {name: torch.from_numpy(array) for name, array in state.items()})
    rows, columns, queries = job.shape
    if queries:
        from esm_turbo.ops import triton_attention as triton_kernels

        new = (x.to(job.dtype) for x in new_tokens(job.shape, geometry=geometry))
        triton_kernels.extend_attention(*new, None, random_context(codec, 1 if job.shared else rows, columns), codec, 0)
    else:
        _encode(codec, rows, columns, job.dtype)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _encode(codec: KVCodec, rows: int, columns: int, dtype: torch.dtype) -> None:
    from esm_turbo.ops import triton_encode

    if not triton_encode.can_run(codec, 0):
        return
    _, keys, values = (x.to(dtype) for x in new_tokens((rows, 0, columns), geometry=codec.geometry))
    protected = torch.full((rows, 2), -1, device=cuda_timing.DEVICE)
    protected[:, 0] = 0
    triton_encode.encode(
        codec,
        0,
        keys,
        values,
        order=torch.arange(columns, device=cuda_timing.DEVICE).repeat(rows, 1),
        columns=columns,
        counts=torch.full((rows,), columns, device=cuda_timing.DEVICE),
        protected=protected if codec.config.protect_special_tokens else None,
    )
