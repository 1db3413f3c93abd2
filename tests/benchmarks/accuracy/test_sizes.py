"""Bytes of caches in published geometries."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import sizes
from esm_turbo.config import Geometry


def test_bytes_in_the_geometry_of_650m() -> None:
    [one] = sizes.memory_cases({"650M": Geometry(33, 20, 64)})
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    presets = row["presets"]
    assert presets["fp32"]["bytes"] == 330 * 2**20
    assert presets["paper"]["bits_per_element"] == pytest.approx(4, abs=0.001)
    for bits in (4, 3, 2, 1):
        assert presets[f"turbo{bits}"]["bits_per_element"] <= bits + 0.05
