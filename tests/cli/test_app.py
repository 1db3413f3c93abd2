"""The application: arguments, exit codes, and errors in one line."""

import io
import runpy
import sys
from pathlib import Path

import pytest

import esm_turbo
from esm_turbo import Calibration, TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.cli import app
from esm_turbo.cli.app import as_options
from tests.helpers.command_inputs import files

ROOT = Path(esm_turbo.__file__).resolve().parents[1]


def test_help_and_version(esm):
    result = esm("--help")
    assert result.code == 0
    assert not result.err
    commands = ("calibrate", "embed", "evaluate", "generate", "info", "score", "store", "variants", "warmup")
    assert all(command in result.out for command in commands)
    assert esm("--version").out.strip() == esm_turbo.__version__
    for option in ("--repr-layers", "--include", "--truncation-seq-length", "--format"):
        assert option in esm("embed", "--help").out


def test_what_an_encoding_lacks_ends_no_run(monkeypatch):
    """Results may have been written by then."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(app, "run", lambda arguments: print("a…") or 0)
    with pytest.raises(SystemExit) as ended:
        app.main([])
    out.flush()
    assert (ended.value.code, out.buffer.getvalue()) == (0, b"a\\u2026\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "there is no command 'frobnicate'; commands are calibrate, "),
        (["design", "a.fasta"], "'design'; did you mean binders or generate? Commands are calibrate, "),
        (["Rank"], "'Rank'; did you mean score?"),
        (["screen", "a", "b"], "did you mean score?"),
        (["mutate"], "did you mean variants?"),
        (["dms"], "did you mean variants?"),
        (["varaints"], "did you mean variants?"),
        (["binder", "a"], "did you mean binders?"),
        (["embedding"], "did you mean embed?"),
        (["frobnicate"], "see esm-turbo --help"),
        (["embed"], "missing argument PROTEINS; see esm-turbo embed --help"),
        (["embed", "a", "b", "c"], "unexpected 'c'; the model, esm-extract's first argument, is --model here; see"),
        (["score", "a", "b", "c"], "unexpected 'c'; results are written to --out; see esm-turbo score --help"),
        (["generate", "a", "--positions", "3", "5"], "unexpected '5'; results are written to --out, and --positions"),
        (["info", "a", "b", "c"], "unexpected 'b', 'c'; see esm-turbo info --help"),
        (["calibrate", "x.fasta"], "missing option --out; see esm-turbo calibrate --help"),
        (["embed", "x.fasta", "out", "--zzzzzz"], "Unknown option: --zzzzzz; see esm-turbo embed --help"),
        (["embed", "x.fasta", "out", "--include", "logits"], "logits"),
        (["embed", "x.fasta", "out", "--format", "csv"], "csv"),
        (["embed", "x.fasta", "out", "--toks_per_batch", "many"], "many"),
        (["embed", "x.fasta", "out", "--dtype", "int8"], "int8"),
        (["embed", "x.fasta", "out", "--truncation_seq_length", "0"], "must be at least 1, got 0"),
        (["evaluate", "x.fasta", "--preset", "all", "papper"], "got 'papper'"),
        (["evaluate", "x.fasta", "--max-proteins", "0"], "must be at least 1, got 0"),
        (["info", "--length", "0"], "must be at least 1, got 0"),
        (["info", "--json", "--length"], "--length"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(esm, arguments, message):
    result = esm(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.error


WRONG_OPTIONS = {
    ("score", "IN", "IN"): [
        (["--arm", "fast"], "--arm"),
        (["--arm"], "--arm must name at least one arm"),
        (["--place", "alone"], "--place"),
        (["--refresh", "-1"], "--refresh must be at least 0, got -1"),
        (["--top", "-1"], "--top must be at least 0, got -1"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--toks-per-batch", "0"], "--toks-per-batch must be at least 1, got 0"),
        (["--out", "."], "is a folder; name a file"),
        (["--background", "nothing"], "--background must be none, alone, targets, decoys, all-decoys or a FASTA"),
        (["--sort-by", "rank"], "--sort-by"),
        (["--rescore", "0"], "--rescore must be at least 1, got 0"),
        (["--rescore", "2", "--arm", "full"], "--arm full scores all"),
        (["--rescore", "2", "--shard", "1/2"], "a shard has only some"),
        (["--background", "none", "--sort-by", "specificity"], "no candidate has several targets"),
    ],
    ("binders", "IN"): [
        (["--length", "0"], "--length must be at least 1, got 0"),
        ([], "--length"),
        (["--length", "3", "--template", "GXP"], "not both"),
        (["--template", "G1P"], "templates are written as GX[KR]XXP"),
        (["--length", "3", "--background", "nothing.fasta"], "targets, decoys, all-decoys or a FASTA file"),
        (["--length", "3", "--sort-by", "specificity"], "needs a --background"),
        (["--length", "3", "--rescore", "0"], "--rescore must be at least 1, got 0"),
        (["--length", "3", "--rescore", "2", "--arm", "full"], "--rescore scores the best again by the arm 'full'"),
        (["--length", "3", "--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--length", "3", "--temperature", "-1"], "--temperature must be from"),
        (["--length", "3", "--allowed", "J"], "J"),
    ],
    ("generate", "IN"): [
        ([], "give --max-new-tokens to append residues, or --positions or --mask-letter"),
        (["--max-new-tokens", 2, "--positions", "1"], "give --max-new-tokens to append residues, or --positions"),
        (["--max-new-tokens", 0], "--max-new-tokens must be an integer of at least 1, got 0"),
        (["--positions", "x"], "positions are written as 10-25,40 and counted from 1, got 'x'"),
        (["--positions", "1", "--order", "best"], "best"),
        (["--max-new-tokens", 1, "--temperature", "-1"], "--temperature must be from 1e-06 to 1000000, or 0"),
        (["--max-new-tokens", 1, "--allowed", "AJ"], "--allowed holds 'J'"),
        (["--max-new-tokens", 1, "--allowed", "AC", "5=G"], "letters for all positions, or given as 10=AG 12-15=HP"),
        (["--max-new-tokens", 1, "--toks-per-batch", 0], "--toks-per-batch must be at least 1"),
        (["--max-new-tokens", 1, "--seed", -1], "--seed must be an integer of at least 0"),
        (["--positions", "2", "--store", "contexts"], "--store holds contexts to append to; in place, the protein is"),
    ],
    ("embed", "IN"): [
        (["e.h5", "--include", "cache"], "caches cannot be stored in an HDF5 file"),
        (["e.parquet", "--include", "per_tok"], "a Parquet file holds means: give --include mean, not per_tok"),
        (["e", "--include", "contacts"], "contacts would be noise: the contact head of this model was never trained"),
        (["e", "--store", "contexts"], "--store keeps compressed caches; give --include cache as well"),
        (["taken"], "is a file; name a folder to write"),
    ],
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [(command, *case) for command, cases in WRONG_OPTIONS.items() for case in cases],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_wrong_options_are_refused(esm_shared, write, tmp_path, monkeypatch, command, options, message):
    monkeypatch.chdir(tmp_path)
    write("IN", ">one\nMKTAYIAKQRQISFVK\n>two\nGSWKDLAE\n")
    write("taken", "mine")
    before = files(tmp_path)
    result = esm_shared(*command, *options, "--json", "out.json")
    assert (result.code, result.out) == (2, "") and message in result.error
    assert files(tmp_path) == before


def test_errors_name_options_as_on_the_command_line(esm, fasta, tmp_path, tiny_folder):
    result = esm("embed", fasta, tmp_path / "out", "--model", tiny_folder, "--repr-layers", "9")
    assert result.error == "--repr-layers must lie in -3 to 2 for this model, got 9"
    # Names that are no options of the command stay.
    message = "`repr_layers`, `turbo.prefill`, `top_k`"
    assert as_options(message, ["embed"]) == "--repr-layers, `turbo.prefill`, `top_k`"
    for arguments in ([], ["--help"], ["frobnicate"]):
        assert as_options(message, arguments) == message


def test_a_bad_file_is_rejected_before_the_model_is_loaded(esm, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr(TurboEsm, "from_pretrained", fail)
    assert esm("calibrate", tmp_path / "absent.fasta", "--out", tmp_path / "c").error.endswith("check the path")


def test_debug_adds_the_traceback_at_any_position(esm, tmp_path):
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


def test_the_calibration_script_runs_the_command(fasta, tmp_path, tiny_folder, monkeypatch, capsys):
    def script(*options):
        monkeypatch.setattr(sys, "argv", ["calibrate.py", str(fasta), *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "calibrate.py"), run_name="__main__")
        return ended.value.code

    assert script("--model", tiny_folder, "--out", tmp_path / "c") == 0
    assert Calibration.load(tmp_path / "c").provenance["sequences"] == 3
    assert script() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("esm-turbo: error: ")


def test_commands_leave_the_embedded_model_unchanged():
    assert sorted(p.name for p in EMBEDDED_MODEL.iterdir() if not p.name.startswith(".")) == [
        "README.md", "calibration.safetensors", "config.json", "model.safetensors", "tokenizer_config.json",
        "vocab.txt",
    ]  # fmt: skip
