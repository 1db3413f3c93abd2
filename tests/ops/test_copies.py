"""Copies of many tensors at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esm_turbo.ops.copies import ByteRows, Cutter, Gatherer, copy_rows
from tests.helpers.triton_devices import on_devices, right_triton  # noqa: F401


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    values = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def check_copies(device: str) -> None:
    buffer = random_bytes(2, 3, 50, 8).to(device)
    sources = [
        random_bytes(2, 3, 21, 8, seed=1).to(device),
        # Spare columns behind a cache's own.
        buffer[:, :, :21],
        random_bytes(2, 3, 2, 6, dtype=torch.bfloat16, seed=2).to(device),
        random_bytes(2, dtype=torch.int64, seed=3).to(device),
        # Copied first: its rows are not contiguous.
        random_bytes(2, 21, 3, 5, seed=4).to(device).transpose(1, 2),
        random_bytes(2, 0, seed=5).to(device),
    ]
    dims = [2, 2, 2, 0, 2, 1]
    shapes = [(4, 3, 64, 8), (4, 3, 64, 8), (4, 3, 2, 6), (4,), (4, 3, 64, 5), (4, 9)]
    targets = [torch.full(shape, 7, dtype=x.dtype, device=device) for shape, x in zip(shapes, sources, strict=True)]
    copy_rows(ByteRows(sources, dims), ByteRows(targets, dims))
    for source, target in zip(sources, targets, strict=True):
        # Nothing is left of what was there.
        expected = torch.zeros_like(target)
        expected[tuple(map(slice, source.shape))] = source
        assert torch.equal(target, expected)


def check_gathering(device: str) -> None:
    for dtype, steps in ((torch.int16, (1, 7, 3)), (torch.int32, (2, 5, 1))):
        tensors = [random_bytes(size, dtype=dtype, seed=size).to(device) for size in (40, 33, 500)]
        views = [x[step // 2 :: step] for x, step in zip(tensors, steps, strict=True)]
        gather = Gatherer(views)
        assert torch.equal(gather(), torch.cat(views))
        tensors[1][steps[1] // 2] += 1
        assert torch.equal(gather(), torch.cat(views))


@on_devices()
def test_in_words(device: str) -> None:
    sources = [random_bytes(3, 4, 5000, 12, seed=seed).to(device) for seed in range(2 if device == "cpu" else 300)]
    targets = [torch.zeros(4, 4, 6000, 12, dtype=torch.uint8, device=device) for _ in sources]
    rows = ByteRows(sources, [2] * len(sources))
    assert rows.words
    copy_rows(rows, ByteRows(targets, [2] * len(targets)))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[:3, :, :5000], source)
        assert not target[3].any()
        assert not target[:, :, 5000:].any()


def check_cuts(device: str) -> None:
    buffer = random_bytes(3, 2, 50, 8).to(device)
    tensors = [
        random_bytes(3, 2, 21, 5, seed=1).to(device),
        buffer[:, :, :21],
        random_bytes(3, 2, 2, 6, dtype=torch.bfloat16, seed=2).to(device),
        random_bytes(3, 21, dtype=torch.int32, seed=3).to(device),
        random_bytes(3, dtype=torch.int64, seed=4).to(device),
        random_bytes(3, 21, 2, 4, seed=5).to(device).transpose(1, 2),
    ]
    dims = [2, 2, None, 1, None, 2]
    cut = Cutter(tensors, dims)
    for lengths in ((21, 9, 1), (0, 20), (0, 0, 0)):
        for row, (length, found_row) in enumerate(zip(lengths, cut(lengths), strict=True)):
            found_tensors = found_row.tensors()
            for index, (found, tensor, dim) in enumerate(zip(found_tensors, tensors, dims, strict=True)):
                expected = tensor[row : row + 1]
                assert torch.equal(found, expected if dim is None else expected.narrow(dim, 0, length))
                assert found.is_contiguous()
                alone = found_row.tensor(index)
                assert (alone.shape, alone.data_ptr()) == (found.shape, found.data_ptr())
            assert len({found.untyped_storage().data_ptr() for found in found_tensors}) == 1


CHECKS = {"copies": check_copies, "gathering": check_gathering, "cuts": check_cuts}


@pytest.mark.parametrize("what", CHECKS)
def test_by_pytorch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    CHECKS[what]("cpu")


@on_devices("what", cpu=CHECKS, gpu=CHECKS)
def test_in_one_launch(device: str, what: str) -> None:
    CHECKS[what](device)
