"""What a run used, in words and as JSON values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.tasks.common.run_info import RunInfo, context_arm

MakeModel = Callable[..., TurboEsmForMaskedLM]


def test_the_embedded_model_is_a_demonstration(turbo: TurboEsm, tmp_path: Path) -> None:
    info = RunInfo.of(turbo, ["full", "frozen", "turbo"])
    assert str(info) == (
        "model esm2-mini, arms full, frozen (preset exact), turbo (preset turbo3), device cpu, float32, 1 thread"
    )
    assert info.to_dict() == {
        "model": "esm2-mini",
        "arms": {"full": None, "frozen": "exact", "turbo": "turbo3"},
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "demonstration": True,
    }


def test_another_model_is_not(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    other = TurboEsm(tiny_model(preset="paper").bfloat16(), turbo.tokenizer)
    other.model.config._name_or_path = "someone/mine"
    assert not RunInfo.of(other).demonstration
    assert str(RunInfo.of(other)) == "model someone/mine, device cpu, bfloat16, 1 thread"
    assert (
        str(RunInfo.of(other, ["turbo"]))
        == "model someone/mine, arm turbo (preset paper), device cpu, bfloat16, 1 thread"
    )


def test_contexts_without_a_calibration_are_refused(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    model = tiny_model()
    model.set_turbo(preset="turbo3")
    bare = TurboEsm(model, turbo.tokenizer)
    assert RunInfo.of(bare, ["full", "frozen"]).arms == {"full": None, "frozen": "exact"}
    with pytest.raises(ValueError, match="needs a calibration"):
        RunInfo.of(bare, ["frozen", "turbo"])


def test_the_arm_of_contexts(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    assert context_arm(turbo) == "turbo"
    assert context_arm(TurboEsm(tiny_model(), turbo.tokenizer)) == "frozen"


def test_cells_of_a_table_name_the_run(turbo: TurboEsm) -> None:
    assert RunInfo.of(turbo, ["turbo"]).cells() == ["esm2-mini", "turbo3", "cpu"]
    assert RunInfo.of(turbo, ["full"]).cells() == ["esm2-mini", "", "cpu"]
    assert RunInfo.of(turbo, ["full", "frozen", "turbo"]).cells()[1] == "frozen=exact turbo=turbo3"
    assert RunInfo.of(turbo, ["full", "turbo"]).cells("turbo") == ["esm2-mini", "turbo3", "cpu"]
    assert RunInfo.of(turbo, ["full", "turbo"]).cells("full") == ["esm2-mini", "", "cpu"]
