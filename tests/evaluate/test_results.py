"""The result: JSON, provenance, and look-up by preset."""

from __future__ import annotations

import json

import pytest
import torch

from esm_turbo import TurboConfig, TurboEsm
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import Evaluation
from tests.helpers.evaluation import SEQUENCES


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
