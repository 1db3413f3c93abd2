"""Images of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import plots


def test_images_are_made_from_the_stored_results() -> None:
    assert plots.main(["--check"]) == 0


def test_an_image_is_the_same_in_every_run(tmp_path: Path) -> None:
    [name] = [name for name in plots.PLOTS if name == "pareto"]
    for folder in ("first", "second"):
        assert plots.main([name, "--to", str(tmp_path / folder)]) == 0
    first, second = ((tmp_path / folder / "pareto.svg").read_text() for folder in ("first", "second"))
    assert first == second
    assert plots.source(name) in first


def test_an_image_of_older_results_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pareto.svg").write_text("made from results 0123456789abcdef")
    assert plots.main(["pareto", "--to", str(tmp_path), "--check"]) == 1
    assert "pareto" in capsys.readouterr().err


def test_an_image_without_results_is_left_out(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plots.main(["pareto", "--to", str(tmp_path / "images")]) == 0
    assert "pareto: left out, no records of presets on cath_val200" in capsys.readouterr().err
    assert not (tmp_path / "images" / "pareto.svg").exists()


def test_unknown_images_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plots.main(["nonsense"])
    assert stopped.value.code == 2
    assert "no such image: nonsense" in capsys.readouterr().err
