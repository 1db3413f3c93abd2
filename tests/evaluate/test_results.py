"""The result: JSON, provenance, look-up by preset; figures by class, length, position and layer."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from esm_turbo import TurboConfig, TurboEsm
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import Evaluation
from tests.helpers.evaluation import OFF, SEQUENCES


def test_json_is_plain_and_has_the_provenance(evaluation: Evaluation, tiny: TurboEsm) -> None:
    text = evaluation.to_json()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON")) == evaluation.to_dict()
    about = evaluation.to_dict()["provenance"]
    assert about["proteins"] == 4
    assert about["residues"] == sum(map(len, SEQUENCES))
    assert about["dtype"] == "float32"
    assert about["device"] == "cpu"
    assert about["backend"] == "torch_ops"
    assert about["geometry"] == {"num_layers": 2, "num_heads": 4, "head_dim": 16}
    assert about["versions"]["torch"] == torch.__version__
    assert about["calibration"] == json.loads(json.dumps(tiny.calibration.provenance))
    assert len(about["sequences_sha256"]) == 64
    [exact, paper] = evaluation.to_dict()["presets"]
    assert (exact["name"], paper["name"]) == ("exact", "paper")
    assert TurboConfig.from_dict(paper["options"]) == PRESETS["paper"]
    assert paper["leave_one_out"]["against_frozen"]["residues"]["tokens"] == about["residues"]


def test_presets_keep_their_order_and_others_are_unknown(evaluation: Evaluation) -> None:
    assert [preset.name for preset in evaluation.presets] == ["exact", "paper"]
    with pytest.raises(KeyError, match="'turbo9' was not evaluated"):
        evaluation["turbo9"]


def test_groups_partition_the_residues(tiny: TurboEsm, evaluation: Evaluation) -> None:
    loo = evaluation["paper"].leave_one_out
    total = sum(map(len, SEQUENCES))
    assert {name: group.tokens for name, group in loo.by_class.items()} == {
        "mainly_alpha": len(SEQUENCES[0]) + len(SEQUENCES[2]),
        "mainly_beta": len(SEQUENCES[1]),
    }
    assert {name: group.tokens for name, group in loo.by_length.items()} == {"1-100": total}
    assert {name: group.tokens for name, group in loo.by_position.items()} == {"1-300": total}
    alone = tiny.evaluate(SEQUENCES[1], ["paper"], **OFF)["paper"].leave_one_out
    assert dataclasses.asdict(alone.against_frozen.residues) == pytest.approx(
        dataclasses.asdict(loo.by_class["mainly_beta"]), rel=1e-6
    )
    assert alone.by_class == {}


def test_long_proteins_are_grouped_by_position_and_length(tiny: TurboEsm) -> None:
    sequences = [("".join(SEQUENCES) * 10)[:n] for n in (640, 120)]
    loo = tiny.evaluate(sequences, ["paper"], **OFF)["paper"].leave_one_out
    assert {name: group.tokens for name, group in loo.by_position.items()} == {
        "1-300": 420,
        "301-600": 300,
        "over 600": 40,
    }
    assert list(loo.by_position) == ["1-300", "301-600", "over 600"]
    assert [group.tokens for group in loo.by_length.values()] == [120, 640]


def test_layers_end_with_the_final_hidden_states(evaluation: Evaluation) -> None:
    loo = evaluation["paper"].leave_one_out
    assert [layer.layer for layer in loo.by_layer] == [1, 2]
    assert loo.by_layer[-1].cosine_mean == pytest.approx(loo.against_frozen.residues.cosine_mean, abs=1e-9)
    assert loo.by_layer[-1].relative_rms_error == pytest.approx(loo.against_frozen.residues.relative_rms_error)
    assert loo.by_layer[0] != loo.by_layer[1]
