"""The check of every accuracy row, and rounding."""

from __future__ import annotations

import pytest

from benchmarks.harness import embedded
from esm_turbo.config import PRESETS


def test_leave_one_out_at_full_precision_agrees_with_the_plain_model() -> None:
    check = embedded.exactness(embedded.evaluation_set("paper_six", 1)[0])
    assert 0 < check.error < 1e-4
    assert check.passed


def test_the_check_finds_a_wrong_frozen_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "FROZEN", PRESETS["int8"])
    assert not embedded.exactness(embedded.evaluation_set("paper_six", 1)[0]).passed


def test_rounding_keeps_seven_digits() -> None:
    assert embedded.rounded({"a": [1 / 3, True, None, "x", 7], "b": (2e-9 / 3,)}) == {
        "a": [0.3333333, True, None, "x", 7],
        "b": [6.666667e-10],
    }
