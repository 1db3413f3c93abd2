"""Images of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import plots


def test_images_are_made_from_the_stored_results() -> None:
    assert plots.main(["--check"]) == 0


def test_an_image_is_the_same_in_every_run_and_one_of_older_results_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    monkeypatch.setattr(plots, "PLOTS", {"freezing": plots.freezing})
    drawn = []
    for _ in range(2):
        assert plots.main([]) == 0
        drawn.append({name: (tmp_path / f"{name}.svg").read_text() for name in plots.PLOTS})
    assert drawn[0] == drawn[1]
    assert plots.main(["--check"]) == 0
    (tmp_path / "freezing.svg").write_text("made from results 0123456789abcdef")
    assert plots.main(["--check"]) == 1
    assert "freezing" in capsys.readouterr().err


def test_an_image_without_results_names_them(results: Path) -> None:
    (results / "accuracy.jsonl").touch()
    with pytest.raises(LookupError, match="no records of presets on cath_val200"):
        plots.pareto()
