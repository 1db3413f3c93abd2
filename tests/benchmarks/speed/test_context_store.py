"""Reading from a store, and compressing its files."""

from __future__ import annotations

import sys

import pytest

from benchmarks.speed import context_store
from tests.helpers.benchmark_cases import TINY, measured


def test_reading_is_compared_with_the_prefill() -> None:
    [case] = context_store.random_cases(TINY, (30,), "turbo3")
    figures = measured(case, 1)
    assert figures["ratios"].keys() == {"prefill / disk", "prefill / host memory"}
    assert figures["bytes"]["file"] > figures["bytes"]["cache"] > 0


def test_compression_needs_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert list(context_store.compression_cases(("turbo3",), (1,), 1, 0)) == []
    assert "pip install 'esm-turbo[benchmark]'" in capsys.readouterr().out
