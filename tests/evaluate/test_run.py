"""`evaluate`: presets, options, input, progress, and the embedded model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import Evaluation
from esm_turbo.evaluate.presets import resolve_presets
from esm_turbo.proteins.fasta import FastaError
from tests.helpers.evaluation import CLASSES, OFF, SEQUENCES


def test_presets_by_name_by_options_and_by_default(tiny: TurboEsm) -> None:
    def names(presets: Any) -> list[str]:
        return [preset.name for preset in tiny.evaluate("MKTAYIAK", presets, **OFF).presets]

    assert names(None) == ["exact", "paper"]
    assert names(["paper", PRESETS["paper"], "exact"]) == ["paper", "exact"]
    assert names("exact") == ["exact"]
    assert names([TurboConfig(bits=2)])[0].startswith("custom-")
    assert names({"mine": TurboConfig(bits=2), "theirs": "paper"}) == ["mine", "theirs"]
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="`presets` must name at least one"):
            names(nothing)
    with pytest.raises(ValueError, match="`preset` must be one of"):
        names(["turbo99"])


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


def test_the_model_is_not_modified(tiny: TurboEsm) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    config, calibration = tiny.model.esm.turbo_config, tiny.calibration
    tiny.evaluate(SEQUENCES[:1], ["exact"], extend_ks=(1,))
    assert tiny.model.esm.turbo_config is config
    assert tiny.calibration is calibration
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.model.state_dict().items())


def test_without_a_calibration_only_full_precision_is_evaluated(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]
) -> None:
    bare = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    for presets in (["exact", "paper"], "all"):
        with pytest.raises(ValueError, match="needs a calibration of this model: make one with `esm-turbo calibrate"):
            bare.evaluate(SEQUENCES, presets)
    result = bare.evaluate(SEQUENCES, extend_ks=(1,))
    assert [preset.name for preset in result.presets] == ["exact"]
    assert result.provenance.calibration is None


def test_max_proteins_takes_the_first_ones(tiny: TurboEsm) -> None:
    result = tiny.evaluate(SEQUENCES, ["exact"], 2, names=["a", "b", "c", "d"], classes=CLASSES, **OFF)
    assert result.provenance.proteins == 2
    assert result.provenance.residues == len(SEQUENCES[0]) + len(SEQUENCES[1])


def test_input_is_normalised_and_bad_records_are_named(tiny: TurboEsm, evaluation: Evaluation) -> None:
    lower = tiny.evaluate([s.lower() + "*" for s in SEQUENCES], ["exact"], **OFF)
    assert lower.provenance.sequences_sha256 == evaluation.provenance.sequences_sha256
    for bad, reason in (("MKJA", "position 3"), ("MK<mask>A", "position 3"), ("", "holds no residues")):
        with pytest.raises(ValueError, match=f"Q9.*{reason}") as caught:
            tiny.evaluate(["MKTA", bad], ["exact"], names=["P1", "Q9"], **OFF)
        assert not isinstance(caught.value, FastaError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_proteins": 0}, "`max_proteins` must be at least 1"),
        ({"extend_ks": (1, 0)}, "`extend_ks` must be at least 1 each"),
        ({"refresh_ws": (-1,)}, "`refresh_ws` must be at least 0 each"),
        ({"names": ["only one"]}, "`names` must be one per sequence, got 1 for 4"),
        ({"classes": ["x"] * 5}, "`classes` must be one per sequence, got 5 for 4"),
    ],
)
def test_bad_options_are_refused(tiny: TurboEsm, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.evaluate(SEQUENCES, ["exact"], **options)


def test_no_sequences_are_refused(tiny: TurboEsm) -> None:
    with pytest.raises(ValueError, match="`sequences` must hold at least one"):
        tiny.evaluate([], ["exact"])


def test_progress_ends_every_stage(tiny: TurboEsm) -> None:
    seen: list[tuple[str, int, int]] = []
    tiny.evaluate(
        SEQUENCES,
        ["paper"],
        extend_ks=(1,),
        progress=lambda *report: seen.append(report),
    )
    stages = {stage: [(done, total) for name, done, total in seen if name == stage] for stage, _, _ in seen}
    assert list(stages) == ["leave-one-out", "extend"]
    for reports, total in zip(stages.values(), (4, 4), strict=True):
        assert reports[0] == (0, total)
        assert reports[-1] == (total, total)
        assert reports == sorted(reports)


def test_figures_of_two_models_are_refused(tiny: TurboEsm) -> None:
    changing = TurboEsm(copy.deepcopy(tiny.model), tiny.tokenizer)

    def progress(*_: object) -> None:
        with torch.no_grad():
            changing.model.esm.encoder.layer[0].output.dense.bias.add_(1e-3)

    with pytest.raises(ValueError, match="the model has changed"):
        changing.evaluate(SEQUENCES, ["exact"], extend_ks=(), progress=progress)


def test_a_reference_of_other_weights_is_refused(tiny: TurboEsm, turbo: TurboEsm) -> None:
    changed, reduced = (TurboEsm(copy.deepcopy(tiny.model), tiny.tokenizer) for _ in range(2))
    with torch.no_grad():
        changed.model.esm.encoder.layer[0].output.dense.weight.add_(1e-3)
    for other in (changed, turbo):
        with pytest.raises(ValueError, match="`reference` has other weights"):
            tiny.evaluate(SEQUENCES[:1], ["exact"], **OFF, reference=other)
    reduced.model.bfloat16()
    precision = tiny.evaluate(SEQUENCES[:1], ["exact"], **OFF, reference=reduced).precision
    assert precision is not None and 0 < precision.residues.kl_mean < 1e-2


def test_the_embedded_model_on_a_real_protein(turbo: TurboEsm) -> None:
    sequence = "VLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAV"
    result = turbo.evaluate(sequence, ["paper"], extend_ks=iter([8]), refresh_ws=iter([0, 8]))
    paper = result["paper"]
    assert result.provenance.model == "esm2-mini"
    assert result.frozen.leave_one_out.residues.relative_rms_error < 1e-5
    assert paper.leave_one_out.against_frozen.residues.cosine_mean > 0.96
    assert paper.leave_one_out.against_frozen.residues.kl_mean < 0.03
    unrefreshed, refreshed = (e.against_full for e in result.frozen.extend)
    assert unrefreshed and refreshed
    assert refreshed.residues.relative_rms_error < unrefreshed.residues.relative_rms_error
    assert "/" not in json.dumps([result.provenance.model, result.to_dict()["frozen"]])
