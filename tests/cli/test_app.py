"""The command line: what commands write, and one line with the right exit code for everything that goes wrong."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest
import torch
import transformers.utils.logging as transformers_logging
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import esm_turbo
from esm_turbo import Calibration, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.cli import app as cli
from esm_turbo.cli import demo
from esm_turbo.cli.info import stored_bytes
from esm_turbo.config import PRESETS
from esm_turbo.proteins.fasta import ProteinRecord, sha256_file
from esm_turbo.tasks.calibration.records import calibrate_records
from esm_turbo.tasks.embedding.files import read_embedding, sequence_hash

ROOT = Path(esm_turbo.__file__).resolve().parents[1]
SEQUENCES = {
    "sp|P1/../x": "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQMKTAYIAKQRQISFVKSHFSRQLEERLG",
    "b": "GSGSWKDLAEXPLLKRRVWTCACDEFGHIKLMNPQRSTVWY",
    "c": "MKVLLRALWQDEGHST",
}
GOOD = "".join(f">{name} class=alpha_beta\n{sequence}\n" for name, sequence in SEQUENCES.items())

# What makes a whole file unusable, or one record of it: the text and what the message must say.
WHOLE_FILE = {
    "empty": ("", "is empty"),
    "blank": ("\n\n", "is empty"),
    "not FASTA": ("name,sequence\nx,MKT\n", "is not FASTA: line 1 is 'name,sequence'"),
    "not text": ("\x00\x01>a\nMKT\n", "is not text"),
}
ONE_RECORD = {
    "duplicate id": (GOOD + ">b\nMKT\n", "record 'b': record 4 repeats the identifier of record 2"),
    "empty record": (GOOD + ">d\n\n", "record 'd': holds no residues"),
    "bad letter": (GOOD + ">d\nMKT\nAJ\n", "record 'd': position 5 is 'J', not one of the 25 residue codes"),
    "gap": (GOOD + ">d\nMK-T\n", "record 'd': position 3 is '-'"),
    "stop inside": (GOOD + ">d\nMK*T\n", "record 'd': position 3 is a stop '*' inside"),
    "no id": (GOOD + ">\nMKT\n", "record '#4': the header names no identifier"),
}


@pytest.fixture(autouse=True)
def loud_transformers():
    """The commands silence transformers for their process; other tests look at its warnings."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    yield
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


class Result:
    def __init__(self, code, captured):
        self.code = code
        self.out = captured.out
        self.err = captured.err

    @property
    def error(self):
        """The single line on standard error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("esm-turbo: error: ")
        return lines[0].removeprefix("esm-turbo: error: ")


@pytest.fixture
def esm(capsys):
    """Runs a command in this process."""

    def run(*arguments):
        capsys.readouterr()
        return Result(cli.run([str(argument) for argument in arguments]), capsys.readouterr())

    return run


@pytest.fixture
def fasta(tmp_path):
    path = tmp_path / "good.fasta"
    path.write_text(GOOD)
    return path


def tiny_turbo(turbo, tiny_esm, **config):
    return TurboEsm(TurboEsmForMaskedLM.from_esm(tiny_esm(**config), preset="exact"), turbo.tokenizer)


@pytest.fixture(scope="module")
def tiny_folder(turbo, tiny_esm, tmp_path_factory):
    """A small checkpoint of random weights, without a calibration."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_turbo(turbo, tiny_esm).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_calibration(turbo, tiny_esm, tmp_path_factory):
    """Calibrations of small models of random weights, by seed and shape."""
    folder = tmp_path_factory.mktemp("calibrations")
    records = [ProteinRecord("a", "MKTAYIAKQRQISFVKSHFS" * 5)]

    def make(**config):
        path = folder / f"{sorted(config.items())}.safetensors"
        if not path.exists():
            calibrate_records(tiny_turbo(turbo, tiny_esm, **config), records, presets=["exact"]).save(path)
        return path

    return make


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


# --- arguments


def test_help_and_version(esm):
    result = esm("--help")
    assert result.code == 0
    assert not result.err
    commands = ("demo", "calibrate", "embed", "evaluate", "generate", "info", "score", "store", "variants")
    assert all(command in result.out for command in commands)
    assert esm("--version").out.strip() == esm_turbo.__version__
    for option in ("--repr-layers", "--include", "--truncation-seq-length", "--format"):
        assert option in esm("embed", "--help").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], 'Unknown command "frobnicate"'),
        (["calibrate", "x.fasta"], "--out"),
        (["calibrate"], "PROTEINS"),
        (["embed", "x.fasta", "out", "--include", "logits"], "logits"),
        (["embed", "x.fasta", "out", "--format", "csv"], "csv"),
        (["embed", "x.fasta", "out", "--toks_per_batch", "many"], "many"),
        (["embed", "x.fasta", "out", "--dtype", "int8"], "int8"),
        (["embed", "x.fasta", "out", "--nope", "1"], "--nope"),
        (["embed", "x.fasta", "out", "--truncation_seq_length", "0"], "must be at least 1, got 0"),
        (
            ["embed", "x.fasta", "out", "--format", "h5", "--include", "cache"],
            "caches cannot be stored in an HDF5 file",
        ),
        (["evaluate", "x.fasta", "--preset", "paper", "papper"], "got 'papper'"),
        (["evaluate", "x.fasta", "--max-proteins", "0"], "must be at least 1, got 0"),
        (["info", "--length", "0"], "must be at least 1, got 0"),
        (["info", "--json", "--length"], "--length"),
    ],
)
def test_wrong_arguments(esm, arguments, message):
    result = esm(*arguments)
    assert result.code == 2
    assert message in result.error
    assert not result.out


def test_a_model_is_not_loaded_for_a_bad_file(esm, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr(TurboEsm, "from_pretrained", fail)
    assert esm("calibrate", tmp_path / "absent.fasta", "--out", tmp_path / "c").error.endswith("check the path")


def test_debug_adds_the_traceback_wherever_it_stands(esm, tmp_path):
    for arguments in (["--debug", "calibrate"], ["calibrate", "--debug"]):
        result = esm(*arguments, tmp_path / "absent.fasta", "--out", tmp_path / "c")
        assert result.code == 2
        assert "Traceback" in result.err
        assert result.err.splitlines()[-1].startswith("esm-turbo: error: ")


def test_an_unexpected_error_is_one_line(esm, fasta, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("esm_turbo.tasks.calibration.records.calibrate_records", fail)
    result = esm("calibrate", fasta, "--out", tmp_path / "c")
    assert result.code == 1
    assert result.error == "RuntimeError: first line second line; --debug shows where"


def test_an_interruption_is_one_line(esm, fasta, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("esm_turbo.tasks.calibration.records.calibrate_records", interrupt)
    result = esm("calibrate", fasta, "--out", tmp_path / "c")
    assert result.code == 130
    assert result.err == "esm-turbo: interrupted\n"


# --- calibrate


def test_calibrate(esm, fasta, tmp_path, tiny_folder):
    out, summary = tmp_path / "new" / "c.safetensors", tmp_path / "summary.json"
    result = esm("calibrate", fasta, "--model", tiny_folder, "--out", out, "--toks_per_batch", "50", "--json", summary)
    assert result.code == 0
    assert not result.err
    assert "alpha_beta" in result.out
    assert "1-100" in result.out
    assert str(out) in result.out.replace("\n", "")
    record = Calibration.load(out).provenance
    assert record["model"] == "tiny"
    assert record["classes"] == {"alpha_beta": {"sequences": 3, "residues": sum(map(len, SEQUENCES.values()))}}
    assert record["fasta"] == {"name": "good.fasta", "sha256": sha256_file(fasta)}
    assert json.loads(summary.read_text())["provenance"] == record
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=out)
    assert turbo.prefill("MKTAY").bits_per_element < 16


def test_calibrate_accepts_what_people_have(esm, tmp_path, tiny_folder):
    path = tmp_path / "odd.fasta.gz"
    path.write_bytes(gzip.compress(GOOD.lower().replace("\n", "*\r\n").replace("beta*", "beta").encode()))
    result = esm("calibrate", path, "--model", tiny_folder, "--out", tmp_path / "c", "--json", "-")
    assert result.code == 0, result.err
    assert json.loads(result.out)["provenance"]["residues"] == sum(map(len, SEQUENCES.values()))


def test_calibrate_anew_beside_a_calibration_that_does_not_fit(esm, fasta, tmp_path, tiny_folder, tiny_calibration):
    folder = shutil.copytree(tiny_folder, tmp_path / "tuned")
    shutil.copy(tiny_calibration(seed=1), folder / "calibration.safetensors")
    out = folder / "calibration.safetensors"
    assert "the weights are not this model's" in esm("evaluate", fasta, "--model", folder).error
    assert esm("calibrate", fasta, "--model", folder, "--out", out).code == 0
    assert TurboEsm.from_pretrained(folder).prefill("MKTAY").batch_size == 1


@pytest.mark.parametrize("case", [*WHOLE_FILE, *ONE_RECORD])
@pytest.mark.parametrize("command", ["calibrate", "evaluate"])
def test_a_file_with_anything_bad_is_refused(esm, tmp_path, command, case):
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


@pytest.mark.parametrize("unknown", ["X", "x"])
def test_unknown_letters_may_become_x(esm, tmp_path, tiny_folder, unknown):
    path = tmp_path / "j.fasta"
    path.write_text(">d\nMKTAJ-LLVVAAKKRRSSTT\n")
    arguments = ["embed", path, tmp_path / "out", "--model", tiny_folder, "--include", "per_tok"]
    assert esm(*arguments).code == 2
    assert esm(*arguments, "--unknown", unknown).code == 0
    [file] = (tmp_path / "out").glob("*.pt")
    assert file.stem == sequence_hash("MKTAXXLLVVAAKKRRSSTT")
    assert esm(*arguments, "--unknown", "B").code == 2


def test_calibrate_with_too_few_residues(esm, tmp_path, tiny_folder):
    path = tmp_path / "few.fasta"
    path.write_text(">a\nMKT\n")
    result = esm("calibrate", path, "--model", tiny_folder, "--out", tmp_path / "c")
    assert result.code == 2
    assert "fewer than a head has components (16)" in result.error
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("place", ["below a file", "a folder"])
@pytest.mark.parametrize("command", ["calibrate", "embed", "json"])
def test_a_place_that_cannot_be_written(esm, fasta, tmp_path, tiny_folder, command, place):
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


# A calibration that begins to write and never ends. A shell's background jobs have interrupts switched off.
SLOW_SAVE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import esm_turbo.files.artifacts as artifacts
original = artifacts.save_file
def slow(tensors, path, metadata=None):
    original(tensors, path, metadata=metadata)
    with open(path, "r+b") as file:
        file.truncate(1000)
    print("writing", flush=True)
    time.sleep(300)
artifacts.save_file = slow
from esm_turbo.cli.app import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("old", [True, False], ids=["over an old file", "new"])
def test_a_killed_calibration_leaves_the_old_file_or_none(fasta, tmp_path, tiny_folder, tiny_calibration, old):
    out = tmp_path / "c.safetensors"
    if old:
        shutil.copy(tiny_calibration(seed=0), out)
    before = out.read_bytes() if old else None
    command = [sys.executable, "-c", SLOW_SAVE, "calibrate", fasta, "--model", tiny_folder, "--out", out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.kill()
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert out.exists() is old
    if old:
        assert out.read_bytes() == before
    # What is left over is no obstacle.
    assert cli.run(["calibrate", str(fasta), "--model", str(tiny_folder), "--out", str(out)]) == 0
    assert Calibration.load(out).provenance["model"] == "tiny"


def test_ctrl_c_leaves_nothing(fasta, tmp_path, tiny_folder):
    out = tmp_path / "c.safetensors"
    command = [sys.executable, "-c", SLOW_SAVE, "calibrate", fasta, "--model", tiny_folder, "--out", out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "esm-turbo: interrupted\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.fasta"]


def test_the_script_is_the_command(fasta, tmp_path, tiny_folder):
    command = [sys.executable, ROOT / "scripts" / "calibrate.py", fasta]
    options = ["--model", tiny_folder, "--out", tmp_path / "c"]
    result = subprocess.run(command + options, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert Calibration.load(tmp_path / "c").provenance["sequences"] == 3
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("esm-turbo: error: ")


# --- models that cannot be used


def config_of(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bert(folder):
    config_of(folder, model_type="bert", architectures=["BertForMaskedLM"])


def esm1b(folder):
    config_of(folder, position_embedding_type="absolute")


def esmfold(folder):
    config_of(folder, is_folding_model=True)


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text("{")


def truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


def other_weights(folder):
    save_file({"bert.encoder.weight": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})


def nan_weights(folder):
    weights = load_file(folder / "model.safetensors")
    name = "esm.encoder.layer.1.attention.self.key.weight"
    weights[name][3, 4] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (bert, "not ESM-2 but model type 'bert'"),
        (esm1b, "not ESM-2 but an ESM model with absolute positions"),
        (esmfold, "folding"),
        (no_weights, "not a complete checkpoint"),
        (no_config, "not a complete checkpoint"),
        (broken_config, "not a complete checkpoint"),
        (truncated_weights, "the weights are damaged"),
        (other_weights, "weights of the encoder, such as esm.embeddings.word_embeddings.weight"),
        (nan_weights, "esm.encoder.layer.1.attention.self.key.weight holds NaN or infinity"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_model_that_cannot_be_used(esm, fasta, tmp_path, tiny_folder, damage, message):
    folder = shutil.copytree(tiny_folder, tmp_path / "damaged")
    damage(folder)
    result = esm("calibrate", fasta, "--model", folder, "--out", tmp_path / "c")
    assert result.code == 2
    assert message in result.error
    assert not (tmp_path / "c").exists()
    result = esm("embed", fasta, tmp_path / "out", "--model", folder)
    assert result.code == 2
    assert message in result.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["calibrate", "embed", "evaluate", "info"])
def test_a_hub_model_without_a_network(esm, fasta, tmp_path, command):
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


def test_a_device_that_is_not_there(esm, fasta, tmp_path):
    result = esm("calibrate", fasta, "--out", tmp_path / "c", "--device", "warp")
    assert result.code == 2
    assert "device 'warp' cannot be used here" in result.error


# --- calibrations that cannot be used


def test_a_missing_calibration(esm, fasta, tmp_path, tiny_folder):
    for arguments in (
        ["embed", fasta, tmp_path / "out", "--include", "cache"],
        ["evaluate", fasta, "--preset", "paper"],
    ):
        result = esm(*arguments, "--model", tiny_folder)
        assert result.code == 2
        assert "esm-turbo calibrate" in result.error
    result = esm("evaluate", fasta, "--model", tiny_folder, "--calibration", tmp_path / "absent.safetensors")
    assert result.code == 2
    assert "absent.safetensors" in result.error
    assert not (tmp_path / "out").exists()


def truncated(path):
    path.write_bytes(path.read_bytes()[:-500])


def altered(path):
    data = bytearray(path.read_bytes())
    data[-500] ^= 4
    path.write_bytes(data)


def other_version(path):
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=metadata | {"format_version": "99"})


def other_kind(path):
    save_file({"x": torch.zeros(3)}, path)


def not_safetensors(path):
    path.write_text("PK and so on")


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
def test_a_damaged_calibration(esm, fasta, tmp_path, tiny_folder, tiny_calibration, damage, message):
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


@pytest.mark.parametrize(
    ("config", "message"),
    [({"seed": 1}, "the weights are not this model's"), ({"layers": 3}, "3 layers x 4 heads x 16")],
    ids=["another model", "another geometry"],
)
def test_a_calibration_of_another_model(esm, fasta, tmp_path, tiny_folder, tiny_calibration, config, message):
    result = esm(
        "embed", fasta, tmp_path / "out", "--include", "cache", "--model", tiny_folder,
        "--calibration", tiny_calibration(**config),
    )  # fmt: skip
    assert result.code == 2
    assert message in result.error
    assert not (tmp_path / "out").exists()


# --- embed


def index_of(folder):
    lines = [line.split("\t") for line in (folder / "index.tsv").read_text().splitlines()]
    assert lines[0] == ["id", "residues", "embedding", "cache"]
    return {line[0]: line[1:] for line in lines[1:]}


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return TurboEsm.from_pretrained(tiny_folder, preset="exact")


def assert_same(tensor, expected):
    torch.testing.assert_close(torch.as_tensor(tensor), expected, rtol=1e-5, atol=1e-5)


def test_embed_pt(esm, fasta, tmp_path, tiny_folder, tiny):
    out = tmp_path / "out"
    result = esm(
        "embed", fasta, out, "--model", tiny_folder, "--repr_layers", "-1", "0",
        "--include", "mean", "per_tok", "bos", "contacts", "--toks_per_batch", "64",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    assert "3 of 3 proteins embedded" in result.out
    index = index_of(out)
    expected = tiny.embed(list(SEQUENCES.values()), (2, 0), ("mean", "per_tok", "bos", "contacts"))
    for (name, sequence), embedding in zip(SEQUENCES.items(), expected, strict=True):
        assert index[name] == [str(len(sequence)), f"{sequence_hash(sequence)}.pt", ""]
        saved = torch.load(out / index[name][1], weights_only=True)
        assert list(saved) == [
            "label", "representations", "mean_representations", "bos_representations", "contacts",
        ]  # fmt: skip
        assert saved["label"] == name
        for layer in (0, 2):
            assert_same(saved["representations"][layer], embedding.representations[layer])
            assert_same(saved["mean_representations"][layer], embedding.mean_representations[layer])
            assert_same(saved["bos_representations"][layer], embedding.bos_representations[layer])
        assert_same(saved["contacts"], embedding.contacts)
    # Nothing but these files: identifiers are no paths, and no temporary file is left.
    assert len(files(tmp_path)) == 1 + 3 + 2


def test_embed_safetensors_and_caches(esm, fasta, tmp_path, tiny_folder, tiny, tiny_calibration):
    out = tmp_path / "out"
    result = esm(
        "embed", fasta, out, "--model", tiny_folder, "--format", "safetensors", "--include", "mean", "cache",
        "--calibration", tiny_calibration(seed=0), "--preset", "paper",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0), preset="paper")
    for name, (_, embedding_file, cache_file) in index_of(out).items():
        metadata, tensors = read_embedding(out / embedding_file)
        assert metadata == {"label": name, "residues": len(SEQUENCES[name])}
        assert list(tensors) == ["mean_representations.2"]
        assert_same(tensors["mean_representations.2"], tiny.embed(SEQUENCES[name])[0].mean_representations[2])
        cache = TurboKVCache.load(out / cache_file, model=turbo.model)
        assert cache.config.name == "paper"
        assert cache.nbytes == turbo.prefill(SEQUENCES[name]).nbytes


def test_embed_h5_as_biotrainer_reads_it(esm, fasta, tmp_path, tiny_folder, tiny):
    out = tmp_path / "new" / "embeddings.h5"
    with fasta.open("a") as file:
        file.write(f">again\n{SEQUENCES['c']}\n")
    arguments = ["embed", fasta, out, "--model", tiny_folder, "--format", "h5"]
    assert esm(*arguments, "--include", "per_tok").code == 0
    with h5py.File(out) as file:
        assert len(file) == 3
        by_id = {data.attrs["original_id"]: torch.tensor(data[:]) for data in file.values()}
        assert list(file[sequence_hash(SEQUENCES["c"])].attrs["other_ids"]) == ["again"]
    for name, sequence in SEQUENCES.items():
        assert_same(by_id[name], tiny.embed(sequence)[0].representations[2])
    # Several things of a protein form a group; they go into a file of their own.
    several = ["--include", "mean", "per_tok", "--repr_layers", "0", "2"]
    assert "holds embeddings made with" in esm(*arguments, *several).error
    out = arguments[2] = out.with_name("several.h5")
    assert esm(*arguments, *several).code == 0
    with h5py.File(out) as file:
        group = file[sequence_hash(SEQUENCES["b"])]
        assert group.attrs["original_id"] == "b"
        assert group["mean_representations/0"].shape == (64,)
        assert group["representations/2"].shape == (len(SEQUENCES["b"]), 64)
    assert sorted(p.name for p in out.parent.iterdir()) == ["embeddings.h5", "several.h5"]


def test_h5py_may_be_missing(esm, fasta, tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    result = esm("embed", fasta, tmp_path / "e.h5", "--model", tiny_folder, "--format", "h5")
    assert result.code == 2
    assert "pip install 'esm-turbo[h5]'" in result.error
    assert not (tmp_path / "e.h5").exists()


@pytest.mark.parametrize("case", ONE_RECORD)
def test_good_records_are_embedded_and_bad_ones_listed(esm, tmp_path, tiny_folder, case):
    text, message = ONE_RECORD[case]
    path, out = tmp_path / "some.fasta", tmp_path / "out"
    path.write_text(text)
    result = esm("embed", path, out, "--model", tiny_folder, "--include", "mean", "--json", "-")
    assert result.code == 1
    assert message in result.error
    assert set(index_of(out)) == set(SEQUENCES)
    summary = json.loads(result.out)
    assert summary["written"] == 3
    assert len(summary["failed"]) == 1


@pytest.mark.parametrize("case", WHOLE_FILE)
def test_embed_refuses_a_file_that_is_none(esm, tmp_path, case):
    text, message = WHOLE_FILE[case]
    path = tmp_path / "bad.fasta"
    path.write_text(text)
    result = esm("embed", path, tmp_path / "out")
    assert result.code == 2
    assert message in result.error
    assert not (tmp_path / "out").exists()


def test_no_good_record_at_all(esm, tmp_path):
    path = tmp_path / "bad.fasta"
    path.write_text(">a\nMKJ\n>b\n\n")
    result = esm("embed", path, tmp_path / "out")
    assert result.code == 2
    lines = result.err.splitlines()
    assert "record 'a': position 3" in lines[0]
    assert "record 'b'" in lines[1]
    assert "no usable record" in lines[2]
    assert not (tmp_path / "out").exists()


def test_truncation_and_long_proteins_warn_once(esm, tmp_path, tiny_folder):
    path = tmp_path / "long.fasta"
    path.write_text(">a\n" + "MKTAYIAKQR" * 103 + "\n>b\n" + "GSGSWKDLAE" * 104 + "\n>c\nMKT\n")
    arguments = ["embed", path, "--model", tiny_folder, "--include", "per_tok"]
    result = esm(*arguments[:2], tmp_path / "whole", *arguments[2:])
    assert result.code == 0
    [line] = result.err.splitlines()
    assert line.startswith("esm-turbo: warning: 2 proteins of up to 1040 residues")
    result = esm(*arguments[:2], tmp_path / "cut", *arguments[2:], "--truncation_seq_length", "50", "--json", "-")
    assert result.code == 0
    assert result.err == "esm-turbo: warning: 2 proteins truncated to 50 residues\n"
    assert json.loads(result.out)["truncated"] == ["a", "b"]
    lengths = {
        name: len(torch.load(tmp_path / "cut" / file, weights_only=True)["representations"][2])
        for name, (_, file, _) in index_of(tmp_path / "cut").items()
    }
    assert lengths == {"a": 50, "b": 50, "c": 3}


def test_a_second_file_joins_the_first_if_made_alike(esm, fasta, tmp_path, tiny_folder):
    more = tmp_path / "more.fasta"
    more.write_text(">d\nMMMMKKKK\n>c\nACDEFGHIKL\n")
    out = tmp_path / "out"
    assert esm("embed", fasta, out, "--model", tiny_folder, "--include", "mean").code == 0
    assert esm("embed", more, out, "--model", tiny_folder, "--include", "mean").code == 0
    index = index_of(out)
    assert set(index) == {*SEQUENCES, "d"}
    assert index["c"][1] == f"{sequence_hash('ACDEFGHIKL')}.pt"
    before = files(out)
    for change in (
        ["--include", "per_tok"],
        ["--include", "mean", "--repr_layers", "0"],
        ["--include", "mean", "--dtype", "bfloat16"],
        ["--include", "mean", "--format", "safetensors"],
        ["--include", "mean", "--truncation_seq_length", "9"],
    ):
        result = esm("embed", more, out, "--model", tiny_folder, *change)
        assert result.code == 2
        assert "holds embeddings made with" in result.error
        assert files(out) == before
    result = esm("embed", more, out, "--include", "mean")
    assert "made with model tiny, not esm2-mini" in result.error


def test_an_embedding_that_is_not_finite_is_a_failed_record(esm, fasta, tmp_path, tiny_folder, monkeypatch):
    from esm_turbo.tasks.embedding.embed import ProteinEmbedding

    monkeypatch.setattr(ProteinEmbedding, "is_finite", lambda self: len(self.representations[2]) != len(SEQUENCES["b"]))
    result = esm("embed", fasta, tmp_path / "out", "--model", tiny_folder, "--include", "per_tok")
    assert result.code == 1
    assert "record 'b': its embedding is not finite" in result.error
    assert set(index_of(tmp_path / "out")) == {"sp|P1/../x", "c"}
    assert "2 of 3 proteins" in result.out


@pytest.mark.parametrize("file_format", ["pt", "h5"])
def test_what_is_written_before_a_failure_is_whole(esm, fasta, tmp_path, tiny_folder, monkeypatch, file_format):
    from esm_turbo.tasks.embedding import embed as embedding

    original, calls = embedding._embed_batch, []

    def fail_later(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("out of luck")
        return original(*arguments)

    monkeypatch.setattr(embedding, "_embed_batch", fail_later)
    out = tmp_path / "out"
    result = esm(
        "embed", fasta, out, "--model", tiny_folder, "--include", "mean", "--toks_per_batch", "1",
        "--format", file_format,
    )  # fmt: skip
    assert result.code == 1
    assert result.error == "out of luck"
    if file_format == "h5":
        # The file comes when it is whole; until then there is what it will be made of.
        assert sorted(p.name for p in tmp_path.iterdir()) == [".out.parts", "good.fasta"]
        index = index_of(tmp_path / ".out.parts")
        assert all(read_embedding(tmp_path / ".out.parts" / file) for _, file, _ in index.values())
    else:
        index = index_of(out)
        assert all(torch.load(out / file, weights_only=True) for _, file, _ in index.values())
    assert set(index) == {"sp|P1/../x", "b"}


# --- evaluate, info, demo


def test_evaluate(esm, fasta, tmp_path, tiny_folder, tiny_calibration):
    arguments = ["evaluate", fasta, "--model", tiny_folder, "--calibration", tiny_calibration(seed=0),
                 "--preset", "exact", "paper", "--max-proteins", "2", "--extend-ks", "4", "--refresh_ws", "0", "2",
                 "--outlier-scales"]  # fmt: skip
    result = esm(*arguments, "--json", tmp_path / "figures.json")
    assert (result.code, result.err) == (0, "")
    assert "paper" in result.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [preset["name"] for preset in figures["presets"]] == ["exact", "paper"]
    assert figures["provenance"]["proteins"] == 2
    assert figures["outliers"] is None
    again = esm(*arguments, "--json", "-")
    assert json.loads(again.out) == figures


def test_info_of_a_model(esm, tiny_folder, tiny_calibration, tiny):
    result = esm("info", tiny_folder, "--length", "11", "--batch", "3", "--json=-")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["geometry"] == {"num_layers": 2, "num_heads": 4, "head_dim": 16}
    assert found["model"] == "tiny"
    assert not found["calibrated"]
    sizes = found["cache"]["presets"]
    assert sizes["fp32"]["bytes"] == 3 * 11 * 2 * 2 * 4 * 16 * 4
    assert sizes["exact"]["bytes"] == 3 * tiny.prefill("MKTAYIAKQR").nbytes
    calibrated = esm("info", tiny_folder, "--calibration", tiny_calibration(seed=0), "--length", "11", "--json", "-")
    found = json.loads(calibrated.out)
    assert found["calibrated"]
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0))
    for preset, size in found["cache"]["presets"].items():
        if not preset.startswith("fp"):
            turbo.model.set_turbo(calibration=turbo.calibration, preset=preset)
            # Without a calibration of its own the same was foretold.
            assert size["bytes"] == turbo.prefill("MKTAYIAKQR").nbytes == sizes[preset]["bytes"] / 3
    assert "geometry" in esm("info", tiny_folder).out


def test_bytes_of_long_proteins_are_extrapolated(tiny_folder, tiny_calibration):
    calibration = Calibration.load(tiny_calibration(seed=0))
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=calibration)
    for preset in PRESETS:
        turbo.model.set_turbo(calibration=calibration, preset=preset)
        for length in (127, 128, 191, 501):
            assert stored_bytes(calibration.codec(preset), length) == turbo.prefill("M" * (length - 1)).nbytes


def test_info_of_artifacts(esm, tmp_path, tiny_calibration, tiny):
    calibration = json.loads(esm("info", tiny_calibration(seed=0), "--json", "-").out)
    assert calibration["kind"] == "calibration"
    assert calibration["provenance"]["residues"] == 100
    cache = tiny.prefill(["MKTAYIAKQR", "MKT"])
    cache.save(tmp_path / "cache.safetensors")
    found = json.loads(esm("info", tmp_path / "cache.safetensors", "--json", "-").out)
    assert (found["kind"], found["lengths"], found["bytes"]) == ("cache", [11, 4], cache.nbytes)
    assert found["preset"] == "exact"
    for path in (tiny_calibration(seed=0), tmp_path / "cache.safetensors"):
        result = esm("info", path)
        assert (result.code, result.err) == (0, "")
        assert "2 layers x 4 heads x 16" in result.out


def test_info_of_embeddings(esm, tmp_path, tiny_folder):
    fasta, folder = tmp_path / "a.fasta", tmp_path / "embeddings"
    fasta.write_text(">a\nMKT\n>b\nMKTAYI\n")
    assert esm("embed", fasta, folder, "--model", tiny_folder, "--include", "mean").code == 0
    found = json.loads(esm("info", folder, "--json", "-").out)
    assert (found["kind"], found["proteins"], found["model"]) == ("embeddings", 2, "tiny")
    assert (found["include"], found["format"]) == (["mean"], "pt")
    assert "proteins" in esm("info", folder).out
    (folder / "settings.json").write_text("[1, 2]")
    result = esm("info", folder)
    assert result.code == 2
    assert "damaged" in result.error


@pytest.mark.parametrize("damage", [truncated, altered, other_version])
def test_info_of_a_damaged_cache(esm, tmp_path, tiny, damage):
    path = tmp_path / "cache.safetensors"
    tiny.prefill("MKTAYIAKQR" * 5).save(path)
    damage(path)
    result = esm("info", path)
    assert result.code == 2
    assert str(path) in result.error


def test_info_of_the_environment(esm):
    result = esm("info", "--json", "-")
    found = json.loads(result.out)
    assert found["environment"]["torch"] == torch.__version__
    assert found["model"] == "esm2-mini"
    assert "transformers" in esm("info").out


def test_environment_as_a_module():
    result = subprocess.run([sys.executable, "-m", "esm_turbo.env"], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"torch            {torch.__version__}" in result.stdout


def test_demo(esm, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CALIBRATION_PROTEINS", 4)
    monkeypatch.setattr(demo, "EVALUATION_PROTEINS", 1)
    monkeypatch.setattr(demo, "PRODUCT_PRESETS", {name: PRESETS[name] for name in ("exact", "paper")})
    monkeypatch.chdir(tmp_path)
    result = esm("demo", "--json", "demo.json")
    assert (result.code, result.err) == (0, "")
    assert "Figures of the embedded small model, not of Meta's ESM-2" in result.out
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["calibration"]["proteins"] == 4
    assert found["example"]["new"] == 8
    assert found["example"]["cosine"] > 0.9
    presets = [preset["name"] for preset in found["evaluation"]["presets"]]
    assert presets == ["exact", "paper"]
    assert all(name in result.out for name in presets)
    # The demo leaves nothing behind.
    assert os.listdir(tmp_path) == ["demo.json"]


def test_the_embedded_model_is_not_touched():
    assert sorted(p.name for p in EMBEDDED_MODEL.iterdir() if not p.name.startswith(".")) == [
        "README.md", "calibration.safetensors", "config.json", "model.safetensors", "tokenizer_config.json",
        "vocab.txt",
    ]  # fmt: skip


# ---------------------------------------------------------------- what is read is not written


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
    assert "is an input of this command" in result.error or "is named for two outputs" in result.error
    assert path.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "link"}


def test_what_holds_nothing_may_be_several_outputs(esm, fasta, tmp_path, tiny_folder):
    options = ["--max-new-tokens", "1", "--model", tiny_folder, "--preset", "exact"]
    assert esm("generate", fasta, *options, "--out", os.devnull, "--json", os.devnull).code == 0


def test_a_store_of_contexts_takes_no_embeddings(esm, fasta, tmp_path, tiny_folder):
    contexts = tmp_path / "contexts"
    assert esm("store", fasta, contexts, "--model", tiny_folder, "--preset", "exact").code == 0
    before = sorted(contexts.rglob("*"))
    result = esm("embed", fasta, contexts, "--model", tiny_folder)
    assert result.code == 2 and "is a context store; give a new or an empty folder" in result.error
    assert sorted(contexts.rglob("*")) == before


def test_a_store_below_a_file(esm, fasta, tmp_path, tiny_folder):
    path = fasta
    result = esm("store", path, path / "contexts", "--model", tiny_folder)
    assert (result.code, result.out) == (2, "")
    assert f"{path}: is a file; a store is a folder" in result.error


def test_a_measured_column_needs_a_file(esm, fasta):
    result = esm("variants", fasta, "--measured", "fitness")
    assert result.code == 2
    assert "--measured fitness names a column; give the CSV file of variants that has it" in result.error


def test_unknown_letters_of_a_wild_type_may_become_x(esm, tmp_path, tiny_folder):
    path = tmp_path / "wild_type.fasta"
    path.write_text(">a\nMK1AYI\n")
    assert "--unknown X" in esm("variants", path).err
    result = esm("variants", path, "--unknown", "X", "--arm", "full", "--model", tiny_folder, "--json", "-")
    assert result.code == 0 and json.loads(result.out)
