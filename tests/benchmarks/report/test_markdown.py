"""Parts of the generated tables."""

from __future__ import annotations

import pytest

from benchmarks.report.markdown import cosine, small, source, table


def test_a_table() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n"


@pytest.mark.parametrize(("x", "text"), [(0, "0"), (12.3, "12"), (0.0123, "0.012"), (2e-9, "2e-09")])
def test_two_digits(x: float, text: str) -> None:
    assert small(x) == text


def test_cosine_and_source() -> None:
    assert cosine({"cosine_mean": 0.98687, "cosine_q01": 0.9616}) == "0.98687 (0.9616)"
    record = {
        "environment": {"processor": "Xeon", "versions": {"torch": "2.11.0", "transformers": "5.17.0"}},
        "revision": {"commit": "0123456789abcdef", "dirty": True},
    }
    text = source(record, "accuracy", "a model")
    for part in ("a model", "Xeon", "torch 2.11.0", "transformers 5.17.0", "0123456789", "results/accuracy.jsonl`"):
        assert part in text
    assert "abcdef" not in text and "change" in text
