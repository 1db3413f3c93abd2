"""Presets by name and all at once, and those that cannot run here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import OPTIONAL_PRESETS, PRESETS
from esm_turbo.evaluate import Evaluation
from esm_turbo.evaluate.presets import resolve_presets
from tests.helpers.evaluation import NOT_INSTALLED, OFF, SEQUENCES


def test_all_stands_for_every_preset_and_reports_missing_packages(everything: Evaluation) -> None:
    assert [preset.name for preset in everything.presets] == list(PRESETS)
    assert everything.unavailable == dict.fromkeys(OPTIONAL_PRESETS, NOT_INSTALLED)
    assert everything.to_dict()["unavailable"]["hqq4"] == NOT_INSTALLED


def test_a_preset_given_by_name_must_be_available(tiny: TurboEsm, without_packages: None) -> None:
    for presets in ("quanto4", ["quanto4"], ["all", "quanto4"], {"mine": "quanto4"}):
        with pytest.raises(ValueError, match="needs optional packages"):
            resolve_presets(tiny, presets)


def test_all_keeps_earlier_presets_first_and_repeats_none(tiny: TurboEsm, without_packages: None) -> None:
    configs, unavailable = resolve_presets(tiny, ["kivi4", TurboConfig(bits=2), "all", "exact"])
    assert list(configs)[:3] == ["kivi4", TurboConfig(bits=2).name, "exact"]
    assert set(configs) == {*PRESETS, TurboConfig(bits=2).name}
    assert set(unavailable) == set(OPTIONAL_PRESETS)


def test_a_codec_that_does_not_support_the_geometry_is_left_out(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM], without_packages: None
) -> None:
    odd = TurboEsm(tiny_model(preset="exact", calibrated=True, head_dim=20, heads=2), turbo.tokenizer)
    configs, unavailable = resolve_presets(odd, "all")
    assert "exact" in configs
    assert "head_dim" in unavailable["int4"]
    assert set(configs) | set(unavailable) == {*PRESETS, *OPTIONAL_PRESETS}
    result = odd.evaluate(SEQUENCES[:1], "all", **OFF)
    assert "\nint4: " in result.table()


def test_all_without_a_calibration_is_refused(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM], without_packages: None
) -> None:
    bare = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    with pytest.raises(ValueError, match="needs a calibration of this model"):
        bare.evaluate(SEQUENCES[:1], "all", **OFF)
