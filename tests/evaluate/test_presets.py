"""Presets by name and all at once, and those that cannot run here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import Evaluation
from esm_turbo.evaluate.presets import resolve_presets
from tests.helpers.evaluation import OFF, SEQUENCES


def test_all_stands_for_every_preset(everything: Evaluation) -> None:
    assert [preset.name for preset in everything.presets] == list(PRESETS)
    assert everything.unavailable == {}


def test_all_keeps_earlier_presets_first_and_repeats_none(tiny: TurboEsm) -> None:
    configs, unavailable = resolve_presets(tiny, ["kivi4", TurboConfig(bits=2), "all", "exact"])
    assert list(configs)[:3] == ["kivi4", TurboConfig(bits=2).name, "exact"]
    assert set(configs) == {*PRESETS, TurboConfig(bits=2).name}
    assert unavailable == {}


def test_a_codec_that_does_not_support_the_geometry_is_left_out(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]
) -> None:
    odd = TurboEsm(tiny_model(preset="exact", calibrated=True, head_dim=20, heads=2), turbo.tokenizer)
    configs, unavailable = resolve_presets(odd, "all")
    assert "exact" in configs
    assert "head_dim" in unavailable["int4"]
    assert set(configs) | set(unavailable) == set(PRESETS)
    for presets in ("int4", ["int4"], ["all", "int4"], {"mine": "int4"}):
        with pytest.raises(ValueError, match="head_dim"):
            resolve_presets(odd, presets)
    result = odd.evaluate(SEQUENCES[:1], "all", **OFF)
    assert "\nint4: " in result.table()


def test_all_without_a_calibration_is_refused(turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    bare = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    with pytest.raises(ValueError, match="needs a calibration of this model"):
        bare.evaluate(SEQUENCES[:1], "all", **OFF)
