"""Every task on a small trained model of every family, and artifacts of one family given to another."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM, PreTrainedModel, Trainer, TrainingArguments

from esm_turbo import ContextStore, KVCalibrator, TurboEsm, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.cli.app import main
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.modeling_esm_turbo import TurboEsmForMaskedLM
from esm_turbo.proteins.limits import UntrainedInputWarning
from tests.helpers.e1 import make_e1
from tests.helpers.models import ESMC_MINI, make_esm, make_esmc, random_ids

FOLDERS = {"esm": EMBEDDED_MODEL, "esmc": ESMC_MINI}
OTHER = {"esm": "esmc", "esmc": "esm"}
MAKE = {"esm": make_esm, "esmc": make_esmc}

TARGET = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"

pytestmark = pytest.mark.filterwarnings("ignore::esm_turbo.proteins.limits.UntrainedInputWarning")


@pytest.fixture(scope="module", params=FOLDERS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def small(family: str) -> Iterator[TurboEsm]:
    """The family's small model with its calibration."""
    with warnings.catch_warnings():
        # The calibration is this model's own.
        warnings.simplefilter("error")
        yield TurboEsm.from_pretrained(FOLDERS[family], device="cpu")


def test_a_break_between_chains_is_no_residue(tmp_path: Path) -> None:
    """It is in no mean: of embeddings, of windows, and of a candidate's likelihood."""
    turbo = TurboEsm.from_pretrained(ESMC_MINI, device="cpu", preset="exact")
    whole = TARGET[:20] + "|" + TARGET[20:]
    [one] = turbo.embed(whole, include=["mean", "per_tok"])
    [layer] = one.representations
    of_residues = torch.cat([one.representations[layer][:20], one.representations[layer][21:]])
    torch.testing.assert_close(one.mean_representations[layer], of_residues.mean(0))
    [windows] = turbo.embed(whole, include=["mean", "per_tok"], window=24, overlap=8)
    kept = torch.cat([windows.representations[layer][:20], windows.representations[layer][21:]])
    torch.testing.assert_close(windows.mean_representations[layer], kept.mean(0), rtol=1e-4, atol=1e-5)
    [scored] = turbo.score(TARGET, ["|ACD"], unknown_residues="score").scores
    assert scored.scored == 3 and len(scored.log_probabilities) == 4
    assert scored.pseudo_log_likelihood == pytest.approx(sum(scored.log_probabilities[1:]))
    with pytest.raises(ValueError, match=r"candidate 1: '\|' has no residue"):
        turbo.score(TARGET, ["|"])


@torch.no_grad()
def test_extensions_are_near_the_full_run(small: TurboEsm) -> None:
    new = "SAKTVLP"
    ids = torch.tensor([[small.codes.cls, *small.codes.encode(TARGET + new, "x"), small.codes.eos]])
    full = small.model(ids, output_hidden_states=True).hidden_states[-1][0, -len(new) - 1 :]
    cache = small.prefill(TARGET)
    assert cache.config.name == "turbo3" and cache.lengths.tolist() == [len(TARGET) + 1]
    states = small.extend(cache, new, refresh=8).hidden_states[0]
    assert torch.nn.functional.cosine_similarity(full, states, dim=-1).mean() > 0.99
    assert small.extend(cache, new).logits.shape[-1] == small.model.config.vocab_size
    # A context with its extension appended is as long as both.
    small.extend(cache, new, append=True)
    assert cache.lengths.tolist() == [len(TARGET) + 1 + len(new)]


def test_embedding(small: TurboEsm) -> None:
    [one] = small.embed(TARGET, include=("mean", "per_tok", "bos"))
    with torch.no_grad():
        ids = torch.tensor([[small.codes.cls, *small.codes.encode(TARGET, "x"), small.codes.eos]])
        states = small.model.base_model(ids).last_hidden_state[0, 1:-1]
    layer = small.model.config.num_hidden_layers
    torch.testing.assert_close(torch.as_tensor(one.representations[layer]), states, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match=r"no contact head|never trained"):
        small.embed(TARGET, include=("contacts",))


def test_scoring_ranks_as_the_full_arm(small: TurboEsm) -> None:
    candidates = ["SAKTVLP", "GGGGGGG", "WCWCWCW", "LLEKAVE", "DDDDDDD", "AAKLAAL"]
    full, turbo = (small.score(TARGET, candidates, arm=arm) for arm in ("full", "turbo"))
    assert full.ranking()[:2] == turbo.ranking()[:2]
    np.testing.assert_allclose(turbo.pseudo_perplexities, full.pseudo_perplexities, rtol=0.1)


def test_variants(small: TurboEsm) -> None:
    full, turbo = (small.score_variants(TARGET, ["M1L", "A4G"], arm=arm) for arm in ("full", "turbo"))
    np.testing.assert_allclose(turbo.values, full.values, atol=0.2)


def test_generation(small: TurboEsm) -> None:
    after = small.generate(TARGET, max_new_tokens=5, seed=1)
    filled = small.generate(TARGET[:20] + "<mask>" * 3 + TARGET[23:], seed=1)
    [one], [other] = after.sequences, filled.sequences
    assert len(one) == len(TARGET) + 5 and one.startswith(TARGET)
    assert len(other) == len(TARGET) and other[:20] == TARGET[:20] and set(other) <= set(small.codes.residues)


def test_a_store(small: TurboEsm, tmp_path: Path) -> None:
    with ContextStore(tmp_path / "store") as store:
        first = store.get_or_prefill(small, [TARGET])
    with ContextStore(tmp_path / "store") as store:
        again = store.get_or_prefill(small, [TARGET])
    expected = small.prefill(TARGET)
    for name, tensor in expected.named_tensors():
        for found in (first, again):
            assert torch.equal(dict(found.named_tensors())[name], tensor), name


def test_saved_and_loaded(small: TurboEsm, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    loaded = TurboEsm.from_pretrained(tmp_path, device="cpu")
    assert torch.equal(
        loaded.extend(loaded.prefill(TARGET), "MKV").logits, small.extend(small.prefill(TARGET), "MKV").logits
    )


def test_calibration_of_the_librarys_model(family: str) -> None:
    """Every preset is fitted and nearly invertible on the proteins that it was fitted to."""
    model = MAKE[family](heads=2, head_dim=16)
    calibrator = KVCalibrator(model, sample_size=256)
    calibrator.partial_fit(*random_ids([130, 120, 140, 110], eos=True))
    calibration = calibrator.finalize(PRODUCT_PRESETS)
    assert calibration.geometry.model_type == family
    calibration.check_model(model)


def test_commands(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`info` and `embed` by the name of a folder alone."""
    with pytest.raises(SystemExit) as info:
        main(["info", str(FOLDERS[family]), "--json=-"])
    assert not info.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["calibrated"] and found["vocab_size"] == {"esm": 33, "esmc": 64}[family]
    fasta = tmp_path / "proteins.fasta"
    fasta.write_text(f">one\n{TARGET}\n")
    with pytest.raises(SystemExit) as embed:
        main(["embed", str(fasta), str(tmp_path / "out"), "--model", str(FOLDERS[family]), "--include", "mean"])
    assert not embed.value.code
    assert (tmp_path / "out" / "index.tsv").is_file()


def test_artifacts_of_another_family_are_refused(small: TurboEsm, family: str, tmp_path: Path) -> None:
    """Both small models have the same geometry."""
    other = TurboEsm.from_pretrained(FOLDERS[OTHER[family]], device="cpu")
    message = f"is for model type '{OTHER[family]}', the model is '{family}'"
    with pytest.raises(ValueError, match=f"calibration {message}; make one with"):
        small.model.set_turbo(calibration=other.calibration)
    with pytest.raises(ValueError, match=f"calibration {message}; make one with"):
        TurboEsm.from_pretrained(FOLDERS[family], calibration=FOLDERS[OTHER[family]], device="cpu")
    cache = other.prefill(TARGET)
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match=f"the cache {message}"):
        small.extend(cache, "MKV")
    with pytest.raises(ValueError, match=f"the cache {message}"):
        TurboKVCache.load(tmp_path / "cache", model=small.model)
    with pytest.raises(ValueError, match="different models"):
        TurboKVCache.cat([cache, small.prefill(TARGET)])
    with ContextStore(tmp_path / "store") as store:
        store.get_or_prefill(other, [TARGET])
    with (
        ContextStore(tmp_path / "store") as store,
        pytest.raises(ValueError, match=f"{message.removeprefix('is ')}; give another folder"),
    ):
        store.get_or_prefill(small, [TARGET])


def test_only_esmc_has_a_chain_break(small: TurboEsm, family: str) -> None:
    if family == "esm":
        with pytest.raises(ValueError, match=r"position 4 is '\|', not one of the 25 residue codes"):
            small.prefill("MKT|AYI")
        return
    cache = small.prefill("MKT|AYI")
    assert cache.token_ids[0].tolist() == [0, 20, 15, 11, 31, 5, 19, 12]
    assert small.codes.decode(cache.token_ids[0, 1:].tolist()) == "MKT|AYI"
    [one] = small.embed("MKT|AYI", include=("mean",))
    assert one is not None


CHAINS = ">two\nmktay|GSWKD\n>one\nMKTAYGSWKD\n"


@pytest.mark.parametrize(
    "command",
    [
        ["embed", "IN", "OUT"],
        ["score", "IN", "PEPTIDES"],
        ["variants", "IN"],
        ["variants", "IN", "TABLE"],
        ["generate", "IN", "--max-new-tokens", "2"],
        ["binders", "IN", "--length", "3"],
        ["store", "IN", "OUT"],
    ],
    ids=" ".join,
)
def test_chains_of_a_file(family: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of two chains is read by the models whose vocabulary has a break, and the only bad one for others."""
    inputs = {"IN": CHAINS, "PEPTIDES": ">p\nMKV\n", "TABLE": "protein,mutant\ntwo,G7A\none,M1A\n"}
    paths = {name: tmp_path / f"{name}{'.csv' if name == 'TABLE' else '.fasta'}" for name in inputs}
    for name, text in inputs.items():
        paths[name].write_text(text)
    arguments = [str((paths | {"OUT": tmp_path / "out"}).get(one, one)) for one in command]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--model", str(FOLDERS[family]), "--json", "-"])
    printed = capsys.readouterr()
    failed = json.loads(printed.out)["failed"]
    if family == "esmc":
        assert (ended.value.code, failed) == (0, [])
        return
    assert ended.value.code == 1
    [one] = failed
    reason = "position 6 is '|', not one of the 25 residue codes (A to Z without J); correct or remove it"
    assert one == {"record": "two", "reason": reason}


def test_a_break_between_chains_has_no_variants_and_stays(family: str) -> None:
    if family == "esmc":
        turbo = TurboEsm.from_pretrained(FOLDERS[family], device="cpu", preset="exact")
        found = turbo.score_variants("MK|GS", arm="full").scores
        assert sorted({int(one.variant[1:-1]) for one in found}) == [1, 2, 4, 5] and len(found) == 4 * 19
        with pytest.raises(ValueError, match="sequence 1: position 3 is the break between two chains"):
            turbo.generate("MK|GS", positions=[2, 3])
        assert turbo.generate("MK|GS", positions=[2, 4]).sequences[0][2] == "|"


@pytest.mark.filterwarnings("always::esm_turbo.proteins.limits.UntrainedInputWarning")
def test_a_peptide_after_a_target_is_warned_of_once(family: str) -> None:
    turbo = TurboEsm.from_pretrained(FOLDERS[family], device="cpu", preset="exact")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turbo.score(TARGET, ["MKV"])
        turbo.score(TARGET + ("|" if family == "esmc" else ""), ["MKV"])
    found = [str(one.message) for one in caught if issubclass(one.category, UntrainedInputWarning)]
    assert [text[:39] for text in found] == ["ESM-C was trained on single chains: it "][: family == "esmc"]


def test_the_command_warns_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, sequence in (("targets", TARGET), ("peptides", "MKV")):
        (tmp_path / name).write_text(f">{name}\n{sequence}\n")
    with pytest.raises(SystemExit) as done:
        main(["score", str(tmp_path / "targets"), str(tmp_path / "peptides"), "--model", str(ESMC_MINI)])
    assert not done.value.code
    assert capsys.readouterr().err.count("ESM-C was trained on single chains") == 1


def _damaged(tmp_path: Path, **fields: object) -> Path:
    config = json.loads((ESMC_MINI / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x != "gone"}))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(ESMC_MINI / name)
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 2}, "4 heads share 2 of keys and values; ESM-C has as many of each"),
        ({"mask_token_id": "gone"}, "config.json lacks mask_token_id, on which results depend"),
        ({"head_dim": 32}, "`head_dim` must be hidden_size / num_attention_heads = 64, got 32"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "config.json is not valid"),
    ],
    ids=str,
)
def test_other_checkpoints_are_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        TurboEsm.from_pretrained(_damaged(tmp_path, **fields), device="cpu", calibration=False)
    assert "\n" not in str(error.value)


def test_a_checkpoint_without_the_norms_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _damaged(tmp_path)
    weights = {name: x for name, x in load_file(ESMC_MINI / "model.safetensors").items() if "_norm." not in name}
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 24 weights of the encoder, such as esmc.layers.0.self_attn.k_norm.weight"
    ):
        TurboEsm.from_pretrained(folder, device="cpu", calibration=False)


@pytest.mark.parametrize("make", [make_esm, make_esmc, make_e1])
def test_the_librarys_trainer_fits_a_model(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    """It passes on what the forward names among its arguments."""
    model = make()
    model = TurboEsmForMaskedLM.from_esm(model) if isinstance(model, EsmForMaskedLM) else model
    rows = [{"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids} for ids in torch.full((4, 9), 12)]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    before = model(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss
    Trainer(model, arguments, train_dataset=rows).train()
    model.eval()
    assert model(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss < before
