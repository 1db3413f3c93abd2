"""Inputs that commands check before their job: files, models, calibrations, and places to write."""

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.cli.inputs import opened_store
from esm_turbo.files.csv_files import read_csv
from esm_turbo.files.parquet import parquet_settings
from tests.helpers.command_inputs import (
    ONE_RECORD,
    WHOLE_FILE,
    altered,
    files,
    not_safetensors,
    other_kind,
    other_version,
    truncated,
)
from tests.helpers.models import E1_MINI


@pytest.mark.parametrize("case", [*WHOLE_FILE, *ONE_RECORD])
@pytest.mark.parametrize("command", ["calibrate", "evaluate"])
def test_a_file_with_a_bad_record_is_refused(esm, tmp_path, command, case):
    text, message = (WHOLE_FILE | ONE_RECORD)[case]
    path = tmp_path / "bad.fasta"
    path.write_text(text)
    out = tmp_path / "old.safetensors"
    out.write_text("what was there before")
    before = files(tmp_path)
    where = ["--out", out] if command == "calibrate" else ["--json", out]
    result = esm(command, path, *where)
    assert result.code == 2
    assert message in result.error
    assert str(path) in result.error
    assert not result.out
    assert files(tmp_path) == before


def test_a_file_without_a_good_record_is_refused(esm, tmp_path):
    path = tmp_path / "bad.fasta"
    path.write_text(">a\nMKJ\n>b\n\n")
    result = esm("embed", path, tmp_path / "out")
    assert result.code == 2
    lines = result.err.splitlines()
    assert "record 'a': position 3" in lines[0]
    assert "record 'b'" in lines[1]
    assert "no usable record" in lines[2]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["below a file", "a folder"])
@pytest.mark.parametrize("command", ["calibrate", "embed", "json"])
def test_an_output_that_cannot_be_written_is_refused(esm, fasta, tmp_path, tiny_folder, command, place):
    target = fasta / "below" if place == "below a file" else tmp_path / "folder"
    if place == "a folder":
        (target / "index.tsv").mkdir(parents=True)
    arguments = {
        "calibrate": ["calibrate", fasta, "--model", tiny_folder, "--out", target],
        "embed": ["embed", fasta, target, "--model", tiny_folder],
        "json": ["info", tiny_folder, "--json", target],
    }[command]
    before = files(tmp_path)
    result = esm(*arguments)
    assert result.code == 2
    assert str(target) in result.error
    assert ("not a folder" if place == "below a file" else "is a folder") in result.error
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "IN", "--out", "IN"],
        ["embed", "IN", "embeddings", "--json", "IN"],
        ["generate", "IN", "--max-new-tokens", "1", "--out", "IN"],
        ["generate", "IN", "--max-new-tokens", "1", "--json", "LINK"],
        ["store", "IN", "contexts", "--json", "IN"],
        ["evaluate", "IN", "--json", "IN"],
        ["score", "IN", "IN", "--out", "IN"],
        ["variants", "IN", "--out", "LINK"],
        ["info", "IN", "--json", "IN"],
        ["generate", "IN", "--max-new-tokens", "1", "--out", "new", "--json", "new"],
        ["embed", "IN", "new.h5", "--format", "h5", "--json", "new.h5"],
        ["embed", "IN", "new.parquet", "--include", "mean", "--json", "new.parquet"],
        ["embed", "IN", "new", "--json", "new/index.tsv"],
        ["embed", "IN", "IN", "--format", "h5"],
        ["store", "IN", "new", "--json", "new/store.safetensors"],
        ["calibrate", "IN", "--out", "new", "--json", "new"],
        ["evaluate", "IN", "--json", "new", "--calibration", "new"],
    ],
    ids=" ".join,
)
def test_no_output_is_an_input_or_another_output(esm, fasta, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    path = fasta
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    result = esm(*({"IN": path, "LINK": "link"}.get(word, word) for word in command))
    assert (result.code, result.out) == (2, "")
    assert "an input of this command" in result.error or "another output" in result.error
    assert path.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "link"}


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "IN", "--out", "MODEL/model.safetensors"],
        ["calibrate", "IN", "--out", "STORE/store.safetensors"],
        ["calibrate", "IN", "--out", "EMBEDDINGS/x"],
        ["calibrate", "IN", "--out", "CACHE"],
        ["embed", "IN", "MODEL"],
        ["embed", "IN", "STORE"],
        ["embed", "IN", "STORE/x.h5", "--format", "h5"],
        ["embed", "IN", "new", "--json", "CALIBRATION"],
        ["store", "IN", "MODEL"],
        ["store", "IN", "EMBEDDINGS"],
        ["store", "IN", "EMBEDDINGS/below"],
        ["store", "IN", "new", "--json", "MODEL/config.json"],
        ["generate", "IN", "--max-new-tokens", "1", "--out", "MODEL/vocab.txt"],
        ["generate", "IN", "--max-new-tokens", "1", "--json", "CACHE"],
        ["evaluate", "IN", "--json", "MODEL/results.json", "--model", "MODEL"],
        ["score", "IN", "IN", "--out", "EMBEDDINGS/index.tsv"],
        ["score", "IN", "IN", "--out", "CALIBRATION"],
        ["variants", "IN", "--out", "EMBEDDINGS/settings.json"],
        ["variants", "IN", "--json", "WEIGHTS"],
        ["info", "STORE", "--json", "STORE/info.json"],
        ["info", "--json", "CALIBRATION"],
        ["evaluate", "IN", "--json", "MODEL/tokenizer_config.json"],
    ],
    ids=" ".join,
)
def test_no_output_replaces_an_artifact_or_a_part_of_one(
    esm, fasta, tmp_path, monkeypatch, tiny_folder, tiny_calibration, tiny, command
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, tmp_path / "model")
    shutil.copyfile(tiny_calibration(), tmp_path / "calibration")
    shutil.copyfile(tiny_folder / "model.safetensors", tmp_path / "weights")
    tiny.prefill("MKTAYIAK").save(tmp_path / "cache")
    with ContextStore(tmp_path / "store") as contexts:
        contexts.add(tiny, ["MKTAYIAK"])
    (tmp_path / "embeddings").mkdir()
    for name in ("index.tsv", "settings.json"):
        (tmp_path / "embeddings" / name).write_text("as it was")
    before = files(tmp_path)
    result = esm(*(fasta if word == "IN" else re.sub("[A-Z]{4,}", lambda m: m[0].lower(), word) for word in command))
    assert (result.code, result.out) == (2, "")
    folder = "(a store of contexts|a folder of embeddings|the folder of a model|an input of this command);"
    replaced = "a (calibration|cache|file of tensors), which would be replaced;"
    assert re.search(f"(is|lies in [^ ]+,) {folder}|is {replaced}", result.error)
    assert files(tmp_path) == before


def test_the_calibration_of_a_model_may_be_written_beside_it(esm, fasta, tmp_path, tiny_folder):
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    out = model / "calibration.safetensors"
    for said in (False, True):
        result = esm("calibrate", fasta, "--model", model, "--out", out)
        assert (result.code, f"esm-turbo: replaced {out}\n" in result.err) == (0, said)


def test_a_device_may_be_named_for_two_outputs(esm, fasta, tmp_path, tiny_folder):
    options = ["--max-new-tokens", "1", "--model", tiny_folder, "--preset", "exact"]
    assert esm("generate", fasta, *options, "--out", os.devnull, "--json", os.devnull).code == 0


def with_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_weights(change):
    def replace(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return replace


def with_nan(weights):
    weights["esm.encoder.layer.1.attention.self.key.weight"][3, 4] = float("nan")
    return weights


UNUSABLE = {
    "bert": (
        with_config(model_type="bert", architectures=["BertForMaskedLM"]),
        "not ESM-2, ESM-C or E1 but model type 'bert'",
    ),
    "esm1b": (
        with_config(position_embedding_type="absolute"),
        "not ESM-2 but an ESM model with absolute positions",
    ),
    "esmfold": (with_config(is_folding_model=True), "folding"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "not a complete checkpoint"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "not a complete checkpoint"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "not a complete checkpoint"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 2000), "the weights are damaged"),
    "other weights": (
        with_weights(lambda _: {f"bert.encoder.layer.{index}.weight": torch.zeros(3) for index in range(3)}),
        "weights of the encoder, such as esm.embeddings.word_embeddings.weight",
    ),
    "nan": (with_weights(with_nan), "esm.encoder.layer.1.attention.self.key.weight holds NaN or infinity"),
}


@pytest.mark.parametrize(("damage", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_model_is_refused(esm, fasta, tmp_path, tiny_folder, damage, message):
    folder = shutil.copytree(tiny_folder, tmp_path / "damaged")
    damage(folder)
    for command in (["calibrate", fasta, "--out", tmp_path / "out"], ["embed", fasta, tmp_path / "out"]):
        result = esm(*command, "--model", folder)
        assert result.code == 2
        assert message in result.error
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["calibrate", "embed", "evaluate", "info"])
def test_a_hub_model_without_a_network_fails_quickly(esm, fasta, tmp_path, command):
    model = "facebook/esm2_t6_8M_UR50D"
    arguments = {
        "calibrate": [fasta, "--model", model, "--out", tmp_path / "c"],
        "embed": [fasta, tmp_path / "out", "--model", model],
        "evaluate": [fasta, "--model", model],
        "info": [model],
    }[command]
    start = time.monotonic()
    result = esm(command, *arguments)
    assert result.code == 2
    assert f"cannot load '{model}'" in result.error
    assert "give a local folder" in result.error
    # The hub's client alone would try for more than twenty seconds.
    assert time.monotonic() - start < 15
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.fasta"]


def test_an_unknown_device_is_refused(esm, fasta, tmp_path):
    result = esm("calibrate", fasta, "--out", tmp_path / "c", "--device", "warp")
    assert result.code == 2
    assert "device 'warp' cannot be used here" in result.error


def test_a_missing_calibration_is_reported(esm, known, tmp_path, tiny_folder):
    for arguments in (
        ["embed", known, tmp_path / "out", "--include", "cache"],
        ["evaluate", known, "--preset", "paper"],
        ["score", known, known, "--arm", "turbo"],
    ):
        result = esm(*arguments, "--model", tiny_folder)
        assert result.code == 2
        assert "esm-turbo calibrate" in result.error
    # The only message.
    assert not result.said
    result = esm("evaluate", known, "--model", tiny_folder, "--calibration", tmp_path / "absent.safetensors")
    assert result.code == 2
    assert "absent.safetensors" in result.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "damaged"),
        (altered, "does not match its checksum"),
        (other_version, "format version 99"),
        (other_kind, "not an esm_turbo calibration"),
        (not_safetensors, "not a safetensors file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_calibration_is_refused(esm, fasta, tmp_path, tiny_folder, tiny_calibration, damage, message):
    path = Path(shutil.copy(tiny_calibration(seed=0), tmp_path / "c.safetensors"))
    damage(path)
    before = files(tmp_path)
    for arguments in (
        ["embed", fasta, tmp_path / "out", "--include", "cache"],
        ["evaluate", fasta, "--preset", "paper"],
    ):
        result = esm(*arguments, "--model", tiny_folder, "--calibration", path)
        assert result.code == 2
        assert message in result.error
        assert "c.safetensors" in result.error
    result = esm("info", path)
    assert result.code == 2
    assert "c.safetensors" in result.error
    assert files(tmp_path) == before


@pytest.mark.parametrize("content", [bytes(range(256)), b"\xff" * 40], ids=["bytes", "not utf-8"])
def test_a_damaged_vocabulary_is_named(esm, fasta, tmp_path, tiny_folder, content):
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    (model / "vocab.txt").write_bytes(content)
    result = esm("calibrate", fasta, "--model", model, "--out", tmp_path / "c")
    assert result.code == 2
    assert result.error == f"{model}: vocab.txt is damaged: it is not text; copy it again from the checkpoint"


LOADING = "the embedded model cannot be loaded"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MemoryError(), 1, f"not enough memory ({LOADING}: MemoryError)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, f"not enough memory ({LOADING}: DefaultCPU"),
        (ImportError("libx.so: failed to map segment from shared object"), 1, f"not enough memory ({LOADING}: libx"),
        (AssertionError(), 2, f"{LOADING}: AssertionError"),
    ],
)
def test_too_little_memory_is_not_called_damage(esm, fasta, tmp_path, monkeypatch, error, code, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(TurboEsm, "from_pretrained", fail)
    result = esm("calibrate", fasta, "--out", tmp_path / "c")
    assert result.code == code and result.error.startswith(message) and str(error) in result.error


@pytest.mark.parametrize("content", [b"", b"hello", None], ids=["empty", "text", "altered"])
def test_a_damaged_store_is_named_with_the_remedy(esm, fasta, tmp_path, tiny, tiny_folder, content):
    with ContextStore(tmp_path / "store") as contexts:
        contexts.add(tiny, ["MKTAYIAK"])
    path = tmp_path / "store" / "store.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\1\2\3" if content is None else content)
    result = esm("store", fasta, tmp_path / "store", "--model", tiny_folder, "--preset", "exact")
    assert result.code == 2
    assert result.error.startswith(f"{path}: ")
    assert result.error.endswith("; restore it from a copy, or give another folder")


@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.parametrize("command", ["generate", "score", "variants"])
def test_a_full_disk_does_not_lose_results(esm_shared, write, tmp_path, monkeypatch, command, option):
    protein = write("protein.fasta", ">=a\nMKTAYIAKQR\n")
    arguments = {
        "generate": [protein, "--max-new-tokens", "2"],
        "score": [protein, write("candidates.csv", "sequence\nACDEF\nWTC\n"), "--top", "1"],
        "variants": [protein, write("variants.csv", "mutant\nM1A\nK2A\n"), "--top", "1"],
    }[command]
    path = tmp_path / "results"
    assert esm_shared(command, *arguments, option, path).code == 0
    expected = path.read_text()
    path.unlink()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    result = esm_shared(command, *arguments, option, path)
    assert (result.code, result.error) == (1, f"{path}: cannot be written (No space left on device)")
    assert expected in result.out
    assert not path.exists()


@pytest.mark.parametrize("command", ["binders", "generate", "score", "variants"])
def test_a_full_disk_of_the_picture_loses_nothing_else(esm_shared, write, tmp_path, monkeypatch, command):
    protein = write("protein.fasta", ">=a\nMKTAYIAKQR\n")
    arguments = {
        "binders": [protein, "--length", "3"],
        "generate": [protein, "--max-new-tokens", "2"],
        "score": [protein, write("candidates.csv", "sequence\nACDEF\nWTC\n")],
        "variants": [protein, "--method", "wild_type"],
    }[command]
    found, plot, replace = tmp_path / "found.json", tmp_path / "found.html", os.replace

    def full_for_pictures(source, target, **options):
        if os.fspath(target).endswith("html"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", full_for_pictures)
    result = esm_shared(command, *arguments, "--json", found, "--plot", plot)
    assert (result.code, result.error) == (1, f"{plot}: cannot be written (No space left on device)")
    assert result.out and json.loads(found.read_text()) and not plot.exists()


DEMONSTRATION = (
    "esm2-mini is a small demonstration model, not one of Meta's; for real work name a checkpoint of ESM-2,"
    " ESM-C or E1, such as --model facebook/esm2_t33_650M_UR50D"
)


@pytest.mark.parametrize(
    ("arguments", "arms"),
    [
        (["embed", "IN", "OUT"], {}),
        (["embed", "IN", "OUT", "--include", "cache"], {"turbo": "turbo3"}),
        (["score", "IN", "IN", "--arm", "full", "frozen"], {"full": None, "frozen": "exact"}),
        (["variants", "ONE", "--arm", "turbo", "--preset", "turbo2"], {"turbo": "turbo2"}),
        (["generate", "IN", "--max-new-tokens", "1", "--preset", "exact"], {"frozen": "exact"}),
        (["store", "IN", "OUT"], {"turbo": "turbo3"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_run_says_what_it_used(esm, write, tmp_path, arguments, arms):
    write("IN", ">a\nMKTAYIAK\n>b\nGSGSG\n")
    write("ONE", ">a\nMKT\n")
    arguments = [str(tmp_path / one) if one in ("IN", "ONE", "OUT") else one for one in arguments]
    result = esm(*arguments, "--device", "cpu", "--json", "-")
    assert (result.code, result.err) == (0, "")
    run, more = result.said
    assert all(word in run for word in ("model esm2-mini", "device cpu", "float32", *arms))
    assert more == DEMONSTRATION
    used = json.loads(result.out)["run"]
    assert used.pop("threads") == 1
    assert used.pop("background", None) == ("targets" if "score" in arguments else None)
    assert used == {"model": "esm2-mini", "arms": arms, "device": "cpu", "dtype": "float32", "demonstration": True}


def test_only_the_embedded_model_is_called_a_demonstration(esm, fasta, tmp_path, tiny_folder):
    result = esm("embed", fasta, tmp_path / "out", "--model", tiny_folder)
    assert result.said == ["model tiny, device cpu, float32, 1 thread"]
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["device"] == "cpu"


@pytest.fixture
def known(write):
    """Proteins without unknown residues, of which commands say nothing."""
    return write("known.fasta", ">a class=alpha_beta\nMKTAYIAKQRQISFVK\n>b class=alpha_beta\nGSGSWKDL\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "IN", "IN", "--out", "x.json"], "must end in .csv, .tsv or .parquet"),
        (["variants", "IN", "--out", "x.xlsx"], "must end in .csv, .tsv or .parquet"),
        (["generate", "IN", "--max-new-tokens", "1", "--out", "x.csv"], "must end in .fasta, .fa, .faa or .fas"),
        (["calibrate", "IN", "--out", "x.pt"], "must end in .safetensors"),
        (["embed", "IN", "x.h5", "--format", "pt"], "ends in .h5, but pt embeddings are a folder"),
        (["embed", "IN", "x.parquet", "--format", "pt"], "ends in .parquet, but pt embeddings are a folder"),
        (["embed", "IN", "x.npz"], "x.npz: a folder is written; give a name without .npz, or one that ends in .h5 or"),
        (["store", "IN", "x.h5"], "x.h5: a folder is written; give a name without .h5"),
        (["score", "IN", "IN", "--store", "x.pt"], "x.pt: a folder is written; give a name without .pt"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_output_named_for_another_format_is_refused(esm, fasta, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    result = esm(*[fasta if one == "IN" else one for one in arguments])
    assert result.code == 2
    assert message in result.error
    assert files(tmp_path) == before


def test_the_suffix_decides_the_format(esm, fasta, tmp_path, tiny_folder):
    model = ["--model", tiny_folder, "--preset", "exact"]
    out = tmp_path / "scores.tsv"
    assert esm("score", fasta, fasta, "--arm", "frozen", "--out", out, *model).code == 0
    assert out.read_text().startswith("target\tcandidate\tsequence\t")
    # Twice, since a Parquet file may be replaced, as any table.
    for _ in range(2):
        assert esm("score", fasta, fasta, "--arm", "frozen", "--out", tmp_path / "scores.parquet", *model).code == 0
    assert parquet_settings(tmp_path / "scores.parquet")["run"]["model"] == "tiny"
    assert esm("embed", fasta, tmp_path / "x.h5", *model).code == 0
    assert (tmp_path / "x.h5").read_bytes().startswith(b"\x89HDF")


@pytest.mark.parametrize(
    "command", [["score", "IN"], ["variants"], ["generate", "--max-new-tokens", "1"], ["binders", "--length", "3"]]
)
def test_a_model_without_a_calibration_runs_at_full_precision(esm, known, tiny_folder, command):
    name, *options = [known if one == "IN" else one for one in command]
    model = ["--model", tiny_folder, "--json", "-"]
    result = esm(name, known, *options, *model)
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["run"]["arms"] == {"frozen": "exact"}
    # The default that is named is not the default.
    for preset in ("turbo2", "turbo3"):
        result = esm(name, known, *options, *model, "--preset", preset)
        assert result.code == 2
        assert f"preset '{preset}' needs a calibration" in result.error and "--calibration auto" in result.error


@pytest.mark.parametrize(
    "command", [["score", "IN", "IN", "--arm", "frozen"], ["embed", "IN", "new", "--include", "mean"]]
)
def test_a_preset_that_nothing_is_stored_under_is_mentioned(esm, known, tmp_path, tiny_folder, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    arguments = [*(known if one == "IN" else one for one in command), "--model", tiny_folder]
    result = esm(*arguments, "--preset", "turbo3")
    assert result.code == 0
    assert result.err == "esm-turbo: warning: --preset turbo3 changes nothing: this run stores no contexts under it\n"
    assert esm(*arguments).err == ""


def test_the_number_of_threads_can_be_named(esm, fasta, tmp_path, tiny_folder):
    arguments = ["embed", fasta, tmp_path / "out", "--model", tiny_folder, "--include", "mean"]
    try:
        assert esm(*arguments, "--threads", "2").said[0].endswith(", 2 threads")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    result = esm(*arguments, "--threads", "0")
    assert (result.code, result.error) == (2, "--threads must be at least 1, got 0")


@pytest.fixture
def standard_input():
    """`standard_input(content)` writes to a pipe that is standard input."""
    kept = os.dup(0)

    def give(content):
        read, write = os.pipe()
        os.write(write, content)
        os.close(write)
        os.dup2(read, 0)
        os.close(read)

    yield give
    os.dup2(kept, 0)
    os.close(kept)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_proteins_of_standard_input(esm, tmp_path, tiny_folder, standard_input, compress):
    standard_input(compress(b">sp|P69905|HBA_HUMAN x\nMVLS\n"))
    command = ["embed", "-", tmp_path / "out", "--accessions", "--include", "mean", "--model", tiny_folder]
    result = esm(*command, "--json", "-")
    assert (result.code, result.err) == (0, "") and json.loads(result.out)["written"] == 1
    assert "P69905\t" in (tmp_path / "out" / "index.tsv").read_text()


def test_standard_input_is_no_output(esm_shared, write, tmp_path, standard_input):
    standard_input(b"precious")
    protein, candidates = write("protein.fasta", ">a\nMKTAYIAK\n"), write("candidates.csv", "sequence\nACDEF\n")
    for command in (
        ["score", protein, candidates, "--out", "-"],
        ["score", protein, candidates, "--matrix", "-"],
        ["generate", protein, "--positions", "2", "--out", "-"],
    ):
        refused = esm_shared(*command)
        assert refused.code == 2 and "/dev/stdin: is standard input (-), where results cannot go" in refused.error
    with open(0, "rb", closefd=False) as stdin:
        assert stdin.read() == b"precious"


def test_output_that_is_redirected_to_a_file_is_added_to(tmp_path):
    protein, out = tmp_path / "protein.fasta", tmp_path / "all.txt"
    protein.write_text(">a\nMKTAYIAK\n")
    command = [sys.executable, "-m", "esm_turbo", "generate", protein, "--positions", "2", "--out", "/dev/stdout"]
    with out.open("ab") as file:
        file.write(b"header\n")
        file.flush()
        found = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=True)
    assert "replaced" not in found.stderr
    lines = out.read_text().splitlines()
    assert lines[0] == "header" and lines[1].startswith(">a")


def test_standard_input_that_cannot_be_used(esm, tmp_path, tiny_folder, standard_input):
    standard_input(b"")
    assert "/dev/stdin: is empty" in esm("variants", "-").error
    standard_input(b">a\nMK\n")
    refused = esm("calibrate", "-", "--out", tmp_path / "c.safetensors", "--model", tiny_folder)
    assert refused.code == 2 and "give a file, not standard input" in refused.error
    protein = tmp_path / "protein.fasta"
    protein.write_text(">a\nMK\n")
    standard_input(b">b\nMKT\n")
    refused = esm("variants", protein, "--homologs", "-", "--model", E1_MINI)
    assert refused.code == 2 and "record the checksum of --homologs; give a file, not standard input" in refused.error


@pytest.mark.parametrize("command", ["score", "variants"])
def test_a_table_says_what_its_run_used(esm, write, tmp_path, tiny_folder, command):
    fasta, out = write("in.fasta", ">a\nMKTAYI\n"), tmp_path / "out.csv"
    # A table of an earlier run, with a column of its own.
    table = write("in.csv", "sequence,mutant,run_model,assay\nACD,M1A,earlier,7\nWTC,K2A,earlier,8\n")
    assert esm(command, fasta, table, "--model", tiny_folder, "--out", out).code == 0
    assert out.read_text().splitlines()[0].count("run_model") == 1
    found = read_csv(out, ["run_model", "run_preset", "run_device", "assay"])
    assert sorted(row["assay"] for row in found) == ["7", "8"]
    assert {tuple(row.values())[:3] for row in found} == {("tiny", "exact", "cpu")}


def test_what_workers_add_to_a_store_is_told(turbo, tmp_path, capsys):
    with ContextStore(tmp_path) as store:
        store.add(turbo, ["MKTAY"])
    with opened_store(tmp_path, turbo, alone=False):
        # As another process does.
        ContextStore(tmp_path).add(turbo, ["MKTAY", "GSWKD", "ACDEF"])
    assert capsys.readouterr().err == f"esm-turbo: {tmp_path}: 3 contexts, 2 computed and added\n"
