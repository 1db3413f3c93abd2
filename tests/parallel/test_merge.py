"""Shards joined are what one run writes; what does not belong together is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esm_turbo import TurboEsm
from esm_turbo.cli import app
from esm_turbo.files.csv_files import read_csv
from esm_turbo.parallel.merge import merge
from esm_turbo.parallel.shards import (
    Manifest,
    ShardError,
    shards_folder,
    shards_state,
)
from esm_turbo.tasks.common import forwards
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.scoring.pairs import ScoreTask, TargetPairs
from esm_turbo.tasks.scoring.score import TargetRows
from esm_turbo.tasks.variants.substitutions import all_substitutions
from tests.helpers.embedding_files import DAMAGE, files, h5_content, proteins

Run = Callable[..., int]


@pytest.fixture
def run(turbo: TurboEsm, tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("embed", "p.fasta", out)` runs a command on a small model, in the folder with the inputs."""
    tiny = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    monkeypatch.setattr(TurboEsm, "from_pretrained", lambda *arguments, **options: tiny)
    # Small enough for a target to be cut into several pieces.
    monkeypatch.setattr("esm_turbo.tasks.common.pieces.TOKENS_PER_PIECE", 2400)
    monkeypatch.chdir(tmp_path)
    records = proteins()
    rows = "".join(f">{one.id}\n{one.sequence}\n" for one in records)
    # Its files are named by its identifier, unlike those of the others.
    Path("p.fasta").write_text(f"{rows}>label\nMKTAYIAK\n")
    Path("t.fasta").write_text("".join(f">{one.id}\n{one.sequence}\n" for one in records[5:8]))
    # Of two equal candidates, the first in the file comes first.
    peptides = ["ACDEF", "WTC", "ACDEF", "GHIKLMN", "WTC", "PQRSTVW", "ACDEF", "MKT"]
    rows = "".join(f"c{number},{one},x{number}\n" for number, one in enumerate(peptides))
    Path("c.csv").write_text("id,sequence,note\n" + rows)
    # Few variants of the first protein, and those of one protein in several pieces.
    listed = [
        (one.id, name)
        for one, step in zip(records[5:8], (30, 3, 2), strict=True)
        for name in all_substitutions(one.sequence)[::-step]
    ]
    rows = "".join(f"{protein},{name},x{number}\n" for number, (protein, name) in enumerate(listed))
    Path("v.csv").write_text("protein,mutant,note\n" + rows)
    return lambda *arguments: app.run([str(one) for one in arguments])


EMBED = ["embed", "p.fasta", "--toks-per-batch", "75"]
COMMANDS = {
    "scores.csv": ["score", "t.fasta", "c.csv", "--arm", "frozen", "full", "--out", "scores.csv"],
    "scores.parquet": ["score", "t.fasta", "c.csv", "--arm", "frozen", "--out", "scores.parquet"],
    "listed.csv": ["variants", "t.fasta", "v.csv", "--arm", "frozen", "full", "--out", "listed.csv"],
    "variants.tsv": ["variants", "t.fasta", "--arm", "frozen", "--out", "variants.tsv"],
    "folder": ["embed", "p.fasta", "folder", "--toks-per-batch", "75"],
    "x.h5": ["embed", "p.fasta", "x.h5", "--toks-per-batch", "75"],
    "means.parquet": [*EMBED, "means.parquet", "--include", "mean", "--repr-layers", "0", "-1"],
    "store": ["store", "p.fasta", "store", "--toks-per-batch", "75"],
}


@pytest.mark.parametrize("out", ["folder", "store"])
def test_a_shard_says_what_it_wrote_and_where(run: Run, capsys: pytest.CaptureFixture[str], out: str) -> None:
    assert run(*COMMANDS[out], "--json", "whole.json") == 0
    capsys.readouterr()
    name = {"folder": "written", "store": "computed"}[out]
    whole = json.loads(Path("whole.json").read_text())[name]
    Path(out).rename("whole")
    counts = []
    for number in (1, 2, 3):
        assert run(*COMMANDS[out], "--shard", f"{number}/3", "--json", f"{number}.json") == 0
        counts.append(json.loads(Path(f"{number}.json").read_text())[name])
        printed, said = capsys.readouterr()
        assert f"shard {number}/3: " in said and f"pieces done, in {out}.shards/shard-0000{number}-of-00003" in said
        assert printed.startswith(f"{counts[-1]} ") and f"{out}.shards/shard-0000{number}-of-00003" in printed
    assert 0 < max(counts) < whole
    assert sum(counts) == whole


@pytest.mark.parametrize("out", COMMANDS)
def test_shards_joined_are_one_run(run: Run, out: str) -> None:
    command = COMMANDS[out]
    assert run(*command) == 0
    Path(out).rename("whole")
    for number in (2, 3, 1):
        assert run(*command, "--shard", f"{number}/3") == 0
        assert run("status", out) == (0 if number == 1 else 1)
        assert not Path(out).exists()
    # A shard that is done is not done again.
    before = {path: path.stat().st_mtime_ns for path in shards_folder(out).rglob("*") if path.is_file()}
    assert run(*command, "--shard", "2/3") == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    for _ in range(2):
        assert run("merge", out) == 0
        check_equal(out, "whole")


def check_equal(out: str, whole: str) -> None:
    """Check that an output has the content of another."""
    if out == "x.h5":
        assert h5_content(Path(out)) == h5_content(Path(whole))
    elif Path(out).is_dir():
        assert {**files(Path(out)), "usage.jsonl": ""} == {**files(Path(whole)), "usage.jsonl": ""}
    else:
        assert Path(out).read_bytes() == Path(whole).read_bytes()


@pytest.mark.parametrize("out", ["scores.csv", "listed.csv", "folder", "store"])
def test_a_bad_record_costs_no_record_of_its_identifier(run: Run, out: str) -> None:
    name = proteins()[5].id
    for path in ("t.fasta", "p.fasta"):
        Path(path).write_text(Path(path).read_text() + f">{name}\nMKT\n")
    Path("c.fasta").write_text(f">one\nACDEF\n>{name}\nAC1\n>two\nWTC\n")
    command = [one.replace("c.csv", "c.fasta") for one in COMMANDS[out]]
    assert run(*command) == 1
    Path(out).rename("whole")
    for number in (1, 2):
        assert run(*command, "--shard", f"{number}/2") == 0
    assert run("merge", out) == 1
    check_equal(out, "whole")


def test_what_does_not_belong_together_is_refused_by_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS["scores.csv"]
    with pytest.raises(ShardError, match=r"scores\.csv\.shards: no such folder of shards"):
        shards_state("scores.csv")
    assert run(*command, "--shard", "1/3") == run(*command, "--shard", "2/3") == 0
    with pytest.raises(ShardError, match="cannot be merged: shard 3/3 is missing"):
        merge("scores.csv", shards_state("scores.csv"))
    # The same shard with other options.
    assert run(*command, "--shard", "2/3", "--refresh", "1") == 2
    assert "shard 2/3 was made with refresh 8, not 1" in capsys.readouterr().err
    folder = shards_folder("scores.csv")
    good = folder.rename("good")

    def problems(*shards: tuple[str, ...]) -> list[str]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        for options in shards:
            (folder / f"_shard-0000{options[1][0]}-of-00003.json").unlink(missing_ok=True)
            assert run(*command, *options) == 0
        found = shards_state("scores.csv").problems
        with pytest.raises(ShardError, match="cannot be merged"):
            merge("scores.csv", shards_state("scores.csv"))
        return found

    assert problems(("--shard", "3/3", "--refresh", "1")) == ["shard 3/3 is of refresh 1, not 8 as shard 1/3"]
    assert problems(("--shard", "4/4")) == ["shard 4/4 is of one of 4 shards, not of 3 as shard 1/3"]
    Path("c.csv").write_text(Path("c.csv").read_text() + "c9,ACD,y\n")
    assert problems(("--shard", "3/3")) == ["shard 3/3 is of another content of c.csv as shard 1/3"]


def test_shards_of_another_background_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    some, every = ([*COMMANDS["scores.csv"], "--background", name] for name in ("decoys", "all-decoys"))
    assert run(*some, "--shard", "1/2") == 0
    assert run(*every, "--shard", "1/2") == 2
    assert "shard 1/2 was made with background decoys, not all-decoys" in capsys.readouterr().err
    assert run(*every, "--shard", "2/2") == 0
    assert shards_state("scores.csv").problems == ["shard 2/2 is of background all-decoys, not decoys as shard 1/2"]


def test_models_and_damage_are_named(run: Run) -> None:
    command = COMMANDS["folder"]
    for number in (1, 2):
        assert run(*command, "--shard", f"{number}/2") == 0
    folder = shards_folder("folder")
    path = folder / "_shard-00002-of-00002.json"
    other = Manifest.read(path)
    other.settings["weights"] = "f00"
    other.write(path)
    [problem] = shards_state("folder").problems
    assert problem.startswith("shard 2/2 is of another model: weights f00, not ")
    other.settings["weights"] = Manifest.read(folder / "_shard-00001-of-00002.json").settings["weights"]
    other.write(path)
    assert shards_state("folder").is_complete
    [first, *_] = (folder / "shard-00001-of-00002").glob("*.pt")
    for damage in DAMAGE.values():
        damage(first)
        assert shards_state("folder").problems == [f"shard 1/2: {first}: was altered"]
    first.unlink()
    assert shards_state("folder").problems == [f"shard 1/2: {first}: is missing"]
    # The shard is done again: what is damaged is computed.
    assert run(*command, "--shard", "1/2") == 0
    assert shards_state("folder").is_complete
    for damage in DAMAGE.values():
        kept = path.read_bytes()
        damage(path)
        [problem] = shards_state("folder").problems
        assert "_shard-00002-of-00002.json: damaged" in problem
        path.write_bytes(kept)


def test_of_a_target_that_failed_in_part_nothing_is_merged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS["scores.csv"]
    names = [one.id for one in proteins()[5:8]]
    large, rows = proteins()[6].sequence, ScoreTask.rows

    def too_large(task: ScoreTask, turbo: TurboEsm, item: TargetPairs, arm: Arm) -> TargetRows:
        if item.sequence == large:
            raise ValueError("too large")
        return rows(task, turbo, item, arm)

    assert run(*command, "--shard", "1/2") == 0
    monkeypatch.setattr(ScoreTask, "rows", too_large)
    assert run(*command, "--shard", "2/2") == 0
    state = shards_state("scores.csv")
    assert [one.record for one in state.failed] == [names[1]]
    shards = [read_csv(path, ["target"]) for path in sorted(shards_folder("scores.csv").glob("shard-*.csv"))]
    assert [names[1] in {row["target"] for row in one} for one in shards] == [True, False]
    merge("scores.csv", state)
    found = [row["target"] for row in read_csv("scores.csv", ["target"])]
    assert list(dict.fromkeys(found)) == [names[0], names[2]]
    results = shards_folder("scores.csv") / "_shard-00001-of-00002.results.json"
    results.write_text(results.read_text().replace(names[0], "other"))
    assert shards_state("scores.csv").problems == [f"shard 1/2: {results}: was altered"]


@pytest.mark.parametrize("command", ["embed", "store"])
def test_shards_of_devices_with_other_batches_are_refused_by_name(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    assert run(command, "p.fasta", "out", "--shard", "1/2") == 0
    assert Manifest.read(shards_folder("out") / "_shard-00001-of-00002.json").settings["toks_per_batch"] == 4096
    # As on CUDA, which has another default.
    monkeypatch.setattr(forwards, "DEFAULT_TOKS_PER_BATCH", 64)
    assert run(command, "p.fasta", "out", "--shard", "2/2") == 0
    assert shards_state("out").problems == ["shard 2/2 is of toks_per_batch 64, not 4096 as shard 1/2"]
    (shards_folder("out") / "_shard-00002-of-00002.json").unlink()
    assert run(command, "p.fasta", "out", "--shard", "2/2", "--toks-per-batch", "4096") == 0
    assert shards_state("out").is_complete


def test_failed_records_are_reported_by_merge(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.fasta").write_text(Path("p.fasta").read_text() + ">bad\nMK1\n")
    for number in (1, 2):
        assert run(*COMMANDS["folder"], "--shard", f"{number}/2") == 0
    assert run("status", "folder", "--json", "status.json") == 1
    state = json.loads(Path("status.json").read_text())
    assert (state["done"], state["missing"], state["problems"]) == ([1, 2], [], [])
    assert [one["record"] for one in state["failed"]] == ["bad"]
    capsys.readouterr()
    assert run("merge", "folder") == 1
    assert "record 'bad'" in capsys.readouterr().err
    assert (Path("folder") / "index.tsv").exists()


def test_a_shard_that_was_stopped_and_run_on_other_proteins_can_be_joined(run: Run) -> None:
    shard = [*COMMANDS["folder"], "--shard", "1/1"]
    assert run(*shard) == 0
    # Stopped before it said what it holds.
    for path in shards_folder("folder").glob("*.json"):
        path.unlink()
    Path("p.fasta").write_text(Path("p.fasta").read_text().replace(">label\n", ">other\n"))
    assert run(*shard) == 0 and run("merge", "folder") == 0
    joined = Path("folder/index.tsv").read_text()
    Path("folder").rename("joined")
    assert run(*COMMANDS["folder"]) == 0
    assert joined == Path("folder/index.tsv").read_text() and "other.pt" in joined


def test_a_folder_that_is_no_store_stays_as_it_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*COMMANDS["store"], "--shard", "1/1") == 0
    Path("store").mkdir()
    Path("store/notes").touch()
    assert run("merge", "store") == 2
    assert "store: not a context store, but holds notes" in capsys.readouterr().err
    assert [path.name for path in Path("store").iterdir()] == ["notes"]


def test_more_shards_than_pieces(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.fasta").write_text(">one\nMKTAYIAKQRQISF\n")
    Path("c.csv").write_text("id,sequence\na,ACD\n")
    for number in (1, 2):
        assert run(*COMMANDS["scores.csv"], "--shard", f"{number}/2") == 0
    said = capsys.readouterr().err
    assert ": nothing to do, all shards share 1 piece\n" in said and " 0 of " not in said
    assert run("merge", "scores.csv") == 0
    assert len(read_csv("scores.csv", ["candidate"])) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c.csv", "--shard", "3/2"], "a shard is written K/N with K from 1 to N, such as 3/16; got '3/2'"),
        (["none.csv", "--shard", "1/2"], "none.csv: there is no such file; check the path"),
        (["folder", "--shard", "1/2"], "folder: is no file; with --shard, each input must be one that all shards read"),
        (["-", "--shard", "1/2"], "/dev/stdin: is no file; with --shard, "),
    ],
)
def test_what_cannot_be_shared_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("folder").mkdir()
    before = set(Path().iterdir())
    assert run("score", "t.fasta", *arguments, "--out", "x.csv") == 2
    assert message in capsys.readouterr().err
    assert run("score", "t.fasta", "c.csv", "--shard", "1/2") == 2
    assert "--shard 1/2 writes a part of an output; name the output with --out" in capsys.readouterr().err
    assert set(Path().iterdir()) == before


def test_a_table_names_the_devices_of_all_shards(run: Run) -> None:
    for number in (1, 2):
        assert run(*COMMANDS["scores.csv"], "--shard", f"{number}/2") == 0
    state = shards_state("scores.csv")
    other = replace(state.manifests[2], run=state.manifests[2].run | {"device": "cuda:0"})
    state.manifests[2] = other
    merge("scores.csv", state)
    assert {row["run_device"] for row in read_csv("scores.csv", ["run_device"])} == {"cpu cuda:0"}
