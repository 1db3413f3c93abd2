"""`esm-turbo generate`, and `esm-turbo embed --window`: output, and errors for invalid input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers.utils.logging as transformers_logging

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.cli import app as cli
from esm_turbo.tasks.embedding.files import read_embedding, sequence_hash
from tests.helpers.models import make_esm

RECORDS = {"a": "MKTAYIAKQRQISFVKSHFSRQ", "b": "MKT", "c": "GSGSWKDLAEXPLLKRRVWTCACDEF"}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        [line] = self.err.splitlines()
        assert line.startswith("esm-turbo: error: ")
        return line.removeprefix("esm-turbo: error: ")


@pytest.fixture
def esm(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> Callable[..., Result]:
    """Runs a command in this process, on a small model of random weights."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    def run(*arguments: object) -> Result:
        options = ["--model", tiny_folder, "--preset", "exact"] if len(arguments) > 1 else []
        code = cli.run([str(argument) for argument in (*arguments, *options)])
        return Result(code, *capsys.readouterr())

    yield run
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def tiny_folder(turbo: TurboEsm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    TurboEsm(TurboEsmForMaskedLM.from_esm(make_esm(), preset="exact"), turbo.tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> TurboEsm:
    return TurboEsm.from_pretrained(tiny_folder, preset="exact", device="cpu")


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "in.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in RECORDS.items()))
    return path


def read(text: str) -> dict[str, tuple[dict[str, str], str]]:
    """Entries by identifier: what their headers say, and their sequences."""
    entries = {}
    for entry in text.strip().removeprefix(">").split("\n>"):
        header, sequence = entry.split("\n")
        name, *facts = header.split()
        entries[name] = dict(fact.split("=") for fact in facts), sequence
    return entries


def test_append(esm: Callable[..., Result], fasta: Path, tiny: TurboEsm) -> None:
    result = esm("generate", fasta, "--max-new-tokens", 4, "--num-return-sequences", 2, "--seed", 3)
    assert (result.code, result.err) == (0, "")
    entries = read(result.out)
    assert list(entries) == ["a_1", "a_2", "b_1", "b_2", "c_1", "c_2"]
    for name, (facts, sequence) in entries.items():
        given = RECORDS[name[0]]
        assert sequence.startswith(given)
        assert facts["positions"] == f"{len(given) + 1}-{len(given) + 4}"
        # The header's seed makes the same again.
        again = tiny.generate(given, max_new_tokens=4, seed=[int(facts["seed"])])
        assert again.sequences == [sequence]
        assert float(facts["mean_log_prob"]) == pytest.approx(sum(again.log_probs[0]) / 4, abs=2e-4)
    assert esm("generate", fasta, "--max-new-tokens", 4, "--num-return-sequences", 2, "--seed", 3).out == result.out
    assert esm("generate", fasta, "--max-new-tokens", 4, "--num-return-sequences", 2, "--seed", 4).out != result.out


def test_replace_and_constrain(esm: Callable[..., Result], fasta: Path) -> None:
    result = esm(
        "generate", fasta, "--positions", "1-2,3", "--allowed", "1=M", "2-3=AG", "--banned", "A", "--sweeps", 2,
        "--order", "confidence", "--json", "-",
    )  # fmt: skip
    assert result.code == 0
    found = json.loads(result.out)
    assert found["failed"] == []
    assert [one["record"] for one in found["sequences"]] == ["a", "b", "c"]
    for one in found["sequences"]:
        assert one["sequence"] == "MGG" + RECORDS[one["record"]][3:]
        assert one["positions"] == [1, 2, 3]
        assert len(one["log_probs"]) == 3


def test_out(esm: Callable[..., Result], fasta: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.fasta"
    result = esm("generate", fasta, "--max-new-tokens", 2, "--out", out)
    assert (result.code, result.out) == (0, f"3 sequences written to {out}\n")
    assert list(read(out.read_text())) == ["a_1", "b_1", "c_1"]
    assert [path.name for path in out.parent.iterdir()] == ["out.fasta"]


def test_bad_records_are_listed_and_the_others_done(esm: Callable[..., Result], fasta: Path) -> None:
    with fasta.open("a") as file:
        file.write(">d\nMK-T\n")
    # b has three residues, and so no fifth one.
    result = esm("generate", fasta, "--positions", "2,5", "--json", "-")
    assert result.code == 1
    found = json.loads(result.out)
    assert [one["record"] for one in found["sequences"]] == ["a", "c"]
    assert [one["record"] for one in found["failed"]] == ["d", "b"]
    lines = result.err.splitlines()
    assert "record 'd': position 3 is '-'" in lines[0]
    assert "record 'b': its positions are 1 to 3, got 5" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --max-new-tokens to append residues, or --positions to replace some"),
        (["--max-new-tokens", 2, "--positions", "1"], "give --max-new-tokens to append residues, or --positions"),
        (["--max-new-tokens", 0], "`max_new_tokens` must be an integer of at least 1, got 0"),
        (["--positions", "3-1"], "in ascending order, got '3-1'"),
        (["--positions", "0-2"], "counted from 1"),
        (["--positions", "x"], "positions are written as 10-25,40 and counted from 1, got 'x'"),
        (["--positions", "1", "--order", "best"], "best"),
        (["--max-new-tokens", 1, "--temperature", "-1"], "`temperature` must be from 1e-06 to 1000000, or 0"),
        (["--max-new-tokens", 1, "--allowed", "AJ"], "`allowed` holds 'J'"),
        (["--max-new-tokens", 1, "--allowed", "AC", "5=G"], "letters for all positions, or given as 10=AG 12-15=HP"),
        (["--max-new-tokens", 1, "--banned", "LAGVSERTIDPKQNFYMHWC"], "no residue may be generated at any position"),
        (["--max-new-tokens", 1, "--toks-per-batch", 0], "`toks_per_batch` must be at least 1"),
        (["--max-new-tokens", 1, "--seed", -1], "`seed` must be an integer of at least 0"),
    ],
)
def test_wrong_arguments(
    esm: Callable[..., Result], fasta: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    result = esm("generate", fasta, "--out", tmp_path / "out.fasta", *arguments)
    assert result.code == 2
    assert message in result.error
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]


def test_nothing_usable(esm: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "bad.fasta"
    path.write_text(">a\nMK-T\n")
    result = esm("generate", path, "--max-new-tokens", 2)
    assert (result.code, result.out) == (2, "")
    assert "no usable record" in result.err
    path.write_text(">a\nMKT\n")
    result = esm("generate", path, "--positions", "9", "--out", tmp_path / "out.fasta")
    assert (result.code, result.out) == (2, "")
    assert "nothing could be generated from any record" in result.err
    assert not (tmp_path / "out.fasta").exists()
    assert "no such file" in esm("generate", tmp_path / "absent", "--max-new-tokens", 2).err.lower()


def test_embed_in_windows(esm: Callable[..., Result], tmp_path: Path, tiny: TurboEsm) -> None:
    fasta, out = tmp_path / "in.fasta", tmp_path / "out"
    sequences = {"long": "MKTAYIAKQRQISFVKSHFSRQ" * 5, "short": "MKTAYIAK"}
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    options = ["--window", 40, "--overlap", 8, "--memory", 20, "--format", "safetensors"]
    assert esm("embed", fasta, out, *options).code == 0
    expected = tiny.embed(list(sequences.values()), window=40, overlap=8, memory=20)
    for sequence, embedding in zip(sequences.values(), expected, strict=True):
        _, tensors = read_embedding(out / f"{sequence_hash(sequence)}.safetensors")
        torch.testing.assert_close(tensors, embedding.tensors(), rtol=1e-4, atol=1e-5)
    # It goes on with the same windows only.
    assert "2 of 2 proteins embedded" in esm("embed", fasta, out, *options).out
    assert "holds embeddings made with" in esm("embed", fasta, out, *options[2:], "--window", 41).error
    assert "`overlap` must be smaller" in esm("embed", fasta, out, "--window", 4, "--overlap", 4).error
    assert "no contacts" in esm("embed", fasta, tmp_path / "x", "--include", "contacts", "--window", 4).error
