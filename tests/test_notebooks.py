"""The notebooks: their code short and sound; kept with outputs, but for two whose figures are large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
# They draw stored results.
WITHOUT_OUTPUTS = [FOLDER / f"{name}.ipynb" for name in ("02_calibration", "03_accuracy_and_memory")]

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
_MOST_BYTES = 200_000


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_every_notebook_is_listed() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(WITHOUT_OUTPUTS) < set(NOTEBOOKS)
    for path in FOLDER.glob("*.ipynb"):
        assert f"({path.name})" in listed


@pytest.mark.parametrize("path", sorted({*NOTEBOOKS} - {*WITHOUT_OUTPUTS}), ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run_from_top_to_bottom(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < _MOST_BYTES


@pytest.mark.parametrize("path", WITHOUT_OUTPUTS, ids=lambda path: path.stem)
def test_no_outputs_are_committed(path: Path) -> None:
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
