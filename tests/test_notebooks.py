"""The notebooks that draw stored results: kept without outputs, which are large, and their code short and sound."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = [FOLDER / f"{name}.ipynb" for name in ("02_calibration", "03_accuracy_and_memory")]


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_every_notebook_is_listed() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(path.is_file() for path in NOTEBOOKS)
    for path in FOLDER.glob("*.ipynb"):
        assert f"({path.name})" in listed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_committed(path: Path) -> None:
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_is_short_and_parses(path: Path) -> None:
    for cell in cells(path, "code"):
        lines = [line for line in cell["source"] if not line.startswith("%")]
        ast.parse("".join(lines))
        assert len(lines) <= 25
    assert len(cells(path, "markdown")) >= len(cells(path, "code")) - 2
