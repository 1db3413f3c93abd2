"""Heads that were never trained: named in the metadata, missing in the checkpoint, or as initialised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboEsmModel
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.model.heads import UntrainedHeadWarning, check_head
from tests.helpers.models import random_ids

CONTACTS = "contacts would be noise"
PROBABILITIES = "residue probabilities would be noise"


@pytest.fixture
def checkpoint(turbo, tiny_model, tmp_path) -> Path:
    """A checkpoint whose heads are trained."""
    TurboEsm(tiny_model(), turbo.tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_weights(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_trained_heads_are_used(checkpoint: Path) -> None:
    turbo = TurboEsm.from_pretrained(checkpoint, preset="exact")
    check_head(turbo.model, "contact_head")
    check_head(turbo.model, "lm_head")
    assert turbo.embed("MKTAY", include="contacts")[0].contacts.std() > 0.001


def test_metadata_names_an_untrained_head(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"untrained_heads": ["contact_head"]}))
    turbo = TurboEsm.from_pretrained(checkpoint, preset="exact")
    with pytest.raises(ValueError, match=f"{CONTACTS}: the contact head of this model was never trained;"):
        turbo.embed("MKTAY", include="contacts")
    check_head(turbo.model, "lm_head")


@pytest.mark.parametrize("named", ["contact_head", "", -1, {}, [[]], ["contacts"]])
def test_metadata_that_names_no_head_is_refused(checkpoint: Path, named: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"untrained_heads": named}))
    with pytest.raises(ValueError, match="`untrained_heads` must be a list of some of contact_head, lm_head, got"):
        TurboEsm.from_pretrained(checkpoint)


def _mixed(head: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(size, 4, size, batch_first=True), head).eval()


def test_a_head_that_computes_tokens_from_each_other_gives_no_scores(turbo: TurboEsm, tiny_model) -> None:
    """Of the head, tasks run some tokens only."""
    turbo = TurboEsm(tiny_model(), turbo.tokenizer)
    cache, head = turbo.prefill("MKTAYIAK"), turbo.model.lm_head

    class MeanFree(type(head)):
        def forward(self, *args):
            logits = super().forward(*args)
            return logits - logits.mean(dim=-2, keepdim=True)

    calls = (
        lambda: turbo.score_variants("MKTAYIAK", ["K2A"], arm="full").scores[0].score,
        lambda: turbo.extend(cache, "ACD").logits,
        lambda: turbo.generate("MKT<mask>YIAK", seed=0),
    )
    before = [call() for call in calls]
    for change in (
        lambda: setattr(turbo.model, "lm_head", _mixed(head, turbo.model.config.hidden_size)),
        lambda: head.register_forward_hook(lambda module, args, output: output - output.mean(dim=-2, keepdim=True)),
        lambda: setattr(head, "__class__", MeanFree),
    ):
        handle = change()
        for call in calls:
            with pytest.raises(ValueError, match=r"the head of the model, computes tokens from each other"):
                call()
        turbo.model.lm_head, head.__class__ = head, MeanFree.__base__
        if handle is not None:
            handle.remove()
    after = [call() for call in calls]
    assert after[0] == before[0] and torch.equal(after[1], before[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_that_mixes_tokens_a_little_is_seen_in_any_dtype(turbo: TurboEsm, tiny_model, dtype, device) -> None:
    turbo = TurboEsm(tiny_model().to(device, dtype), turbo.tokenizer)
    head, share = turbo.model.lm_head, 0.0
    head.dense.register_forward_hook(lambda module, args, output: output + share * output.roll(1, -2))
    turbo.score_variants("MKTAYIAK", ["K2A"], arm="full")
    share = 0.02
    with pytest.raises(ValueError, match=r"computes tokens from each other"):
        turbo.score_variants("MKTAYIAK", ["K2A"], arm="full")


class Pooled(nn.Module):
    """Divides states by a statistic over tokens, such as ConvNeXt V2's global response norm."""

    def __init__(self, pool: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states / self.pool(states)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: x.norm(dim=-2, keepdim=True).mean(-1, keepdim=True) / x.norm(dim=-2, keepdim=True),
        lambda x: x.square().mean(dim=-2, keepdim=True).sqrt(),
        lambda x: x.square().mean(dim=(-2, -1), keepdim=True).sqrt(),
        lambda x: x.abs().amax(dim=(-2, -1), keepdim=True),
        lambda x: x.amax(dim=-2, keepdim=True),
    ],
)
@pytest.mark.parametrize("size", [64, 256])
def test_statistics_over_tokens_are_seen_in_a_head(tiny_model, size: int, pool) -> None:
    model = tiny_model()
    model.config.hidden_size = size
    # The norm hides how large its input is, but for a little.
    model.lm_head = nn.Sequential(
        Pooled(pool), nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size), nn.Linear(size, 33)
    )
    with pytest.raises(ValueError, match=r"computes tokens from each other"):
        check_head(model, "lm_head")


@pytest.mark.parametrize("cls", [TurboEsmForMaskedLM, TurboEsmModel])
def test_a_checkpoint_that_lacks_its_contact_head(checkpoint: Path, tmp_path: Path, cls: type) -> None:
    change_weights(checkpoint, lambda state: state.pop("esm.contact_head.regression.weight"))
    model = cls.from_pretrained(checkpoint, preset="exact").eval()
    with pytest.raises(ValueError, match=CONTACTS):
        check_head(model, "contact_head")
    # A copy, which has the head's random numbers, says so too.
    model.save_pretrained(tmp_path / "copy")
    with pytest.raises(ValueError, match=CONTACTS):
        check_head(cls.from_pretrained(tmp_path / "copy", preset="exact"), "contact_head")


def test_a_head_as_initialised_is_recognised(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda state: state["esm.contact_head.regression.bias"].zero_())
    turbo = TurboEsm.from_pretrained(checkpoint, preset="exact")
    with pytest.raises(ValueError, match="its intercept is exactly 0, as initialised"):
        turbo.embed("MKTAY", include="contacts")


def test_the_embedded_model_says_so_itself(turbo: TurboEsm, tmp_path: Path) -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    assert config["untrained_heads"] == ["contact_head"]
    turbo.save_pretrained(tmp_path)
    assert TurboEsm.from_pretrained(tmp_path).model.config.untrained_heads == ["contact_head"]


@torch.no_grad()
def test_predict_contacts_warns_as_it_stays_that_of_hugging_face(turbo: TurboEsm, tiny_model, recwarn) -> None:
    ids, mask = random_ids([9])
    tiny_model().predict_contacts(ids, mask)
    assert not recwarn.list
    with pytest.warns(UntrainedHeadWarning, match=CONTACTS):
        turbo.model.predict_contacts(ids, mask)


def test_a_checkpoint_without_a_language_model_head(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda state: [state.pop(k) for k in list(state) if k.startswith("lm_head")])
    turbo = TurboEsm.from_pretrained(checkpoint, preset="exact")
    with pytest.raises(ValueError, match=PROBABILITIES):
        turbo.score("MKTAY", "GSG", arm="frozen")
    with pytest.raises(ValueError, match=PROBABILITIES):
        turbo.score_variants("MKTAY", "M1A", arm="full")
    with pytest.raises(ValueError, match=PROBABILITIES):
        turbo.generate("MKTAY", max_new_tokens=1)
    assert turbo.embed("MKTAY")[0].representations[2].shape == (5, 64)


def test_a_head_that_lacks_any_weight_is_untrained(checkpoint: Path) -> None:
    # Copies: the file is written again.
    whole = {name: tensor.clone() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    parts = [name for name in whole if name.startswith("lm_head.")]
    assert len(parts) >= 5
    for part in parts:
        rest = {name: tensor for name, tensor in whole.items() if name != part}
        save_file(rest, checkpoint / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=PROBABILITIES):
            check_head(TurboEsmForMaskedLM.from_pretrained(checkpoint, preset="exact"), "lm_head")
    # Where it is not that of the input, the output embedding is part of the head.
    save_file(whole, checkpoint / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=PROBABILITIES):
        check_head(TurboEsmForMaskedLM.from_pretrained(checkpoint, preset="exact"), "lm_head")
