"""The application: arguments, exit codes, and errors in one line."""

import runpy
import sys
from pathlib import Path

import pytest

import esm_turbo
from esm_turbo import Calibration, TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.cli.app import as_options

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
def test_wrong_arguments_are_refused_in_one_line(esm, arguments, message):
    result = esm(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.error


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
