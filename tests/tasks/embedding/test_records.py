"""Embedding records: runs that are killed and resumed, full disks, concurrent writers, and records that fail."""

import copy
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from esm_turbo.cli import app as cli
from esm_turbo.files import artifacts
from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.files.writing import LOCK_FILE, FolderBusyError
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common import forwards
from esm_turbo.tasks.common.pieces import InProcessRunner
from esm_turbo.tasks.embedding import batches as embedding
from esm_turbo.tasks.embedding.files import sequence_hash
from esm_turbo.tasks.embedding.records import UnfinishedError, embed_records, embedding_writer
from esm_turbo.tasks.embedding.request import EmbeddingRequest, ProteinEmbedding
from tests.helpers.embedding_files import (
    LENGTHS,
    TOKS_PER_BATCH,
    files,
    full_disk,
    h5_content,
    ids_of,
    index_rows,
    proteins,
)
from tests.helpers.killed_runs import killed_runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_format", "include", "writes"),
    [
        # Settings, nine files (and nine caches), the index after each of four batches, the sorted index.
        ("pt", ["mean", "per_tok"], 1 + 9 + 4 + 1),
        ("safetensors", ["per_tok", "contacts", "cache"], 1 + 9 + 9 + 4 + 1),
        # The same for the parts, and the file itself.
        ("h5", ["mean", "bos"], 1 + 9 + 4 + 1 + 1),
    ],
)
def test_a_run_killed_at_any_write_is_resumed(run, tiny_folder, tmp_path, computed, file_format, include, writes):
    whole = tmp_path / "whole"
    assert run(whole, None, file_format, include, (0, 2)).reused == 0
    batches = list(computed)
    assert len(batches) == 4
    whens = ("before", "half", "after")
    # Every write is interrupted at one of three points; the last two, of indices and the HDF5 file, at all of them.
    ends = [(number, whens[number % 3]) for number in range(1, writes - 1)]
    ends += [(number, when) for number in (writes - 1, writes) for when in whens]
    jobs = [
        {
            "job": "embed", "out": str(tmp_path / f"{number}-{when}"), "kill_at": number, "when": when,
            "records": [(record.id, record.sequence) for record in proteins()],
            "format": file_format, "include": include, "layers": [0, 2], "toks_per_batch": TOKS_PER_BATCH,
        }
        for number, when in ends
    ]  # fmt: skip
    # There are no more writes than these: a run to be killed at the next one ends by itself.
    last = jobs[-1] | {"kill_at": writes + 1, "out": str(tmp_path / "last")}
    codes = killed_runs(tiny_folder, [*jobs, last], tmp_path)
    assert codes == [-signal.SIGKILL] * len(jobs) + [0]
    resumed = 0
    for job in jobs:
        out = Path(job["out"])
        computed.clear()
        result = run(out, None, file_format, include, (0, 2))
        # The missing batches, each as in the first run.
        assert computed == batches[len(batches) - len(computed) :]
        assert result.reused == 10 - sum(len(batch) for batch in computed) - any(
            proteins()[-1].sequence in batch for batch in computed
        )
        assert result.failed == []
        resumed += result.reused
        if file_format == "h5":
            assert h5_content(out) == h5_content(whole)
            assert not list(tmp_path.glob(f".{out.name}.*"))
        else:
            assert files(out) == files(whole)
    assert resumed > 0


@pytest.mark.parametrize("file_format", ["pt", "safetensors", "h5", "parquet"])
def test_a_second_run_computes_and_changes_nothing(run, tmp_path, computed, file_format):
    options = {"file_format": file_format, "include": ["mean"]}
    run(tmp_path / "out", **options)
    before, when = files(tmp_path), {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    computed.clear()
    assert run(tmp_path / "out", **options).reused == 10
    assert computed == []
    assert files(tmp_path) == before
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == when


def test_only_new_sequences_are_computed(run, tmp_path, computed):
    out = tmp_path / "out"
    run(out, proteins())
    computed.clear()
    renamed = ProteinRecord("another name", proteins()[0].sequence)
    fresh = ProteinRecord("fresh", "MKTAYIAK")
    moved = ProteinRecord("protein/1", "GSGSWKDLAE")
    result = run(out, [*proteins()[3:], renamed, fresh, moved])
    assert sorted(sequence for batch in computed for sequence in batch) == ["GSGSWKDLAE", "MKTAYIAK"]
    assert result.reused == 8
    names = {row[0]: row[2] for row in index_rows(out)}
    assert set(names) == {f"protein/{i}" for i in range(9)} | {"twin", "another name", "fresh"}
    assert names["protein/1"] == f"{sequence_hash('GSGSWKDLAE')}.pt"
    assert names["another name"] == names["protein/0"]


def test_only_the_missing_part_of_a_batch_is_computed(run, tmp_path, computed):
    out = tmp_path / "out"
    run(out)
    expected = {path.name: torch.load(path, weights_only=True) for path in out.glob("*.pt")}
    for index in (0, 8):
        (out / f"{sequence_hash(proteins()[index].sequence)}.pt").unlink()
    computed.clear()
    assert run(out).damaged == []
    assert computed == [[proteins()[8].sequence], [proteins()[0].sequence]]
    assert {path.name for path in out.glob("*.pt")} == expected.keys()
    for name, old in expected.items():
        new = torch.load(out / name, weights_only=True)
        # Another batch changes the order of float32 sums.
        torch.testing.assert_close(new["representations"][2], old["representations"][2], rtol=1e-5, atol=1e-5)


def test_records_and_layers_may_be_iterators(turbo, tmp_path):
    request = EmbeddingRequest.of(turbo, iter([1, -1]), iter(["mean"]))
    assert len(request.layers) == 2
    assert embed_records(turbo, iter(proteins()[:3]), tmp_path / "out", request).written == 3


def test_records_that_cannot_be_written(run, tmp_path):
    for records, message in (
        *(([("a" + wrong, "MKT")], "has a tab or a line break") for wrong in ("\tb", "\nb", "\rb")),
        ([("a", "MKT"), ("a", "MKTA")], "identifier 'a' names two sequences"),
        *(([("a", "MKT"), ("b", wrong)], "'b': give one letter per residue") for wrong in ("M<mask>T", "M KT", "MKT*")),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "out", [ProteinRecord(*record) for record in records])
    assert not (tmp_path / "out").exists()


def test_identifiers_may_hold_any_other_character(run, tmp_path, computed):
    records = [ProteinRecord("a\ufffdb \u2028 \x85", "MKT"), ProteinRecord("../x", "MKTA")]
    run(tmp_path / "out", records)
    computed.clear()
    result = run(tmp_path / "out", records)
    assert (result.reused, result.damaged, computed) == (2, [], [])


# Writes of six more proteins: their files, then the sorted index (for HDF5, the settings first, and after the files the
# three of the proteins that were there, and the file itself).
@pytest.mark.parametrize(
    ("file_format", "after"),
    [
        ("pt", 0),
        ("pt", 3),
        ("pt", 6),
        ("safetensors", 0),
        ("safetensors", 5),
        ("h5", 0),
        ("h5", 1),
        ("h5", 7),
        ("h5", 9),
        ("h5", 10),
    ],
)
def test_a_full_disk_does_no_harm(run, tmp_path, monkeypatch, file_format, after):
    out, whole = tmp_path / "out", tmp_path / "whole"
    for records in [proteins()] if file_format == "h5" else [proteins()[:3], proteins()]:
        run(whole, file_format=file_format, records=records)
    if file_format != "h5":
        run(out, file_format=file_format, records=proteins()[:3])
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        with pytest.raises(UnfinishedError, match=r"No space left on device.*free some space") as caught:
            run(out, file_format=file_format)
    assert "\n" not in str(caught.value)
    after_it = files(tmp_path)
    changed = {name for name in before if after_it.get(name) != before[name]}
    # Only the index has more rows, and no temporary files are left.
    assert changed <= {f"out/{INDEX_FILE}"}
    assert not [name for name in after_it if name.endswith(".tmp")]
    assert not list(tmp_path.rglob(LOCK_FILE))
    run(out, file_format=file_format)
    if file_format == "h5":
        assert h5_content(out) == h5_content(whole)
    else:
        assert files(out) == files(whole)


def test_the_command_reports_a_full_disk_in_one_line(tiny_folder, tmp_path, monkeypatch, capsys):
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">{record.id}\n{record.sequence}\n" for record in proteins()))

    def no_room(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(artifacts, "save_file", no_room)
    command = ["embed", fasta, tmp_path / "out", "--model", tiny_folder, "--include", "mean", "--format", "safetensors"]
    assert cli.run([str(part) for part in command]) == 1
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith("esm-turbo: error: ")
    assert "No space left on device" in line and "0 of 10 proteins are done" in line
    assert sorted(files(tmp_path / "out")) == [SETTINGS_FILE]


@pytest.mark.parametrize("file_format", ["pt", "h5"])
def test_two_writers_are_refused(run, tiny, tmp_path, file_format):
    out = tmp_path / "out"
    settings = {"include": ["mean"]}
    with (
        embedding_writer(out, proteins(), file_format, settings, tiny),
        pytest.raises(FolderBusyError, match=f"^{out}: another process is writing"),
    ):
        run(out, file_format=file_format)
    # Neither leaves anything behind.
    assert list(tmp_path.iterdir()) == []
    assert run(out, file_format=file_format).reused == 0


@pytest.mark.parametrize("file_format", ["pt", "safetensors", "h5"])
def test_other_settings_are_refused(run, tiny, turbo, tmp_path, file_format):
    out = tmp_path / "out"
    run(out, proteins(), file_format)
    before = files(tmp_path)
    for change in ({"include": ["mean"]}, {"layers": [0]}, {"truncation_seq_length": 7}):
        with pytest.raises(ValueError, match=r"holds embeddings made with .*give another path"):
            run(out, proteins(), **({"file_format": file_format} | change))
    request = EmbeddingRequest.of(turbo, (-1,), ("mean", "per_tok"))
    with pytest.raises(ValueError, match="made with model tiny, not esm2-mini"):
        embed_records(turbo, proteins(), out, request, file_format=file_format)
    assert files(tmp_path) == before


@pytest.mark.parametrize("length", [-5, 0, True, 5.0])
def test_what_is_no_length_is_refused(run, tmp_path, length):
    with pytest.raises(ValueError, match="`truncation_seq_length` must be an integer of at least 1, got "):
        run(tmp_path / "out", truncation_seq_length=length)
    assert not (tmp_path / "out").exists()


def test_a_protein_too_large_for_memory_is_a_failed_record(run, tiny, tmp_path, monkeypatch):
    original = embedding._hidden_states
    shapes = []

    def small_memory(turbo, input_ids, *rest):
        shapes.append(tuple(input_ids.shape))
        if input_ids.numel() > 36:
            raise torch.OutOfMemoryError("out of memory")
        return original(turbo, input_ids, *rest)

    monkeypatch.setattr(embedding, "_hidden_states", small_memory)
    out = tmp_path / "out"
    records = [*proteins(), ProteinRecord("giant", "A" * 50)]
    result = run(out, records, toks_per_batch=100)
    assert [(one.record, one.reason) for one in result.failed] == [
        (
            "giant",
            "its 50 residues need more memory than cpu has; cut it, request less, or use a device with more memory",
        )
    ]
    assert sorted(ids_of(out)) == sorted(record.id for record in proteins())
    # Halved until it fits, and no further.
    assert (2, 36) in shapes and (1, 36) in shapes
    with pytest.raises(MemoryError, match="sequence 11: its 50 residues"):
        tiny.embed([record.sequence for record in records])


def test_embeddings_that_are_not_finite_are_not_written(run, tmp_path, monkeypatch, computed):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ProteinEmbedding, "is_finite", lambda self: len(self.representations[2]) != 18)
        result = run(out)
        reason = "its embedding is not finite; try --dtype float32"
        assert [(one.record, one.reason) for one in result.failed] == [("protein/4", reason), ("twin", reason)]
        assert (result.written, result.reused) == (8, 0)
    assert set(ids_of(out)) == {f"protein/{i}" for i in range(9) if i != 4}
    computed.clear()
    result = run(out)
    assert (result.written, result.reused, result.failed) == (10, 8, [])
    assert computed == [[proteins()[4].sequence]]


def test_batches_follow_from_the_kind_of_device(run, tiny, tmp_path, monkeypatch, computed):
    run(tmp_path / "explicit")
    expected = list(computed)
    assert len(expected) == 4
    monkeypatch.setattr(forwards, "DEFAULT_TOKS_PER_BATCH", TOKS_PER_BATCH)
    one = [sorted((sequence for batch in expected for sequence in batch), key=len)]
    for devices, wanted in ((None, expected), ("cpu", expected), ("cuda:0 cuda:1", one)):
        computed.clear()
        runner = InProcessRunner(tiny)
        runner.devices = devices
        run(tmp_path / f"out {devices}", toks_per_batch=None, runner=runner)
        assert computed == wanted
    computed.clear()
    tiny.embed([record.sequence for record in proteins()], include=["mean"])
    assert len(computed) == 4


def test_progress(run, tmp_path):
    calls = []
    run(tmp_path / "out", progress=lambda *call: calls.append(call))
    total = sum(LENGTHS)
    assert calls[0] == ("embed", 0, total)
    assert calls[-1] == ("embed", total, total)
    assert [stage for stage, _, _ in calls].count("embed") == 5
    (tmp_path / "out" / f"{sequence_hash(proteins()[8].sequence)}.pt").unlink()
    calls.clear()
    run(tmp_path / "out", progress=lambda *call: calls.append(call))
    assert ("check", 9, 9) in calls
    # Existing embeddings do not count towards the rate.
    assert calls[-1] == ("embed", LENGTHS[8], LENGTHS[8])


@torch.no_grad()
def test_embeddings_of_other_weights_are_not_resumed(turbo, tmp_path):
    """Whatever part of a matrix differs."""
    request = EmbeddingRequest.of(turbo, [-1], ["mean"])
    embed_records(turbo, proteins()[:1], tmp_path / "out", request)
    other = copy.deepcopy(turbo)
    other.model.esm.encoder.layer[3].attention.self.value.weight[128:] = 0
    with pytest.raises(ValueError, match="holds embeddings made with weights"):
        embed_records(other, proteins()[:1], tmp_path / "out", request)


@torch.no_grad()
def test_a_model_that_changes_during_a_run_keeps_nothing_of_what_follows(turbo, tmp_path):
    other = copy.deepcopy(turbo)
    weight = other.model.esm.encoder.layer[3].output.dense.weight
    request = EmbeddingRequest.of(other, [-1], ["mean"])

    def progress(stage, done, total):
        if done:
            weight.data.view(-1)[7] += 1

    with pytest.raises(UnfinishedError, match="the model has changed since the run began"):
        embed_records(other, proteins()[:3], tmp_path, request, toks_per_batch=1, progress=progress)
    assert len(index_rows(tmp_path)) == len(list(tmp_path.glob("*.pt"))) == 1
