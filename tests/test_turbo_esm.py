"""`TurboEsm`: loading and saving models, and the methods that run tasks."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pandas
import pytest
import torch
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import EsmForMaskedLM, EsmTokenizer
from transformers.utils import logging

from esm_turbo import ContextStore, TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import DEFAULT_PRESET, PRESETS
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.generation.options import GenerationOptions
from esm_turbo.turbo_esm import _mention_demonstration
from tests.helpers.models import CLS, EOS

MakeModel = Callable[..., TurboEsmForMaskedLM]
PUBLISHED = Path(__file__).parent / "data" / "published_configs" / "esm2_t6_8M_UR50D"
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV", "GAVLMFWPSTCYNQ"]


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
    """The shipped file has what every preset needs: on a real protein each comes near the exact one."""
    model = TurboEsmForMaskedLM.from_esm(turbo.model, calibration=turbo.calibration, preset=preset).eval()
    other = TurboEsm(model, turbo.tokenizer)
    context, new = SEQUENCES[0][:60], SEQUENCES[0][60:]
    expected = exact.extend(exact.prefill(context), new).hidden_states
    output = other.extend(other.prefill(context), new).hidden_states
    error = (output - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < (1e-5 if preset == "exact" else 0.4)


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
    restored.model.set_turbo(calibration=None, preset="exact")
    restored.save_pretrained(tmp_path)
    assert not (tmp_path / "calibration.safetensors").exists()
    assert EsmForMaskedLM.from_pretrained(tmp_path).num_parameters() == turbo.model.num_parameters()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "vocab.txt"])
def test_an_incomplete_folder(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(OSError, match=r"not a complete checkpoint") as caught:
        TurboEsm.from_pretrained(folder, device="cpu")
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere/near-here", "./not/there/at/all", "no such model"])
def test_a_model_that_does_not_exist(name: str) -> None:
    with pytest.raises(OSError, match=r"there is no such (file or )?folder") as caught:
        TurboEsm.from_pretrained(name, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_model_is_loaded_by_a_map_of_devices() -> None:
    expected = TurboEsm.from_pretrained(device="cpu").prefill("MKTAY")
    layers = {f"esm.encoder.layer.{index}": "cpu" for index in range(12)}
    rest = dict.fromkeys(("esm.embeddings", "esm.encoder.emb_layer_norm_after", "esm.contact_head", "lm_head"), "cpu")
    found = [
        TurboEsm.from_pretrained(device_map=layers | rest),
        # The only device is the CPU, unless there are others.
        TurboEsm.from_pretrained(device_map="auto", max_memory={"cpu": "1GB"}, dtype=torch.float32),
    ]
    for turbo in found:
        assert turbo.model.device.type == "cpu" and not turbo.model.base_model.is_spread
        assert turbo.calibration is not None and turbo.model.dtype == torch.float32
        cache = turbo.prefill("MKTAY")
        for (name, tensor), (_, own) in zip(expected.named_tensors(), cache.named_tensors(), strict=True):
            assert torch.equal(own, tensor), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "device_map": "auto"}, "`device` and `device_map` both say where the model lies"),
        ({"max_memory": {"cpu": "1GB"}}, "`max_memory` needs a `device_map`"),
        ({"device_map": "fast"}, "`device_map` must be auto, balanced, .* got 'fast'; for one device give `device`"),
        ({"device_map": {"esm": "cpu"}}, r"gives no device for \d+ weights of the model, such as 'lm_head"),
        ({"device_map": {"esm": "cpu", "lm_head": "cpu", "head": 0}}, "names 'head', which the model does not have"),
    ],
)
def test_a_wrong_map_of_devices_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboEsm.from_pretrained(**options)


@pytest.mark.parametrize("device", ["cuda:99", "xpu", "no device"])
def test_an_unusable_device_is_named(device: str) -> None:
    """The error is one line, however long torch's own message is."""
    with pytest.raises(ValueError, match=f"^device '{device}' cannot be used here: [^\n]{{1,200}}; use 'cpu', or a"):
        TurboEsm.from_pretrained(device=device)


@pytest.mark.parametrize("calibration", [3, True, b"x"])
def test_an_object_that_is_not_a_calibration_is_refused(calibration: object) -> None:
    with pytest.raises(ValueError, match="`calibration` must be a Calibration or its path, got "):
        TurboEsm.from_pretrained(calibration=calibration, device="cpu")  # type: ignore[arg-type]


def test_generation_names_all_of_its_options() -> None:
    """With the same defaults, so that an editor and `help` show them; none hides behind `**options`."""
    given = {name: p.default for name, p in inspect.signature(TurboEsm.generate).parameters.items()}
    assert {field.name: field.default for field in fields(GenerationOptions)}.items() <= given.items()


@pytest.mark.parametrize("downloads", [True, False])
def test_loading_draws_no_bar_and_leaves_the_switches(
    folder: Path, capsys: pytest.CaptureFixture[str], downloads: bool
) -> None:
    was_shown, were_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    try:
        logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()
        TurboEsm.from_pretrained(folder, preset="exact", device="cpu")
        assert "Loading weights" not in capsys.readouterr().err
        assert logging.is_progress_bar_enabled()
        assert are_progress_bars_disabled() is not downloads
        TurboEsmForMaskedLM.from_pretrained(folder, preset="exact")
        # Hugging Face's own method is left as it is.
        assert "Loading weights" in capsys.readouterr().err
    finally:
        if not was_shown:
            logging.disable_progress_bar()
        (disable_progress_bars if were_hidden else enable_progress_bars)()


def test_records_stand_for_their_sequences(turbo: TurboEsm, tmp_path: Path) -> None:
    record = ProteinRecord("sp|P1|A", "MKTAYIAK", "first_position=24")
    other, sequence = ProteinRecord("b", "GSWKD"), record.sequence
    for given, expected in (([record, other], [sequence, "GSWKD"]), (record, sequence)):
        ours, theirs = (turbo.embed(one, include=["mean"]) for one in (given, expected))
        assert [one.mean_representations[12].tolist() for one in ours] == [
            one.mean_representations[12].tolist() for one in theirs
        ]
        assert turbo.prefill(given).token_ids.tolist() == turbo.prefill(expected).token_ids.tolist()
    assert turbo.score(record, [other]) == turbo.score(sequence, ["GSWKD"])
    assert turbo.generate([record], max_new_tokens=2) == turbo.generate([sequence], max_new_tokens=2)
    assert turbo.generate_binders(record, 3) == turbo.generate_binders(sequence, 3)
    with ContextStore(tmp_path / "store") as store:
        assert store.add(turbo, [record]) == 1
        assert store.add(turbo, [sequence]) == 0
    with pytest.raises(TypeError, match="sequence 1: a sequence must be a string"):
        turbo.embed([7])  # type: ignore[list-item]


class Letters:
    """A sequence of another library, such as biotite's."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __iter__(self) -> Iterator[str]:
        return iter(self.text)


@pytest.mark.parametrize("call", ["embed", "prefill", "generate", "score", "score_pairs", "score_many_variants"])
def test_keys_names_of_columns_and_sets_are_not_lists_of_residues(turbo: TurboEsm, call: str) -> None:
    table = pandas.DataFrame({"ID": ["a"], "SEQVENCE": ["MKTAY"]})
    for given in ({"KRAS": "MKTAY"}, table, {"MKTAY", "MKT"}, frozenset(["MKTAY"])):
        arguments = ("MKTAY", given) if call == "score" else (["MKTAY"], given) if call == "score_pairs" else (given,)
        with pytest.raises(TypeError, match="give its values, or one of its columns"):
            getattr(turbo, call)(*arguments)
    for text in (Seq("MKTAY"), SeqRecord(Seq("MKTAY")), Letters("MKTAY")):
        arguments = ("MKTAY", text) if call == "score" else (["MKTAY"], text) if call == "score_pairs" else (text,)
        with pytest.raises(TypeError, match=f"must be a string, got {type(text).__name__}"):
            getattr(turbo, call)(*arguments)


def test_positions_of_a_record_are_those_of_its_header(turbo: TurboEsm) -> None:
    record = ProteinRecord("a", "MKTAYIAK", "first_position=24")
    assert turbo.score_variants(record, ["M24A"]).values == turbo.score_variants("MKTAYIAK", ["M1A"]).values
    assert turbo.score_variants(record).scores[0].variant == "M24A"
    assert turbo.score_variants(record, ["M1A", "M1M"], first_position=1).values[1] == 0
    with pytest.raises(ValueError, match="lies outside the protein, 24 to 31"):
        turbo.score_variants(record, ["M1A"])


def test_the_demonstration_model_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    _mention_demonstration.cache_clear()
    for _ in range(2):
        TurboEsm.from_pretrained(device="cpu")
    TurboEsm.from_pretrained(EMBEDDED_MODEL, device="cpu")
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("esm2-mini is a small demonstration model")
