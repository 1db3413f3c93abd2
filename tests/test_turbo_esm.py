"""The entry point: loading and saving, prefill and extend."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from transformers import EsmForMaskedLM, EsmTokenizer

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import DEFAULT_PRESET, PRESETS
from tests.helpers.models import CLS, EOS, make_esm

MakeModel = Callable[..., TurboEsmForMaskedLM]
PUBLISHED = Path(__file__).parent / "data" / "published_configs" / "esm2_t6_8M_UR50D"
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV", "GAVLMFWPSTCYNQ"]
EMBEDDED_FILES = ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json")


@pytest.fixture(scope="module")
def exact() -> TurboEsm:
    return TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")


@pytest.fixture
def folder(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A small model's folder, with the tokenizer as published."""
    tiny_model().save_pretrained(tmp_path / "model")
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(PUBLISHED / name, tmp_path / "model")
    return tmp_path / "model"


# ---------------------------------------------------------------- loading


def test_the_embedded_model(turbo: TurboEsm) -> None:
    """No argument, no network: the model with its calibration, ready to write compressed caches."""
    assert isinstance(turbo.model, TurboEsmForMaskedLM)
    assert isinstance(turbo.tokenizer, EsmTokenizer)
    assert turbo.model.dtype == torch.float32
    assert not turbo.model.training
    assert turbo.model.esm.turbo_config == PRESETS[DEFAULT_PRESET]
    assert turbo.calibration is turbo.model.esm.calibration is not None
    cache = turbo.prefill(SEQUENCES)
    assert cache.config == PRESETS[DEFAULT_PRESET]
    assert cache.bits_per_element < 8


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_embedded_calibration_serves_every_preset(turbo: TurboEsm, exact: TurboEsm, preset: str) -> None:
    """On a real protein every preset comes near the exact one; the shipped file holds what it needs."""
    model = TurboEsmForMaskedLM.from_esm(turbo.model, calibration=turbo.calibration, preset=preset).eval()
    other = TurboEsm(model, turbo.tokenizer)
    context, new = SEQUENCES[0][:60], SEQUENCES[0][60:]
    expected = exact.extend(exact.prefill(context), new).hidden_states
    output = other.extend(other.prefill(context), new).hidden_states
    error = (output - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < (1e-5 if preset == "exact" else 0.4)


def test_exact_beside_hugging_face(exact: TurboEsm) -> None:
    hf = EsmForMaskedLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    batch = exact.tokenizer(SEQUENCES, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = hf(**batch, output_hidden_states=True)
        output = exact.model(**batch, output_hidden_states=True, use_cache=True)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.hidden_states[-1], expected.hidden_states[-1])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, torch.float32), (torch.bfloat16, torch.bfloat16), ("auto", torch.bfloat16), ("float16", torch.float16)],
)
def test_dtypes(dtype: object, expected: torch.dtype) -> None:
    turbo = TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu", dtype=dtype)
    assert turbo.model.dtype == expected
    assert turbo.model.esm.rotary_embeddings.inv_freq.dtype == torch.float32
    output = turbo.extend(turbo.prefill(SEQUENCES), ["GA", "V"])
    assert output.logits.dtype == expected
    assert torch.isfinite(output.logits).all()


def test_a_calibration_in_float32_serves_bfloat16(turbo: TurboEsm) -> None:
    half = TurboEsm.from_pretrained(dtype=torch.bfloat16, device="cpu", calibration=turbo.calibration)
    output = half.extend(half.prefill(SEQUENCES), ["GA", "V"]).logits.float()
    expected = turbo.extend(turbo.prefill(SEQUENCES), ["GA", "V"]).logits
    assert (output - expected).square().mean().sqrt() < 0.1 * expected.square().mean().sqrt()


def test_options_are_passed_on(folder: Path) -> None:
    turbo = TurboEsm.from_pretrained(folder, preset="exact", backend="reference", device="cpu")
    assert turbo.model.esm.backend == "reference"
    assert turbo.model.esm.turbo_config == PRESETS["exact"]
    assert turbo.model.device.type == "cpu"
    custom = TurboConfig(bits=2)
    assert TurboEsm.from_pretrained(str(folder), preset=custom, device="cpu").model.esm.turbo_config == custom


def test_without_a_calibration(folder: Path) -> None:
    """Loading and plain forwards work; a compressed cache names the command that makes a calibration."""
    turbo = TurboEsm.from_pretrained(folder, device="cpu")
    assert turbo.calibration is None
    ids, mask = turbo.codes.batch([[CLS, 5, 6, EOS]])
    with torch.no_grad():
        assert torch.isfinite(turbo.model(ids, mask).logits).all()
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        turbo.prefill(SEQUENCES)


def test_save_and_restore(turbo: TurboEsm, tmp_path: Path) -> None:
    """Model, tokenizer and calibration come back; caches of one are read by the other."""
    turbo.save_pretrained(tmp_path)
    restored = TurboEsm.from_pretrained(tmp_path, device="cpu")
    assert restored.calibration is not None
    mine, theirs = dict(turbo.model.state_dict()), dict(restored.model.state_dict())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert restored.tokenizer.get_vocab() == turbo.tokenizer.get_vocab()
    cache = turbo.prefill(SEQUENCES)
    expected = turbo.extend(cache, ["GA", "V"]).logits
    assert torch.equal(restored.extend(cache, ["GA", "V"]).logits, expected)
    assert torch.equal(restored.extend(restored.prefill(SEQUENCES), ["GA", "V"]).logits, expected)
    assert EsmForMaskedLM.from_pretrained(tmp_path).num_parameters() == turbo.model.num_parameters()


def test_saving_without_a_calibration(folder: Path, tmp_path: Path) -> None:
    TurboEsm.from_pretrained(folder, device="cpu").save_pretrained(tmp_path / "again")
    assert TurboEsm.from_pretrained(tmp_path / "again", device="cpu").calibration is None
    assert not (tmp_path / "again" / "calibration.safetensors").exists()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "vocab.txt"])
def test_an_incomplete_folder(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(OSError, match=r"not a complete checkpoint") as caught:
        TurboEsm.from_pretrained(folder, device="cpu")
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere/near-here", "./not/there/at/all", "no such model"])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(OSError, match="there is no such folder") as caught:
        TurboEsm.from_pretrained(name, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "turbo99"}, "`preset` must be one of"),
        ({"preset": replace(TurboConfig(), codec="zip")}, "`codec` must be one of"),
        ({"backend": "cuda"}, "`backend` must be one of"),
        ({"backend": "triton"}, "backend 'triton' cannot run"),
        ({"calibration": "nowhere.safetensors"}, "no such calibration file"),
        ({"calibration": EMBEDDED_MODEL}, "calibration is for 12 layers x 4 heads x 64"),
    ],
    ids=["preset", "codec", "backend", "triton", "no calibration", "another calibration"],
)
def test_wrong_options(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboEsm.from_pretrained(folder, device="cpu", **options)


# ---------------------------------------------------------------- prefill


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
    """A number for all, or one each; the context's own counts are what is counted without them."""

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
    ],
)
def test_prefill_refuses(exact: TurboEsm, sequences: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact.prefill(sequences, **options)


# ---------------------------------------------------------------- extend


def test_extend_output(exact: TurboEsm) -> None:
    cache = exact.prefill(SEQUENCES)
    output = exact.extend(cache, ["GAV", "L"])
    assert output.hidden_states.shape == (2, 4, exact.model.config.hidden_size)
    assert output.logits.shape == (2, 4, 33)
    assert output.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert exact.extend(cache, ["GAV", "L"], eos=False).logits.shape == (2, 3, 33)
    with pytest.raises(FrozenInstanceError):
        output.logits = None


def test_rows_do_not_depend_on_their_neighbours(exact: TurboEsm) -> None:
    together = exact.extend(exact.prefill(SEQUENCES), ["GAV", "LLLLLL"], refresh=5)
    for row, (context, new) in enumerate(zip(SEQUENCES, ["GAV", "LLLLLL"], strict=True)):
        alone = exact.extend(exact.prefill(context), new, refresh=5)
        n = alone.logits.shape[1]
        assert (together.logits[row, :n] - alone.logits[0]).abs().max() <= 3e-5


def test_extend_leaves_the_cache_alone(turbo: TurboEsm) -> None:
    cache = turbo.prefill(SEQUENCES)
    first = turbo.extend(cache, ["GAV", "L"])
    before = cache.nbytes
    turbo.extend(cache, ["LLL", "VV"])
    assert cache.nbytes == before
    assert torch.equal(turbo.extend(cache, ["GAV", "L"]).logits, first.logits)


def test_appending_step_by_step(turbo: TurboEsm) -> None:
    cache = turbo.prefill(SEQUENCES)
    for step in (["GA", "LLL"], ["V", "V"], ["MKT", "M"]):
        turbo.extend(cache, step, append=True)
    assert cache.lengths.tolist() == [71 + 6, 15 + 5]
    assert cache.token_ids[1, :20].tolist() == [CLS, *turbo.codes.encode(SEQUENCES[1] + "LLLVM", "it")]
    assert cache.next_positions.tolist() == [77, 20]


def test_refreshed_residues_keep_their_positions(exact: TurboEsm) -> None:
    """After a gap the refreshed residues run where they stand: as one context with the gap, put by hand."""
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


def test_extend_refuses_another_models_cache(exact: TurboEsm, folder: Path) -> None:
    other = TurboEsm.from_pretrained(folder, preset="exact", device="cpu")
    with pytest.raises(ValueError, match="the cache is for"):
        exact.extend(other.prefill("MKT"), "G")


def test_a_model_of_random_weights_is_extended(folder: Path) -> None:
    turbo = TurboEsm.from_pretrained(folder, preset="exact", device="cpu")
    hf = make_esm()
    ids = torch.tensor([[CLS, *turbo.codes.encode("MKTAYIAK", "it"), EOS]])
    output = turbo.extend(turbo.prefill("MKTAYI"), "AK", refresh=100)
    with torch.no_grad():
        # All residues run again: only <cls> is frozen.
        assert (output.logits - hf(ids).logits[:, 7:]).abs().mean() < 2
    assert output.logits.shape == (1, 3, 33)


@pytest.mark.parametrize("device", ["cuda:99", "xpu", "no device"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    """In one line, whatever torch has to say of it."""
    with pytest.raises(ValueError, match=f"^device '{device}' cannot be used here: [^\n]{{1,200}}; use 'cpu', or a"):
        TurboEsm.from_pretrained(device=device)


@pytest.mark.parametrize("calibration", [3, True, b"x"])
def test_what_is_no_calibration_is_refused(calibration: object) -> None:
    with pytest.raises(ValueError, match="`calibration` must be a Calibration or its path, got "):
        TurboEsm.from_pretrained(calibration=calibration, device="cpu")  # type: ignore[arg-type]
