"""Embeddings against plain loops."""

from __future__ import annotations

import pytest

from benchmarks.harness.names import EMBED, FILE_ORDER, SAME_BATCHES
from benchmarks.speed import embedding
from tests.helpers.benchmark_cases import TINY, measured


def test_embeddings_are_compared_with_both_loops() -> None:
    [case] = embedding.random_cases(TINY, proteins=3)
    figures = measured(case, 1)
    assert figures["seconds"].keys() == {SAME_BATCHES, FILE_ORDER, EMBED}
    rate = case.shape["residues"] / figures["seconds"][EMBED]["p50"]
    assert figures["residues_per_second"][EMBED] == pytest.approx(rate)


def test_a_wrong_embedding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = embedding.random_cases(TINY, proteins=2)
    honest = embedding._ours
    monkeypatch.setattr(embedding, "_ours", lambda *a: [(x + 0.01, mean) for x, mean in honest(*a)])
    assert not case.check().passed
