"""Writing means in every format: what is measured is what was written."""

from __future__ import annotations

from benchmarks.speed.embedding_files import means_cases


def test_every_format_has_its_time_and_size() -> None:
    [case] = means_cases(proteins=20, hidden_size=64)
    assert case.check().passed
    figures = case.measure(1)
    assert isinstance(figures, dict)
    for name in ("safetensors", "pt", "h5", "parquet"):
        assert all(seconds > 0 for seconds in figures["seconds"][name].values())
        # A mean of 64 numbers, and not much more than a header.
        assert 4 * 64 < figures["bytes"][name] < 4 * 64 + 8192
