"""The accuracy of a calibration: its JSON form, and the presets that fall short."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.files.quality import EXPECTED, EightBits, Figures, Quality

GOOD = Figures(cosine_mean=1.0, cosine_q01=1.0, kl_mean=0.0, kl_q99=0.0, top1_agreement=1.0)

FAIR = dataclasses.replace(GOOD, kl_mean=0.1)


def quality_of(**presets: Figures) -> Quality:
    return Quality(2, 90, "0" * 64, "float32", "cpu", presets, 8, {0: GOOD, 8: GOOD, 32: GOOD})


def test_json_and_back() -> None:
    quality = quality_of(**dict.fromkeys(("quarot", "turbo1", "turbo4", "paper"), GOOD), turbo3=FAIR)
    older = {name: value for name, value in quality.to_dict().items() if name != "eight_bits"}
    assert Quality.from_dict(older) == quality
    quality = dataclasses.replace(quality, eight_bits=EightBits(FAIR, GOOD, ((0, "qkv"), (3, "mlp_out"))))
    found = Quality.from_dict(json.loads(json.dumps(quality.to_dict(), allow_nan=False, sort_keys=True)))
    assert found == quality
    assert list(found.freezing) == [0, 8, 32]
    assert list(found.presets) == ["paper", "turbo4", "turbo3", "turbo1", "quarot"]


@pytest.mark.parametrize(
    "change", [{"presets": {"turbo3": {}}}, {"presets": []}, {"freezing": {"few": {}}}, {"newer": 1}, {"residues": ...}]
)
def test_other_json_is_refused(change: dict[str, Any]) -> None:
    values = quality_of(turbo3=GOOD).to_dict() | change
    values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Quality.from_dict(values)


def test_every_compressed_product_preset_has_an_expectation_and_more_bits_a_stricter_one() -> None:
    assert {*EXPECTED, "exact"} == set(PRODUCT_PRESETS)
    by_bits = [EXPECTED[f"turbo{bits}"] for bits in (4, 3, 2, 1)]
    assert by_bits == sorted(by_bits, key=lambda one: (-one.cosine_mean, one.kl_mean))


def test_the_documentation_states_the_expectations() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = page.partition("| preset | mean cosine, at least |")[2].partition("\n\n")[0]
    for preset, expected in EXPECTED.items():
        [row] = [row for row in table.splitlines() if f"`{preset}`" in row]
        assert row.endswith(f"| {expected.cosine_mean:g} | {expected.kl_mean:g} |")


@pytest.mark.parametrize("preset", EXPECTED)
def test_a_preset_falls_short_in_cosine_or_divergence_alone(preset: str) -> None:
    expected = EXPECTED[preset]
    at_the_limit = dataclasses.replace(GOOD, cosine_mean=expected.cosine_mean, kl_mean=expected.kl_mean)
    assert quality_of(**{preset: at_the_limit}).shortfall(preset) is None
    for worse in ({"cosine_mean": expected.cosine_mean - 1e-6}, {"kl_mean": expected.kl_mean * 1.01}):
        found = quality_of(**{preset: dataclasses.replace(at_the_limit, **worse)})
        message = found.shortfall(preset)
        assert message is not None
        assert f"preset {preset!r} is inaccurate on this model" in message
        assert "\n" not in message


def test_presets_that_were_not_measured_or_have_no_expectation_are_not_judged() -> None:
    bad = Figures(0.1, 0.1, 5.0, 9.0, 0.0)
    assert quality_of(kivi2=bad).shortfall("kivi2") is None
    assert quality_of(kivi2=bad).shortfall("turbo3") is None
