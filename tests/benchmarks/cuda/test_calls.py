"""Calls of the public API as far as a machine without a device can time them."""

from __future__ import annotations

from benchmarks.cuda import calls
from tests.helpers.benchmark_cases import TINY, measured


def test_calls(no_device: None) -> None:
    prefill, embedding = calls.call_cases(TINY, 30, 3, (200,))
    assert prefill.shape["context_tokens"] == 31
    assert measured(prefill)["seconds"].keys() == {"turbo.prefill", calls.THEIRS, calls.PRODUCTS}
    figures = measured(embedding)
    arm = "turbo.embed, mean"
    assert figures["residues_per_second"][arm] == embedding.shape["residues"] / figures["seconds"][arm]["p50"]
    assert f"{arm} / turbo.embed, mean and caches" in figures["ratios"]
