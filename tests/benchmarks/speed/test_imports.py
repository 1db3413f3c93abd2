"""Import times."""

from __future__ import annotations

import pytest

from benchmarks.speed import imports


def test_a_heavy_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = imports.cases()
    monkeypatch.setattr(imports, "_python", lambda code: "calibrate loaded: torch" if "main" in code else "")
    assert case.check().error == 1


def test_statements_are_timed_inside_and_the_command_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = imports.cases()
    monkeypatch.setattr(imports, "_python", lambda code: "calibrate loaded:" if "loaded" in code else "0.25")
    monkeypatch.setattr(imports, "_LOADED", "")
    seconds = case.measure(2)["seconds"]
    assert seconds["import esm_turbo"]["p50"] == 0.25
    assert seconds["esm-turbo --help"]["p50"] < 0.25
