"""Outputs of commands, and what differs from those of an undisturbed run."""

from __future__ import annotations

import io
from pathlib import Path

import h5py
import pytest
import torch
from safetensors.torch import save

from benchmarks.attack.commands import differences, outputs, write_inputs


def pt(x: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save({"label": "p0", "representations": {6: x}}, buffer)
    return buffer.getvalue()


def artifact(x: torch.Tensor, **metadata: str) -> bytes:
    return save({"x": x}, metadata={"format": "1"} | metadata)


def h5(value: float, name: str = "x") -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.attrs["format"] = "1"
        file.create_dataset(name, data=[value, 1.0])
    return buffer.getvalue()


EXPECTED = {
    "out/a.pt": pt(torch.ones(4)),
    "out/b.safetensors": artifact(torch.ones(4)),
    "out/c.h5": h5(1.0),
    "index.tsv": b"a\n",
}


@pytest.mark.parametrize(
    ("changed", "categories"),
    [
        ({}, []),
        ({"out/.a.tmp": b""}, ["left behind"]),
        ({"index.tsv": None}, ["missing"]),
        ({"index.tsv": b"b\n"}, ["different"]),
        ({"out/a.pt": pt(torch.zeros(4))}, ["different"]),
        ({"out/a.pt": pt(torch.ones(4)) + b" "}, ["bytes"]),
        ({"out/a.pt": b"damaged"}, ["different"]),
        ({"out/b.safetensors": artifact(torch.ones(4).half())}, ["different"]),
        ({"out/c.h5": h5(2.0)}, ["different"]),
        ({"out/c.h5": h5(1.0) + b" "}, []),
        ({"out/c.h5": b"damaged"}, ["different"]),
        ({"out/b.safetensors": artifact(torch.ones(4) + 1e-6)}, ["different"]),
    ],
)
def test_differences(changed: dict[str, bytes | None], categories: list[str]) -> None:
    found = {name: data for name, data in (EXPECTED | changed).items() if data is not None}
    assert [one.category for one in differences(found, EXPECTED)] == categories


def test_mended_results_may_differ_by_rounding() -> None:
    def mended(name: str, data: bytes) -> bool:
        return not differences(EXPECTED | {name: data}, EXPECTED, mended=True)

    assert mended("out/a.pt", pt(torch.ones(4) + 1e-6))
    assert mended("out/b.safetensors", artifact(torch.ones(4) + 1e-6))
    assert not mended("out/b.safetensors", artifact(torch.ones(4) + 1e-6, format="2"))
    assert mended("out/c.h5", h5(1 + 1e-6)) and not mended("out/c.h5", h5(1.1))
    assert not mended("out/c.h5", h5(1.0, "y"))
    assert not mended("out/a.pt", pt(torch.tensor([1.0, 1.0, 1.0, 1.1])))
    assert not mended("out/a.pt", pt(torch.full((4,), torch.nan)))
    assert not mended("index.tsv", b"b\n")


def test_inputs_are_no_outputs(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    assert outputs(tmp_path) == {}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(b"x")
    assert outputs(tmp_path) == {"out/a": b"x"}
