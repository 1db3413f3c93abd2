"""LoRA adapters of PEFT: the merged weights, their own calibration, and adapters that do not fit."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EsmForMaskedLM, EsmTokenizer

from esm_turbo import TurboEsm
from esm_turbo.files.extras import install_hint
from esm_turbo.model.adapters import CONFIG_FILE, WEIGHTS_FILE, is_adapter
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"


@pytest.fixture(scope="module")
def base(turbo: TurboEsm, tiny_esm: Callable[..., EsmForMaskedLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny_esm().save_pretrained(folder)
    turbo.tokenizer.save_pretrained(folder)
    return folder


def save_adapter(
    base: Path,
    folder: Path,
    *,
    encoder: bool = False,
    modules: Sequence[str] = ("query", "value", "dense"),
    **options: object,
) -> EsmForMaskedLM:
    """Write an adapter of random weights as PEFT does after training, and return the adapted model."""
    torch.manual_seed(7)
    model = EsmForMaskedLM.from_pretrained(base).eval()
    config = LoraConfig(r=4, lora_alpha=16, target_modules=[*modules], init_lora_weights=False, **options)
    adapted = get_peft_model(model.esm if encoder else model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EsmForMaskedLM]:
    folder = tmp_path_factory.mktemp("adapters") / "lora"
    return folder, save_adapter(base, folder)


def logits_of(model: torch.nn.Module, tokenizer: EsmTokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model(**tokenizer(SEQUENCE, return_tensors="pt")).logits


def test_the_merged_model_is_the_adapted_one(base: Path, adapter: tuple[Path, EsmForMaskedLM]) -> None:
    folder, adapted = adapter
    plain, turbo = (TurboEsm.from_pretrained(path, preset="exact", device="cpu") for path in (base, folder))
    expected = logits_of(adapted, turbo.tokenizer)
    found = logits_of(turbo.model, turbo.tokenizer)
    assert torch.allclose(found, expected, atol=1e-4)
    assert (logits_of(plain.model, turbo.tokenizer) - expected).abs().max() > 0.01
    assert not any("lora" in name for name, _ in turbo.model.named_parameters())
    assert all(parameter.requires_grad for parameter in turbo.model.parameters())
    assert (turbo.name, plain.name) == ("lora", "base")


def test_an_adapter_of_the_encoder_alone(base: Path, tmp_path: Path) -> None:
    adapted = save_adapter(base, tmp_path / "lora", encoder=True)
    turbo = TurboEsm.from_pretrained(tmp_path / "lora", preset="exact", device="cpu")
    assert torch.allclose(logits_of(turbo.model, turbo.tokenizer), logits_of(adapted, turbo.tokenizer), atol=1e-4)


@pytest.mark.parametrize(
    ("module", "encoder"),
    [("word_embeddings", False), ("word_embeddings", True), ("decoder", False), ("token_adapter", True)],
)
def test_an_adapter_of_a_tied_weight_is_refused(base: Path, tmp_path: Path, module: str, encoder: bool) -> None:
    tokens = {"trainable_token_indices": [5, 6]} if module == "token_adapter" else {}
    save_adapter(base, tmp_path / "lora", encoder=encoder, modules=[module, "query"], **tokens)
    with pytest.raises(ValueError, match=rf"changes the weight of \S*{module}, which is that of \S+, too: merged"):
        TurboEsm.from_pretrained(tmp_path / "lora", device="cpu")


@pytest.mark.parametrize(
    ("modules", "options"),
    [
        (["word_embeddings", "decoder"], {}),
        (["query"], {"trainable_token_indices": {"word_embeddings": [5, 6], "decoder": [7]}}),
        (["query", "decoder"], {"trainable_token_indices": [5, 6]}),
        (["query"], {"layer_replication": [[0, 2], [0, 2]]}),
    ],
)
def test_two_adapters_of_one_weight_are_refused(
    base: Path, tmp_path: Path, modules: list[str], options: dict[str, object]
) -> None:
    save_adapter(base, tmp_path / "lora", encoder="layer_replication" in options, modules=modules, **options)
    with pytest.raises(ValueError, match=r"changes the weight of \S+, which is that of \S+, too: merged"):
        TurboEsm.from_pretrained(tmp_path / "lora", device="cpu")


def test_an_adapter_of_which_each_load_draws_a_part_is_refused(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "lora")
    config = json.loads((tmp_path / "lora" / CONFIG_FILE).read_text()) | {"init_lora_weights": "pissa_niter_4"}
    (tmp_path / "lora" / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"init_lora_weights='pissa_niter_4' takes a part .* at random"):
        TurboEsm.from_pretrained(tmp_path / "lora", device="cpu")


def test_tokens_tied_as_their_weights_are_merged_once(base: Path, tmp_path: Path) -> None:
    adapted = save_adapter(base, tmp_path / "lora", modules=["query"], trainable_token_indices=[5, 6])
    turbo = TurboEsm.from_pretrained(tmp_path / "lora", preset="exact", device="cpu")
    assert torch.allclose(logits_of(turbo.model, turbo.tokenizer), logits_of(adapted, turbo.tokenizer), atol=1e-4)


def test_its_caches_and_calibration_are_its_own(
    base: Path, adapter: tuple[Path, EsmForMaskedLM], tmp_path: Path
) -> None:
    records = [ProteinRecord("a", SEQUENCE * 4)]
    model, folder = tmp_path / "base", tmp_path / "lora"
    shutil.copytree(base, model)
    shutil.copytree(adapter[0], folder)
    config = json.loads((folder / CONFIG_FILE).read_text()) | {"base_model_name_or_path": str(model)}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    plain = TurboEsm.from_pretrained(model, device="cpu")
    calibrate_records(plain, records, presets=["turbo3"]).save(model / "calibration.safetensors")
    # The base model's calibration is not taken for the adapter's.
    turbo = TurboEsm.from_pretrained(folder, device="cpu")
    assert turbo.calibration is None
    with pytest.raises(ValueError, match=r"another model|weights differ|calibration"):
        other = TurboEsm.from_pretrained(folder, calibration=model / "calibration.safetensors", device="cpu")
        other.prefill(SEQUENCE)
    with pytest.raises(ValueError, match="another model"):
        turbo.model.bind_cache(TurboEsm.from_pretrained(model, preset="exact", device="cpu").prefill(SEQUENCE))
    calibrate_records(turbo, records, presets=["turbo3"]).save(folder / "calibration.safetensors")
    again = TurboEsm.from_pretrained(folder, device="cpu")
    assert again.calibration is not None and again.prefill(SEQUENCE).config.name == "turbo3"
    assert TurboEsm.from_pretrained(folder, calibration=False, device="cpu").calibration is None
    with pytest.raises(ValueError, match="holds an adapter, which would be loaded again"):
        again.save_pretrained(folder)
    # Saved, it is a model of its own.
    again.save_pretrained(tmp_path / "merged")
    merged = TurboEsm.from_pretrained(tmp_path / "merged", device="cpu")
    assert torch.equal(logits_of(merged.model, merged.tokenizer), logits_of(again.model, again.tokenizer))


def with_config(**fields: object) -> Callable[[Path], object]:
    """Changes fields of an adapter's configuration."""

    def change(folder: Path) -> None:
        path = folder / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


NOT_ADDED = "the adapter cannot be added to its base model: "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_config(peft_type="PREFIX_TUNING"), "adapters of type PREFIX_TUNING are not supported, only LORA"),
        (with_config(base_model_name_or_path=None), "names no base model"),
        (with_config(base_model_name_or_path="/no/such/folder"), "/no/such/folder"),
        (with_config(target_modules=["query"]), "the adapter does not fit its base model, which has no place for"),
        (with_config(r=8), NOT_ADDED),
        (with_config(r="x"), NOT_ADDED),
        (with_config(target_modules=5), NOT_ADDED),
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"1234"), NOT_ADDED),
        (
            lambda folder: (folder / WEIGHTS_FILE).unlink(),
            "lacks adapter_model.safetensors; save the adapter as safetensors",
        ),
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "adapter_config.json is damaged or lacks an entry"),
    ],
)
def test_adapters_that_do_not_fit_or_are_damaged(
    adapter: tuple[Path, EsmForMaskedLM], tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "lora"
    shutil.copytree(adapter[0], folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        TurboEsm.from_pretrained(folder, preset="exact", device="cpu")


def test_without_peft_the_error_names_the_extra(
    adapter: tuple[Path, EsmForMaskedLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=rf"^adapters need peft: {re.escape(install_hint('adapters'))}$"):
        TurboEsm.from_pretrained(adapter[0], preset="exact", device="cpu")


def test_a_wrapped_model_is_refused_and_its_merged_one_taken(base: Path) -> None:
    turbo = TurboEsm.from_pretrained(base, device="cpu", preset="exact")
    wrapped = get_peft_model(turbo.model, LoraConfig(target_modules=["query"], init_lora_weights=False))
    with pytest.raises(TypeError, match="got PeftModel; of an adapter give `merge_and_unload"):
        turbo.model = wrapped
    expected = logits_of(wrapped, turbo.tokenizer)
    turbo.model = wrapped.merge_and_unload()
    torch.testing.assert_close(logits_of(turbo.model, turbo.tokenizer), expected, rtol=0, atol=1e-4)
    assert turbo.prefill(SEQUENCE).batch_size == 1


def test_a_model_with_an_adapter_is_not_saved_without_itself(base: Path, tmp_path: Path) -> None:
    turbo = TurboEsm.from_pretrained(base, device="cpu", preset="exact")
    turbo.model.add_adapter(LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="transformers writes the adapter alone"):
        turbo.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    turbo.model.save_pretrained(tmp_path / "adapter")
    assert is_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("active", [True, False])
def test_trained_embeddings_beside_the_models_own_have_no_extensions(base: Path, active: bool) -> None:
    """PEFT's wrapper has other word embeddings than those that it calls."""
    turbo = TurboEsm.from_pretrained(base, device="cpu", preset="exact")
    expected = logits_of(turbo.model, turbo.tokenizer)
    wrapped = get_peft_model(turbo.model, LoraConfig(target_modules=["query"], modules_to_save=["embeddings"]))
    with torch.no_grad(), contextlib.nullcontext() if active else wrapped.disable_adapter():
        wrapped.base_model.model.esm.embeddings.modules_to_save.default.word_embeddings.weight.mul_(1.5)
        assert torch.equal(logits_of(turbo.model, turbo.tokenizer), expected) != active
        with pytest.raises(ValueError, match=r"are a ModulesToSaveWrapper, .* merge the adapter"):
            turbo.extend(turbo.prefill_within_call([SEQUENCE]), ["ACD"])


def test_an_adapter_is_added_to_the_revision_of_its_base_model_that_it_names(
    tiny_esm: Callable[..., EsmForMaskedLM], turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub" / "models--org--model"
    (hub / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate((("main", "a" * 40), ("v2", "b" * 40))):
        tiny_esm(seed=seed).save_pretrained(hub / "snapshots" / commit)
        turbo.tokenizer.save_pretrained(hub / "snapshots" / commit)
        (hub / "refs" / name).write_text(commit)
    adapted = save_adapter(hub / "snapshots" / ("b" * 40), tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "org/model", "revision": "v2"})
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    merged = TurboEsm.from_pretrained(tmp_path / "lora", device="cpu")
    expected = logits_of(adapted, turbo.tokenizer)
    assert torch.allclose(logits_of(merged.model, turbo.tokenizer), expected, atol=1e-4)
