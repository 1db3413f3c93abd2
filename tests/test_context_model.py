"""The narrow waist: what tasks use of a `ContextModel`, and its `prefill` and `extend`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from unittest.mock import Mock

import pytest
import torch

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import PRESETS
from esm_turbo.context_model import ContextModel, as_list
from esm_turbo.files import identity
from tests.helpers.models import CLS, assert_same_states

MakeModel = Callable[..., TurboEsmForMaskedLM]
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV", "GAVLMFWPSTCYNQ"]


@pytest.fixture(scope="module")
def exact() -> TurboEsm:
    return TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")


def test_none_at_all() -> None:
    with pytest.raises(ValueError, match="`variants` must hold at least one variant"):
        as_list([], "variant")


def test_prefill_is_cls_and_residues(exact: TurboEsm) -> None:
    cache = exact.prefill([" mktayi ", "GAVL<mask>M*"])
    assert isinstance(cache, TurboKVCache)
    assert cache.lengths.tolist() == [7, 7]
    assert cache.token_ids.tolist() == [[0, 20, 15, 11, 5, 19, 12], [0, 6, 5, 7, 4, 32, 20]]
    ids = torch.tensor([[0, 20, 15, 11, 5, 19, 12], [0, 6, 5, 7, 4, 32, 20]])
    with torch.no_grad():
        expected = exact.model(ids, use_cache=True).past_key_values
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(layer.packed["keys"], other.packed["keys"])
        assert torch.equal(layer.packed["values"], other.packed["values"])


def test_one_sequence(exact: TurboEsm) -> None:
    assert exact.prefill("MKT").lengths.tolist() == exact.prefill(["MKT"]).lengths.tolist() == [4]
    assert exact.prefill(("MKT", "M")).lengths.tolist() == [4, 2]


def test_totals_of_each_sequence(exact: TurboEsm) -> None:
    """Totals are one number or one per sequence; by default they are the context's own counts."""

    def keys(**totals: object) -> torch.Tensor:
        return exact.prefill(["MKTAY", "GA<mask>VL"], **totals).layers[3].packed["keys"]

    assert (keys() - keys(total_tokens=6, total_masks=[0, 1])).abs().max() <= 1e-4
    both = keys(total_tokens=20, total_masks=4)
    assert torch.equal(both, keys(total_tokens=[20, 20], total_masks=torch.tensor([4, 4])))
    assert (both - keys()).abs().max() > 1e-2
    only_tokens = keys(total_tokens=20)
    assert (only_tokens - keys(total_tokens=20, total_masks=[0, 1])).abs().max() == 0


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, "`sequences` must hold at least one"),
        ([""], {}, "sequence 1"),
        (["MKT", "MJT"], {}, "sequence 2.*position 2"),
        (["MKT", "M*T"], {}, "sequence 2.*position 2"),
        (["M-KT"], {}, "sequence 1.*position 2"),
        ("<mask>", {"total_tokens": 1}, "`total_tokens` must be at least the context's own"),
        ("MKT", {"total_tokens": 3}, r"`total_tokens` must be at least the context's own \[4\], got \[3\]"),
        ("M<mask>T", {"total_masks": 0}, "`total_masks` must be at least"),
        ("MKT", {"total_masks": 4}, "`total_masks` must be smaller"),
        (["MKT", "MK"], {"total_tokens": [9, 9, 9]}, "`total_tokens` must be one number or one per sequence"),
        (["MKT", "MK"], {"total_tokens": [9]}, "`total_tokens` must be one number or one per sequence"),
        (["MKT"], {"total_masks": [[1]]}, "`total_masks` must be one number or one per sequence"),
        (["MKT"], {"total_tokens": 9.7}, "`total_tokens` must be integers, got 9.7"),
    ],
)
def test_prefill_refuses(exact: TurboEsm, sequences: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact.prefill(sequences, **options)


def test_extend_output(exact: TurboEsm) -> None:
    cache = exact.prefill(SEQUENCES)
    output = exact.extend(cache, ["GAV", "L"])
    assert output.hidden_states.shape == (2, 4, exact.model.config.hidden_size)
    assert output.logits.shape == (2, 4, 33)
    assert output.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert exact.extend(cache, ["GAV", "L"], eos=False).logits.shape == (2, 3, 33)
    with pytest.raises(FrozenInstanceError):
        output.logits = None


@pytest.mark.parametrize("refresh", [0, 8])
def test_sequences_name_their_contexts(turbo: TurboEsm, refresh: int) -> None:
    """As one context at a time, up to the rounding of products that are summed in another order."""
    cache, index = turbo.prefill([*SEQUENCES, "MKTAY"]), [2, 0, 1, 0]
    new = ["GSGSW", "A", "GG<mask>", "WWK"]
    found = turbo.extend(cache, new, refresh=refresh, context_index=torch.tensor(index))
    assert found.attention_mask.sum(1).tolist() == [6, 2, 4, 4]
    for row, context in enumerate(index):
        expected = turbo.extend(cache.select(context), new[row], refresh=refresh)
        n = expected.logits.shape[1]
        assert_same_states(found.logits[row, :n], expected.logits[0], turbo.model.config)
        assert_same_states(found.hidden_states[row, :n], expected.hidden_states[0], turbo.model.config)


def test_refreshed_residues_keep_their_positions(exact: TurboEsm) -> None:
    """After a gap, refreshed residues run at their own positions, as in a forward with these positions."""
    context, far, new = [CLS, 5, 6, 7, 8], [9, 10, 11], "GA"
    positions = torch.tensor([[0, 1, 2, 3, 4, 30, 31, 32]])
    with torch.no_grad():
        cache = exact.model(torch.tensor([context + far]), None, positions, use_cache=True).past_key_values
        output = exact.extend(cache, new, refresh=2, eos=False)
        ids = torch.tensor([[10, 11, *exact.codes.encode(new, "it")]])
        mask = torch.tensor([[1] * 6 + [0] * 2 + [1] * 4])
        expected = exact.model(ids, mask, torch.tensor([[31, 32, 33, 34]]), past_key_values=cache).logits[:, 2:]
    assert (output.logits - expected).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("contexts", "sequences", "options", "message"),
    [
        (["MKT", "MK"], ["G", "A", "V"], {}, "the cache has 2 rows, but there are 3 sequences"),
        (["MKT", "MK"], "G", {}, "the cache has 2 rows, but there are 1 sequences"),
        (["MKT"], [], {}, "`sequences` must hold at least one"),
        (["MKT"], ["G", ""], {}, "sequence 2"),
        (["MKT"], ["GJ"], {}, "sequence 1.*position 2"),
        (["MKT"], ["G"], {"refresh": -1}, "`refresh` must be at least 0, got -1"),
        (["MKT"], ["G", "A"], {"append": True}, "cannot append 2 rows to a cache of one"),
    ],
)
def test_extend_refuses(
    exact: TurboEsm, contexts: list[str], sequences: object, options: dict[str, object], message: str
) -> None:
    cache = exact.prefill(contexts)
    with pytest.raises(ValueError, match=message):
        exact.extend(cache, sequences, **options)
    assert cache.lengths.tolist() == [len(context) + 1 for context in contexts]


def test_extend_refuses_an_empty_cache(exact: TurboEsm) -> None:
    cache = exact.prefill(["MKT", "MK"])
    cache.crop(0)
    with pytest.raises(ValueError, match="empty row"):
        exact.extend(cache, ["G", "A"])
    with pytest.raises(ValueError, match="the cache has 0 rows"):
        exact.extend(exact.model.new_cache(), ["G"])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("lm_head.dense", "with dropout in lm_head.dense"),
        ("esm.encoder.layer.1.output.dense", "dropout is active in encoder.layer.1.output.dense"),
    ],
)
def test_extensions_draw_no_values_at_random(part: str, message: str) -> None:
    turbo = TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")
    turbo.model.set_submodule(part, torch.nn.Sequential(turbo.model.get_submodule(part), torch.nn.Dropout()))
    turbo.model.eval()
    cache = turbo.prefill(SEQUENCES[1])
    expected = turbo.extend(cache, "WKD").logits
    turbo.model.get_submodule(part).train()
    with pytest.raises(ValueError, match=message):
        turbo.extend(cache, "WKD")
    turbo.model.eval()
    assert torch.equal(turbo.extend(cache, "WKD").logits, expected)


def test_weights_that_change_unseen_are_found_after_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where a forward does not look at elements."""
    turbo = TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")
    cache = turbo.prefill(SEQUENCES[1])
    expected = turbo.extend(cache, "WKD").logits
    monkeypatch.setattr(turbo.model.esm.__dict__["_seen_model"], "on_cpu", False)
    assert torch.equal(turbo.extend(cache, "WKD").logits, expected)
    turbo.model.esm.encoder.layer[0].output.dense.weight.data.mul_(2)
    with pytest.raises(ValueError, match="the cache belongs to another model: the weights differ"):
        turbo.extend(cache, "WKD")
    monkeypatch.setattr(turbo.model.esm.__dict__["_seen_model"], "on_cpu", False)
    cache = turbo.prefill(SEQUENCES[1])
    turbo.model.esm.encoder.layer[0].output.dense.weight.data.mul_(2)
    with pytest.raises(ValueError, match="the cache belongs to another model: the weights differ"):
        turbo.extend(cache, "WKD", append=True)
    assert cache.get_seq_length() == 1 + len(SEQUENCES[1])


def test_a_prefill_after_an_unseen_change_is_of_the_new_weights(
    tiny_model: MakeModel, exact: TurboEsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device; an error that the new weights cause is raised."""
    turbo = ContextModel(tiny_model(preset="exact"), exact.tokenizer)
    encoder = turbo.model.esm
    turbo.prefill(SEQUENCES)
    forwards = []
    encoder.model_id = "notes its calls"
    encoder.register_forward_pre_hook(lambda module, args: forwards.append(args))
    for factor, expected in ((1, 1), (2, 2)):
        monkeypatch.setattr(encoder.__dict__["_seen_model"], "on_cpu", False)
        encoder.encoder.layer[0].output.dense.weight.data.mul_(factor)
        forwards.clear()
        cache = turbo.prefill(SEQUENCES)
        assert len(forwards) == expected
    assert turbo.extend(cache, ["WK", "D"]).logits.shape == (2, 3, 33)
    again = dict(turbo.prefill(SEQUENCES).named_tensors())
    assert all(torch.equal(tensor, again[name]) for name, tensor in cache.named_tensors())
    calibrated = ContextModel(tiny_model(preset="turbo3"), exact.tokenizer)
    calibrated.prefill(SEQUENCES)
    monkeypatch.setattr(calibrated.model.esm.__dict__["_seen_model"], "on_cpu", False)
    calibrated.model.esm.encoder.layer[0].attention.self.key.weight.data.mul_(2)
    with pytest.raises(ValueError, match="the weights are not this model's"):
        calibrated.prefill(SEQUENCES)


def test_devices_need_a_loaded_model(exact: TurboEsm) -> None:
    model = ContextModel(exact.model, exact.tokenizer)
    assert model.runner(None) is None
    with pytest.raises(ValueError, match=r"^`devices` needs a model that is loaded by TurboEsm, got 'all'"):
        model.runner("all")


def test_calls_read_the_weights_of_an_unchanged_model_once(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, read = turbo.prefill("MKTAYIAKQR"), Mock(wraps=identity.tensors_digest)
    monkeypatch.setattr(identity, "tensors_digest", read)
    for _ in range(2):
        turbo.extend(cache, "GSG")
        turbo.prefill("MKT")
    assert not read.called
    identity.exact_identity(turbo.model.base_model)
    assert read.called


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_not_finite_shows_in_every_preset(preset: str) -> None:
    """Overflow in a context is no finite score: NaN, or an error where a codec cannot store it."""
    turbo = TurboEsm.from_pretrained(device="cpu", preset=preset)
    with torch.no_grad():
        turbo.model.base_model.embeddings.word_embeddings.weight[turbo.codes.residues["W"]] *= 3e37
    if preset == "paper":
        with pytest.raises(ValueError, match="hidden states are not finite, and 'paper' would hide it"):
            turbo.prefill(["MKTAYIA", "MKWAYIAKQR"])
        assert turbo.prefill("MKTAYIA").lengths.tolist() == [8]
    else:
        assert not turbo.extend(turbo.prefill("MKWAYIAKQR"), "AG").logits.isfinite().any()
    cache, codec = turbo.prefill("MKTAYIA"), turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
    if codec.hides_appended_nan or not codec.rows_alike:
        # Those that have groups take no more tokens. On a device, which is not waited for, the output shows it.
        with pytest.raises(ValueError, match=f"and '{preset}' would hide it|cannot be appended to"):
            turbo.extend(cache, "AWA", append=True, refresh=0)
        assert cache.lengths.tolist() == [8]
    else:
        turbo.extend(cache, "AWA", append=True, refresh=0)
        assert not turbo.extend(cache, "AG").logits.isfinite().any()
