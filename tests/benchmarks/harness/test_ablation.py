"""The paper's ablation: options, and figures under their names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.harness.ablation import PAPER_ABLATION, PAPER_TABLE_7
from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import PRESETS
from tests.helpers.evaluation import OFF, SEQUENCES


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    assert list(PAPER_ABLATION)[:5] == list(PAPER_TABLE_7)
    changes = {
        name: {key for key, value in config.to_dict().items() if value != PRESETS["paper"].to_dict()[key]}
        for name, config in PAPER_ABLATION.items()
    }
    assert changes == {
        "full": set(),
        "no sign": {"sign_correction"},
        "shared LUT": {"shared_codebook"},
        "no rotation": {"key_transform"},
        "no rotation, no sign": {"key_transform", "sign_correction"},
        "random Hadamard": {"key_transform"},
        "standardised": {"standardize"},
        "signs on keys only": {"sign_correction"},
        "protected tokens": {"protect_special_tokens"},
        "16 levels, no sign": {"bits", "sign_correction"},
        "4 levels": {"bits"},
    }


def test_the_ablation_keeps_its_names(turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    tiny = TurboEsm(tiny_model(preset="paper"), turbo.tokenizer)
    result = tiny.evaluate(SEQUENCES[:1], PAPER_ABLATION, **OFF)
    assert [preset.name for preset in result.presets] == list(PAPER_ABLATION)
    bits = {name: result[name].memory.bits_per_element for name in PAPER_ABLATION}
    # One more byte per token for its id, over 256 components, and the length of the row.
    assert bits["full"] == pytest.approx(4, abs=0.04)
    assert bits["no sign"] == bits["no rotation, no sign"] == pytest.approx(3, abs=0.04)
    assert bits["16 levels, no sign"] == bits["full"]
    assert bits["4 levels"] == bits["no sign"]
    assert bits["signs on keys only"] == pytest.approx(3.5, abs=0.04)
    assert bits["protected tokens"] > bits["full"]
    errors = {name: result[name].leave_one_out.against_frozen.residues.relative_rms_error for name in PAPER_ABLATION}
    assert len(set(errors.values())) == len(errors)
    assert errors["no sign"] > errors["full"]
