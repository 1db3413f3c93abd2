"""Run commands in this process, on small models of random weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers.utils.logging as transformers_logging
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.cli import app
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records
from tests.helpers.command_inputs import GOOD

# What a command says of its progress when a slow machine takes more than some seconds.
PROGRESS = re.compile(r"esm-turbo: (?!warning:|error:)[^:]+: [\d,]+ of [\d,]+ \w+(,|$)", re.MULTILINE)
SAID = ("esm-turbo: model ", "esm-turbo: esm2-mini is a small demonstration model")


class Output(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Result(Output):
    """The output of a command, without its progress; what it says of its run and the embedded model stands apart."""

    said: list[str]

    @property
    def error(self) -> str:
        """The single line on standard error, without its prefix."""
        [line] = self.err.splitlines()
        assert line.startswith("esm-turbo: error: ")
        return line.removeprefix("esm-turbo: error: ")


@pytest.fixture(autouse=True)
def restored_verbosity() -> Iterator[None]:
    """Commands silence transformers for their process, but other tests check its warnings."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    yield
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.fixture
def esm(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`esm("embed", fasta, out)` runs a command."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = app.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines(keepends=True) if not PROGRESS.match(line)]
        said = [line for line in lines if line.startswith(SAID)]
        err = "".join(line for line in lines if line not in said)
        result = Result(code, captured.out, err)
        result.said = [line.strip().removeprefix("esm-turbo: ") for line in said]
        return result

    return run


@pytest.fixture
def esm_shared(esm: Callable[..., Result], turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """As `esm`, with the embedded model that all tests share in place of any other."""
    monkeypatch.setattr(TurboEsm, "from_pretrained", lambda *arguments, **options: turbo)
    # Commands set what is asked for on the model.
    monkeypatch.setattr(turbo.model.base_model, "preset_chosen", False)
    return esm


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """`write("x.csv", text)` writes a file."""

    def to(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return to


@pytest.fixture
def fasta(write: Callable[[str, str], Path]) -> Path:
    return write("good.fasta", GOOD)


def tiny_turbo(turbo: TurboEsm, tiny_esm: Callable[..., EsmForMaskedLM], **config: int) -> TurboEsm:
    return TurboEsm(TurboEsmForMaskedLM.from_esm(tiny_esm(**config), preset="exact"), turbo.tokenizer)


@pytest.fixture(scope="session")
def tiny_folder(
    turbo: TurboEsm, tiny_esm: Callable[..., EsmForMaskedLM], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small checkpoint of random weights, without a calibration."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_turbo(turbo, tiny_esm).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_calibration(
    turbo: TurboEsm, tiny_esm: Callable[..., EsmForMaskedLM], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`tiny_calibration(seed=0, layers=2)`: the calibration of a small model; with seed 0, that of `tiny_folder`."""
    folder = tmp_path_factory.mktemp("calibrations")
    records = [ProteinRecord("a", "MKTAYIAKQRQISFVKSHFS" * 5)]

    def make(**config: int) -> Path:
        path = folder / f"{sorted(config.items())}.safetensors"
        if not path.exists():
            calibrate_records(tiny_turbo(turbo, tiny_esm, **config), records, presets=["exact"]).save(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> TurboEsm:
    return TurboEsm.from_pretrained(tiny_folder, preset="exact")
