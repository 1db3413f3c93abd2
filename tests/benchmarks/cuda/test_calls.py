"""Calls of the public API as far as a machine without a device can time them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.cuda import calls
from tests.helpers.benchmark_cases import TINY, measured


def test_calls(no_device: None) -> None:
    prefill, *reading, embedding = calls.call_cases(TINY, 30, 3, (200,), 5, 3)
    assert prefill.shape["context_tokens"] == 31
    assert measured(prefill)["seconds"].keys() == {"turbo.prefill", calls.THEIRS, calls.PRODUCTS}
    assert [case.name for case in reading] == [
        "extend by 1 peptide",
        "extend by 64 peptides",
        "score 5 peptides",
        "score all variants of 30 residues",
        "generate after 1 context",
        "generate after 64 contexts",
        "generate in place in 1 protein",
        "generate in place in 8 proteins",
    ]
    for case in reading:
        figures = measured(case)
        for arm, rate in figures["per_second"].items():
            assert rate * figures["seconds"][arm]["p50"] == pytest.approx(
                case.shape["rows"] * case.shape.get("new_tokens", 1)
            )
    figures = measured(embedding)
    arm = "turbo.embed, mean"
    assert figures["per_second"][arm] == embedding.shape["residues"] / figures["seconds"][arm]["p50"]
    assert f"{arm} / turbo.embed, mean and caches" in figures["ratios"]


def test_calls_without_graphs() -> None:
    turbo = SimpleNamespace(model=SimpleNamespace(esm=SimpleNamespace(captures=True)))
    with pytest.raises(KeyError), calls.without_graphs(turbo):
        assert not turbo.model.esm.captures
        raise KeyError
    assert turbo.model.esm.captures
