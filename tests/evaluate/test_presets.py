"""Every preset at once: `--preset all`, what cannot run here, and the one table of all codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.codecs import CODECS
from esm_turbo.codecs.peers.hugging_face import QuantoCodec
from esm_turbo.config import OPTIONAL_PRESETS, PRESETS
from esm_turbo.evaluate import Evaluation
from esm_turbo.evaluate.presets import resolve_presets

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"
OFF: dict[str, Any] = {"extend_ks": (), "outlier_scales": ()}
NOT_INSTALLED = "not installed: pip install 'esm-turbo[compare]'"


@pytest.fixture(scope="module")
def tiny(turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> TurboEsm:
    """A small model of random weights with its calibration."""
    return TurboEsm(tiny_model(preset="paper"), turbo.tokenizer)


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither quanto nor HQQ is installed."""

    def missing(*_: Any) -> Any:
        raise ValueError("codec 'quanto' needs optional packages") from ImportError("optimum.quanto")

    monkeypatch.setattr(QuantoCodec, "_new_layer", missing)


@pytest.fixture
def everything(tiny: TurboEsm, without_packages: None) -> Evaluation:
    return tiny.evaluate([SEQUENCE], "all", **OFF)


def test_all_is_every_preset_and_says_which_are_not_installed(everything: Evaluation) -> None:
    assert [preset.name for preset in everything.presets] == list(PRESETS)
    assert everything.unavailable == dict.fromkeys(OPTIONAL_PRESETS, NOT_INSTALLED)
    assert everything.to_dict()["unavailable"]["hqq4"] == NOT_INSTALLED


def test_every_codec_that_exists_is_behind_a_preset() -> None:
    assert {config.codec for config in (PRESETS | OPTIONAL_PRESETS).values()} == set(CODECS)


def test_one_table_shows_every_codec_with_its_bits_and_figures_by_arm(everything: Evaluation) -> None:
    first = everything.table().split("\n\n")[1:3]
    lines = [line.split() for line in "\n".join(first).splitlines()]
    assert ["arm", "bits", "x", "fp16", "cosine", "1", "%", "lowest", "KL,", "nats", "99", "%", "top-1"] in [
        line[:13] for line in lines
    ]
    rows = {tuple(line[:3]): line[3:] for line in lines if len(line) > 3 and line[1] == "-"}
    for name in list(PRESETS)[1:]:
        preset = everything[name]
        accuracy = preset.leave_one_out.against_frozen.residues
        found = rows[name, "-", "frozen"]
        assert found[:2] == [f"{preset.memory.bits_per_element:.2f}", f"{preset.memory.ratio_to_fp16:.2f}"]
        assert found[2:4] == [f"{accuracy.cosine_mean:.5f}", f"{accuracy.cosine_q01:.4f}"]
        assert float(found[5]) == pytest.approx(accuracy.kl_mean, rel=0.06, abs=5e-5)
        assert found[7] == f"{accuracy.top1_agreement:.4f}"
        assert rows[name, "-", "full"][0] == f"{preset.leave_one_out.against_full.residues.cosine_mean:.5f}"
    assert float(rows["frozen", "-", "full"][0]) == pytest.approx(everything["exact"].memory.bits_per_element, abs=0.01)


def test_the_table_ends_with_what_is_not_installed(everything: Evaluation) -> None:
    text = everything.table(80)
    for name in OPTIONAL_PRESETS:
        assert f"\n{name}: {NOT_INSTALLED}\n" in text


def test_what_was_asked_for_by_name_must_be_there(tiny: TurboEsm, without_packages: None) -> None:
    for presets in ("quanto4", ["quanto4"], ["all", "quanto4"], {"mine": "quanto4"}):
        with pytest.raises(ValueError, match="needs optional packages"):
            resolve_presets(tiny, presets)


def test_all_keeps_what_stands_before_it_first_and_names_nothing_twice(tiny: TurboEsm, without_packages: None) -> None:
    configs, unavailable = resolve_presets(tiny, ["kivi4", TurboConfig(bits=2), "all", "exact"])
    assert list(configs)[:3] == ["kivi4", TurboConfig(bits=2).name, "exact"]
    assert set(configs) == {*PRESETS, TurboConfig(bits=2).name}
    assert set(unavailable) == set(OPTIONAL_PRESETS)


def test_a_codec_that_cannot_have_the_geometry_says_so(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM], without_packages: None
) -> None:
    odd = TurboEsm(tiny_model(preset="exact", calibrated=True, head_dim=20, heads=2), turbo.tokenizer)
    configs, unavailable = resolve_presets(odd, "all")
    assert "exact" in configs
    assert "head_dim" in unavailable["int4"]
    assert set(configs) | set(unavailable) == {*PRESETS, *OPTIONAL_PRESETS}
    result = odd.evaluate([SEQUENCE], "all", **OFF)
    assert "\nint4: " in result.table()


def test_all_without_a_calibration_is_refused(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM], without_packages: None
) -> None:
    bare = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    with pytest.raises(ValueError, match="needs a calibration of this model"):
        bare.evaluate([SEQUENCE], "all", **OFF)
