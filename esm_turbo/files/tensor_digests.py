"""Digests of tensors' bits, and samples of them, by which changes of weights are noticed."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["sampled_views", "tensors_digest"]

# Elements of each tensor that are compared to notice writes that leave no trace in counters.
_SAMPLED = 32
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words of four bytes that are summed together, and those that are read at a time: the products fit into a CPU's cache,
# and are few launches on a device.
_CHUNK, _CPU_BLOCK, _BLOCK = 1 << 14, 1 << 16, 1 << 21


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of the bits of named tensors, with dtypes and shapes; the same on every device, hexadecimal.

    Words of four bytes are multiplied by fixed random odd numbers and summed modulo 2^64 in chunks, which a device
    does at the speed of its memory; the sums are hashed by SHA-256. A change within one word always shows, and changes
    of several, such as of all signs, fail to show with a probability of 2^-32 (in words of eight bytes, signs would
    be the highest bits, of which only the parity counts).
    """
    digest = hashlib.sha256()
    words: dict[torch.device, list[tuple[int, Tensor]]] = {}
    count = 0
    for name, tensor in named:
        for path, inner in _plain_tensors(name, tensor):
            digest.update(f"{path} {inner.dtype} {tuple(inner.shape)}\n".encode())
            words.setdefault(inner.device, []).append((count, _words(inner)))
            count += 1
    sums: dict[int, Tensor] = {}
    for device, own in words.items():
        # One wait for each device.
        sums |= zip([index for index, _ in own], _sums([one for _, one in own], device), strict=True)
    for index in range(count):
        digest.update(sums[index].numpy().tobytes())
    return digest.hexdigest()[:32]


def _words(tensor: Tensor) -> Tensor:
    """Bits of a tensor, int32 [words], with zeros at the end of the last."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if short := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(short)])
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


@torch.no_grad()
def _sums(words: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Weighted sums of each tensor's chunks of words, int64 [chunks] on the CPU; the last chunk may be short."""
    factors, size = _factors(device), _CPU_BLOCK if device.type == "cpu" else _BLOCK
    sums: list[Tensor] = []
    for one in words:
        whole = one[: len(one) // _CHUNK * _CHUNK]
        sums += [(block.view(-1, _CHUNK) * factors).sum(1) for block in whole.split(size) if len(block)]
    # The short ones together: most tensors are small, and each launch costs more than they do.
    rests = [one[len(one) // _CHUNK * _CHUNK :] for one in words]
    products = torch.cat(rests) * torch.cat([factors[: len(rest)] for rest in rests])
    ends = torch.tensor([0, *itertools.accumulate(map(len, rests))])
    running = torch.cat([products.new_zeros(1), products.cumsum(0)])[ends.to(device)]
    found = torch.cat([*sums, running.diff()]).cpu()
    counts = [len(one) // _CHUNK for one in words]
    chunks, short = found.split([sum(counts), len(words)])
    return [torch.cat(pair) for pair in zip(chunks.split(counts), short.split(1), strict=True)]


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    drawn = np.random.Generator(np.random.PCG64(0)).integers(-(2**63), 2**63, _CHUNK, dtype=np.int64)
    with torch.inference_mode(mode=False):
        return torch.from_numpy(drawn | 1).to(device)


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those of which a subclass consists, such as a quantised one."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))


def sampled_views(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Evenly spaced elements of every tensor, as views, by device and width."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        for _, plain in _plain_tensors("", tensor):
            # In the order in which it lies in memory.
            stored = plain.detach().permute(sorted(range(plain.dim()), key=plain.stride, reverse=True))
            step = _step(stored)
            # As integers, NaN is equal to itself, and autocast leaves them alone.
            integers, begin = _INTEGERS[plain.element_size()], step // 2
            views = groups.setdefault((plain.device, integers), [])
            for run in _runs(stored):
                sample = run.view(integers)[begin::step]
                views += [sample] if len(sample) else []
                begin += len(sample) * step - len(run)
    return list(groups.values())


def _step(tensor: Tensor) -> int:
    """The distance between sampled elements, which skips no 32nd of a tensor."""
    most, row = tensor.numel() // _SAMPLED, tensor.shape[-1] if tensor.dim() else 1
    # By the golden ratio, so that the sample of a matrix lies in all parts of its rows.
    step = most - (most - round(0.382 * row)) % max(row, 1)
    return step if step > 0 else max(1, most)


def _runs(tensor: Tensor) -> list[Tensor]:
    """All elements of a tensor as views of one dimension: several where a part of a larger tensor has gaps."""
    try:
        return [tensor.view(-1)]
    except RuntimeError:
        return [run for part in tensor.unbind() for run in _runs(part)]
