"""A large model on one device and over several, with devices that are simulated."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda import large_model
from tests.helpers.benchmark_cases import TINY, measured
from tests.helpers.numbered_cpus import NumberedCpus


def test_a_large_model_is_spread(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    sizes = {"contexts": (30, 60), "rows": (1, 3), "new_residues": 4, "candidates": 3}
    found = []
    with NumberedCpus():
        for case in large_model.large_cases(TINY, **sizes, devices=[["cpu:0"], ["cpu:0", "cpu:1"]]):
            found.append((case.name, case.shape["layers_per_device"], measured(case)))
    assert [name for name, *_ in found] == ["1 device", "2 devices"]
    assert [layers for _, layers, _ in found] == [{"cpu:0": 2}, {"cpu:0": 1, "cpu:1": 1}]
    for _, _, figures in found:
        assert figures["seconds"].keys() >= {"prefill 60, turbo3", "extend 3 x 4, exact", "score"}
        assert figures["candidates_per_second"] == pytest.approx(3 / figures["seconds"]["score"]["p50"])
        assert sum(figures["bytes"]["cache of 60, exact"].values()) > sum(
            figures["bytes"]["cache of 60, turbo3"].values()
        )
    one, two = (figures["bytes"] for *_, figures in found)
    for name, sizes_of in one.items():
        if name != "peak":
            assert sum(two[name].values()) == sum(sizes_of.values()) and len(two[name]) == 2
