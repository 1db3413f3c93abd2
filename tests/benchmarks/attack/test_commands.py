"""Outputs of commands, and what differs from those of an undisturbed run."""

from __future__ import annotations

import io
from pathlib import Path

import h5py
import pytest
import torch
from safetensors.torch import save

from benchmarks.attack.commands import content, differences, outputs, write_inputs


def pt(x: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save({"label": "p0", "representations": {6: x}}, buffer)
    return buffer.getvalue()


def artifact(x: torch.Tensor, **metadata: str) -> bytes:
    return save({"x": x}, metadata={"format": "1"} | metadata)


EXPECTED = {"out/a.pt": pt(torch.ones(4)), "out/b.safetensors": artifact(torch.ones(4)), "index.tsv": b"a\n"}


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
    assert not mended("out/a.pt", pt(torch.tensor([1.0, 1.0, 1.0, 1.1])))
    assert not mended("out/a.pt", pt(torch.full((4,), torch.nan)))
    assert not mended("index.tsv", b"b\n")


def test_inputs_are_no_outputs(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    assert outputs(tmp_path) == {}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(b"x")
    assert outputs(tmp_path) == {"out/a": b"x"}


def test_hdf5_files_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.h5" for name in ("one", "same", "other", "fewer")]
    for path, order, value in zip(paths, ("xy", "yx", "xy", "x"), (1, 1, 2, 1), strict=True):
        with h5py.File(path, "w") as file:
            for name in order:
                file.create_dataset(name, data=[value])
    one, same, other, fewer = map(content, paths)
    assert one == same
    assert len({one, other, fewer}) == 3


def test_safetensors_files_are_compared_without_the_order_of_their_header(tmp_path: Path) -> None:
    data = artifact(torch.ones(2), a="1", b="2")
    length = int.from_bytes(data[:8], "little")
    (tmp_path / "a.safetensors").write_bytes(data)
    header = (
        data[8 : 8 + length].replace(b'"a":"1"', b'"A"').replace(b'"b":"2"', b'"a":"1"').replace(b'"A"', b'"b":"2"')
    )
    assert header != data[8 : 8 + length]
    (tmp_path / "b.safetensors").write_bytes(data[:8] + header + data[8 + length :])
    assert content(tmp_path / "a.safetensors") == content(tmp_path / "b.safetensors")
