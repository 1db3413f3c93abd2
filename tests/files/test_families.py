"""The table of families agrees with the classes, and says so where the library lacks one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

import esm_turbo
from esm_turbo.files.families import FAMILIES, encoder_of, family_of, projections_of
from tests.helpers.models import make_esm

INSTALLED = [
    family
    for family in FAMILIES.values()
    if family.tokenizer_module != "transformers" or hasattr(transformers, family.tokenizer)
]


@pytest.mark.parametrize("family", INSTALLED, ids=lambda family: family.name)
def test_the_classes_are_where_the_table_says(family) -> None:
    model, masked_lm = family.load(family.model), family.load(family.masked_lm)
    assert model.family is masked_lm.family is family
    assert model.config_class.model_type == family.model_type
    assert issubclass(masked_lm, transformers.PreTrainedModel) and masked_lm.base_model_prefix == family.attribute
    assert family.load_tokenizer().__name__ == family.tokenizer


def test_projections_are_those_of_every_layer() -> None:
    model = make_esm(layers=3)
    assert encoder_of(model) is encoder_of(model.esm) is model.esm
    found = projections_of(model.esm)
    assert len(found) == 3
    for layer, own in zip(model.esm.encoder.layer, found, strict=True):
        attention = layer.attention.self
        assert own == (attention.query, attention.key, attention.value, layer.attention.output.dense)


def test_what_is_no_model_of_a_family_stays_as_it_is() -> None:
    linear = torch.nn.Linear(2, 2)
    assert encoder_of(linear) is linear
    with pytest.raises(ValueError, match=r"a folder: not ESM-2, ESM-C or E1 but model type 'bert'"):
        family_of("bert", "a folder")
    with pytest.raises(ValueError, match="model type None"):
        family_of(None, "a folder")


def test_a_library_without_the_family_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an older transformers: the module cannot be imported, and there is no tokenizer."""
    family = FAMILIES["esmc"]
    monkeypatch.setitem(sys.modules, "transformers.models.esmc.modeling_esmc", None)
    monkeypatch.delitem(sys.modules, family.modeling, raising=False)
    monkeypatch.setattr(transformers, "EsmcTokenizer", None, raising=False)
    monkeypatch.delattr(transformers, "EsmcTokenizer")
    line = re.escape(f"ESM-C needs transformers 5.16 or newer, installed is {transformers.__version__}")
    with pytest.raises(ValueError, match=f"^{line}$"):
        family.load(family.model)


def test_only_a_familys_own_modules_name_it() -> None:
    """Everything else asks the model: an encoder is `model.base_model`, whatever the family calls it."""
    package, own = Path(esm_turbo.__file__).parent, {family.modeling.rpartition(".")[2] for family in FAMILIES.values()}
    naming = re.compile(rf"\.({'|'.join(FAMILIES)})\b(?!\.)")
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path.stem not in own
        for line in path.read_text(encoding="utf-8").splitlines()
        if naming.search(line)
    ]
    assert found == []
