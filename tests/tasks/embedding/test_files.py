"""Embeddings on disk: runs that are killed, disks that are full, files that are damaged, writers that meet."""

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open

from esm_turbo import TurboEsm
from esm_turbo.cli import app as cli
from esm_turbo.files import artifacts
from esm_turbo.files.writing import LOCK_FILE, FolderBusyError, only_writer
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding import embed as embedding
from esm_turbo.tasks.embedding import files as embedding_files
from esm_turbo.tasks.embedding.embed import EmbeddingRequest, ProteinEmbedding
from esm_turbo.tasks.embedding.files import INDEX_FILE, SETTINGS_FILE, read_embedding, sequence_hash
from esm_turbo.tasks.embedding.records import UnfinishedError, embed_records, embedding_writer

DRIVER = Path(__file__).parents[2] / "helpers" / "killed_runs.py"
# Two or three proteins a batch, some of equal length, two of the same sequence.
LENGTHS = (5, 12, 12, 17, 18, 19, 26, 33, 34)
TOKS_PER_BATCH = 75


def proteins(lengths=LENGTHS, seed=0):
    generator = random.Random(seed)
    records = [
        ProteinRecord(f"protein/{index}", "".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=length)))
        for index, length in enumerate(lengths)
    ]
    return [*records, ProteinRecord("twin", records[4].sequence)]


@pytest.fixture(scope="module")
def tiny_folder(turbo, tiny_model, tmp_path_factory):
    """A small checkpoint of random weights; its caches are exact ones."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    TurboEsm(tiny_model(), turbo.tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return TurboEsm.from_pretrained(tiny_folder, preset="exact", device="cpu")


@pytest.fixture
def run(tiny):
    """Embeds; `run(out, records, file_format="pt", include=("mean", "per_tok"))`."""

    def embed(out, records=None, file_format="pt", include=("mean", "per_tok"), layers=(-1,), **options):
        request = EmbeddingRequest.of(tiny, layers, include)
        options = {"toks_per_batch": TOKS_PER_BATCH} | options
        return embed_records(
            tiny, proteins() if records is None else records, out, request, file_format=file_format, **options
        )

    return embed


@pytest.fixture
def computed(monkeypatch):
    """The sequences that are computed, batch by batch."""
    batches = []
    original = embedding._embed_batch

    def noting(turbo, sequences, rows, batch, request):
        batches.append([sequences[index] for index in batch])
        return original(turbo, sequences, rows, batch, request)

    monkeypatch.setattr(embedding, "_embed_batch", noting)
    return batches


def content(path):
    """A digest of a file; of a safetensors file one of what it holds: the order in its header is random."""
    if path.suffix != ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    with safe_open(path, framework="numpy") as file:
        digest.update(json.dumps(file.metadata(), sort_keys=True).encode())
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()


def files(folder):
    """Digests of all files by name."""
    return {str(p.relative_to(folder)): content(p) for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def h5_content(path):
    """Everything of an HDF5 file: arrays as bytes and attributes, by name."""
    content = {}

    def visit(name, node):
        content[name] = (
            node[()].tobytes() if isinstance(node, h5py.Dataset) else None,
            {key: np.asarray(value).tolist() for key, value in node.attrs.items()},
        )

    with h5py.File(path) as file:
        content["settings"] = json.loads(file.attrs["settings"])
        file.visititems(visit)
    return content


def ids_of(folder):
    return [line.split("\t")[0] for line in (Path(folder) / INDEX_FILE).read_text().splitlines()[1:]]


# --- killed runs


def killed_runs(model, jobs, tmp_path):
    """Runs the driver, which kills a run at each job's write; returns the exit codes."""
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, DRIVER, model, path],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_format", "include", "writes"),
    [
        # Settings, nine files (and nine caches), four batches' rows in the index, its last order.
        ("pt", ["mean", "per_tok"], 1 + 9 + 4 + 1),
        ("safetensors", ["per_tok", "contacts", "cache"], 1 + 9 + 9 + 4 + 1),
        # The index of the parts stays as it is; the file itself.
        ("h5", ["mean", "bos"], 1 + 9 + 4 + 1),
    ],
)
def test_killed_at_every_write_and_resumed(run, tiny_folder, tmp_path, computed, file_format, include, writes):
    whole = tmp_path / "whole"
    assert run(whole, None, file_format, include, (0, 2)).reused == 0
    batches = list(computed)
    assert len(batches) == 4
    whens = ("before", "half", "after")
    # Every write is cut short at one of its ends, the last ones, of indices and of the HDF5 file, at all of them.
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
    # There are no more writes than these: one that shall be killed at the next ends by itself.
    last = jobs[-1] | {"kill_at": writes + 1, "out": str(tmp_path / "last")}
    codes = killed_runs(tiny_folder, [*jobs, last], tmp_path)
    assert codes == [-signal.SIGKILL] * len(jobs) + [0]
    resumed = 0
    for job in jobs:
        out = Path(job["out"])
        computed.clear()
        result = run(out, None, file_format, include, (0, 2))
        # Whole batches, each that is missing, as they were.
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


@pytest.mark.slow
def test_the_command_killed_from_outside_and_given_again(tiny_folder, tmp_path, capsys):
    fasta, out = tmp_path / "many.fasta", tmp_path / "out"
    records = proteins([40 + index % 50 for index in range(300)])
    fasta.write_text("".join(f">{record.id}\n{record.sequence}\n" for record in records))
    command = ["embed", str(fasta), str(out), "--model", str(tiny_folder), "--include", "mean", "per_tok"]
    command += ["--toks_per_batch", "128"]
    process = subprocess.Popen(
        [sys.executable, "-m", "esm_turbo.cli.app", *command],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 120
    while not ((out / INDEX_FILE).exists() and len(ids_of(out)) > 10):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    before = ids_of(out)
    assert 10 < len(before) < len(records)
    # The system has let go of the dead process's lock.
    assert (out / LOCK_FILE).exists()
    assert cli.run(command) == 0
    assert " of them earlier)" in capsys.readouterr().out
    assert cli.run([*command[:2], str(tmp_path / "whole"), *command[3:]]) == 0
    assert files(out) == files(tmp_path / "whole")
    assert ids_of(out) == [record.id for record in records]


# --- going on


@pytest.mark.parametrize("file_format", ["pt", "safetensors", "h5"])
def test_a_second_run_computes_nothing_and_changes_nothing(run, tmp_path, computed, file_format):
    out = tmp_path / "out"
    run(out, file_format=file_format)
    before, when = files(tmp_path), {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    computed.clear()
    assert run(out, file_format=file_format).reused == 10
    assert computed == []
    assert files(tmp_path) == before
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == when


@pytest.mark.parametrize("file_format", ["pt", "h5"])
def test_new_proteins_join_and_new_names_cost_nothing(run, tmp_path, computed, file_format):
    out = tmp_path / "out"
    run(out, proteins(), file_format)
    computed.clear()
    renamed = ProteinRecord("another name", proteins()[0].sequence)
    fresh = ProteinRecord("fresh", "MKTAYIAK")
    moved = ProteinRecord("protein/1", "GSGSWKDLAE")
    result = run(out, [*proteins()[3:], renamed, fresh, moved], file_format)
    assert sorted(sequence for batch in computed for sequence in batch) == ["GSGSWKDLAE", "MKTAYIAK"]
    assert result.reused == 8
    if file_format == "pt":
        names = dict(line.split("\t")[::2] for line in (out / INDEX_FILE).read_text().splitlines()[1:])
        assert set(names) == {f"protein/{i}" for i in range(9)} | {"twin", "another name", "fresh"}
        assert names["protein/1"] == f"{sequence_hash('GSGSWKDLAE')}.pt"
        assert names["another name"] == names["protein/0"]
    else:
        with h5py.File(out) as file:
            owners = {name: [e.attrs["original_id"], *e.attrs.get("other_ids", [])] for name, e in file.items()}
        assert owners[sequence_hash(proteins()[0].sequence)] == ["protein/0", "another name"]
        assert owners[sequence_hash(proteins()[4].sequence)] == ["protein/4", "twin"]
        assert owners[sequence_hash("GSGSWKDLAE")] == ["protein/1"]
        # No entry is left without a name.
        assert sequence_hash(proteins()[1].sequence) not in owners
        assert len(owners) == 10


def test_only_what_is_missing_of_a_batch_is_computed(run, tmp_path, computed):
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
        # Another batch, another order of float32 sums.
        torch.testing.assert_close(new["representations"][2], old["representations"][2], rtol=1e-5, atol=1e-5)


def test_a_name_shared_by_very_many_proteins(run, tmp_path):
    # Identifiers beyond the 64 KiB that old HDF5 files have for attributes.
    records = [ProteinRecord(f"a_rather_long_identifier_{index}", "MKTAY") for index in range(6000)]
    run(tmp_path / "e.h5", records, "h5", ["mean"])
    with h5py.File(tmp_path / "e.h5") as file:
        [entry] = file.values()
        assert list(entry.attrs["other_ids"]) == [record.id for record in records[1:]]


# --- damage


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def damage_cut(path):
    os.truncate(path, path.stat().st_size - 7)


def damage_empty(path):
    os.truncate(path, 0)


def damage_other(path):
    path.write_text("not what it was\n")


DAMAGE = {
    name.removeprefix("damage_"): function for name, function in list(globals().items()) if name.startswith("damage_")
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", [".pt", ".safetensors", ".cache.safetensors"])
def test_a_damaged_file_is_found_and_made_anew(run, tmp_path, computed, kind, damage):
    out = tmp_path / "out"
    arguments = ("pt", ["per_tok"]) if kind == ".pt" else ("safetensors", ["per_tok", "cache"])
    # One protein a batch: what is made anew has the same bits.
    run(out, None, *arguments, toks_per_batch=1)
    expected = files(out)
    path = out / f"{sequence_hash(proteins()[7].sequence)}{kind}"
    DAMAGE[damage](path)
    computed.clear()
    result = run(out, None, *arguments, toks_per_batch=1)
    assert result.damaged == [str(path)]
    assert result.reused == 9
    assert computed == [[proteins()[7].sequence]]
    assert files(out) == expected


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_h5_file_is_made_anew(run, tmp_path, computed, damage):
    out = tmp_path / "e.h5"
    run(out, None, "h5")
    expected = h5_content(out)
    DAMAGE[damage](out)
    computed.clear()
    result = run(out, None, "h5")
    assert result.damaged == [str(out)]
    assert len(computed) == 4
    assert h5_content(out) == expected


def test_a_damaged_entry_of_an_h5_file_is_made_anew(run, tmp_path, computed):
    out = tmp_path / "e.h5"
    run(out, None, "h5", toks_per_batch=1)
    expected = h5_content(out)
    name = sequence_hash(proteins()[7].sequence)
    with h5py.File(out, "a") as file:
        file[name]["representations/2"][3, 4] += 1
    computed.clear()
    result = run(out, None, "h5", toks_per_batch=1)
    assert result.damaged == [f"{out}, entry {name}"]
    assert computed == [[proteins()[7].sequence]]
    assert h5_content(out) == expected


def test_every_byte_of_a_file_of_torch_matters_or_is_padding(run, tmp_path):
    # Whatever a single wrong byte does, what is read from a file that passes is what was written.
    out = tmp_path / "out"
    run(out, proteins()[:1], include=["mean"])
    [path] = out.glob("*.pt")
    good = path.read_bytes()
    original = torch.load(path, weights_only=True)
    found = 0
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :])
        with contextlib.suppress(artifacts.ArtifactError):
            embedding_files._check_pt(path)
            again = torch.load(path, weights_only=True)
            assert again["label"] == original["label"]
            assert torch.equal(again["mean_representations"][2], original["mean_representations"][2])
            continue
        found += 1
    assert found > len(good) / 2


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe" * 20, b"id\tresidues\n", b"id\tresidues\tembedding\tcache\n\x80\tx\n", b""],
)
def test_a_damaged_index_is_made_anew(run, tmp_path, content):
    out = tmp_path / "out"
    run(out)
    expected = files(out)
    (out / INDEX_FILE).write_bytes(content)
    run(out)
    assert files(out) == expected


def test_a_line_cut_short_in_the_index_is_not_believed(run, tmp_path, computed):
    out = tmp_path / "out"
    run(out, toks_per_batch=1)
    expected = files(out)
    os.truncate(out / INDEX_FILE, (out / INDEX_FILE).stat().st_size - 5)
    computed.clear()
    # Its file is known by its twin's row, so nothing is computed.
    assert run(out, toks_per_batch=1).reused == 10
    assert computed == []
    assert files(out) == expected


def test_identifiers_that_the_index_cannot_hold(run, tmp_path):
    for wrong in ("a\tb", "a\nb", "a\rb"):
        with pytest.raises(ValueError, match="has a tab or a line break"):
            run(tmp_path / "out", [ProteinRecord(wrong, "MKT")])
    with pytest.raises(ValueError, match="identifier 'a' names two sequences"):
        run(tmp_path / "out", [ProteinRecord("a", "MKT"), ProteinRecord("a", "MKTA")])
    assert not (tmp_path / "out").exists()


def test_any_letter_may_stand_in_an_identifier(run, tmp_path, computed):
    records = [ProteinRecord("a\ufffdb \u2028 \x85", "MKT"), ProteinRecord("../x", "MKTA")]
    run(tmp_path / "out", records)
    computed.clear()
    result = run(tmp_path / "out", records)
    assert (result.reused, result.damaged, computed) == (2, [], [])


# --- a full disk


def full_disk(monkeypatch, after):
    """No file can be finished after so many: half of it is written, then there is no more room."""
    writes = []
    original = embedding_files.replacing

    @contextlib.contextmanager
    def replacing(path):
        with original(path) as temporary:
            writes.append(path)
            if len(writes) > after:
                temporary.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
            yield temporary

    monkeypatch.setattr(embedding_files, "replacing", replacing)
    monkeypatch.setattr(artifacts, "replacing", replacing)
    from esm_turbo.tasks.embedding import h5 as embedding_h5

    monkeypatch.setattr(embedding_h5, "replacing", replacing)


# Six more proteins: their files, then the index in its last order (of HDF5 the settings first, and the file itself).
@pytest.mark.parametrize(
    ("file_format", "after"),
    [("pt", 0), ("pt", 3), ("pt", 6), ("safetensors", 0), ("safetensors", 5), ("h5", 0), ("h5", 1), ("h5", 7)],
)
def test_a_full_disk_harms_nothing(run, tmp_path, monkeypatch, file_format, after):
    out, whole = tmp_path / "out", tmp_path / "whole"
    run(whole, file_format=file_format, records=proteins()[:3])
    run(whole, file_format=file_format)
    run(out, file_format=file_format, records=proteins()[:3])
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        with pytest.raises(UnfinishedError, match=r"No space left on device.*free some space") as caught:
            run(out, file_format=file_format)
    assert "\n" not in str(caught.value)
    after_it = files(tmp_path)
    changed = {name for name in before if after_it.get(name) != before[name]}
    # Rows have been added to the index; nothing else has changed, and nothing half-written is left.
    assert changed <= {f"out/{INDEX_FILE}"}
    assert not [name for name in after_it if name.endswith(".tmp")]
    assert not list(tmp_path.rglob(LOCK_FILE))
    run(out, file_format=file_format)
    if file_format == "h5":
        assert h5_content(out) == h5_content(whole)
    else:
        assert files(out) == files(whole)


def test_a_full_disk_while_the_index_grows(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(out, proteins()[:3])
    before = (out / INDEX_FILE).read_bytes()

    class Full:
        """A file on a disk with ten bytes left."""

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            return self.file.write(content[:10])

    def open_on_full_disk(self, mode="r", **options):
        file = original(self, mode, **options)
        return Full(file) if mode == "r+b" else file

    original = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        with pytest.raises(UnfinishedError, match=r"index.tsv: cannot be written \(No space left"):
            run(out)
    assert (out / INDEX_FILE).read_bytes() == before
    assert run(out).reused == 3


def test_the_command_says_in_one_line_that_the_disk_is_full(tiny_folder, tmp_path, monkeypatch, capsys):
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">{record.id}\n{record.sequence}\n" for record in proteins()))

    def no_room(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(artifacts, "save_file", no_room)
    command = ["embed", fasta, tmp_path / "out", "--model", tiny_folder, "--include", "mean", "--format", "safetensors"]
    assert cli.run([str(part) for part in command]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("esm-turbo: error: ")
    assert "No space left on device" in line and "0 of 10 proteins are done" in line
    assert sorted(files(tmp_path / "out")) == [SETTINGS_FILE]


# --- two writers, other settings


@pytest.mark.parametrize("file_format", ["pt", "h5"])
def test_two_writers_are_refused(run, tmp_path, file_format):
    out = tmp_path / "out"
    settings = {"include": ["mean"]}
    with (
        embedding_writer(out, file_format, settings),
        pytest.raises(FolderBusyError, match="another process is writing into it"),
    ):
        run(out, file_format=file_format)
    # Nothing is left of either.
    assert list(tmp_path.iterdir()) == []
    assert run(out, file_format=file_format).reused == 0


def test_the_command_refuses_a_folder_in_use(tiny_folder, tmp_path, capsys):
    fasta, out = tmp_path / "some.fasta", tmp_path / "out"
    fasta.write_text(">a\nMKTAY\n")
    holder = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from esm_turbo.files.writing import only_writer\n"
            "with only_writer(sys.argv[1]): print('held', flush=True); sys.stdin.read()",
            out,
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    command = ["embed", str(fasta), str(out), "--model", str(tiny_folder), "--include", "mean"]
    assert cli.run(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"esm-turbo: error: {out}: another process is writing into it; let it finish, or give another folder"
    )
    assert sorted(files(out)) == [LOCK_FILE]
    # However the other one ends.
    holder.kill()
    holder.wait()
    assert cli.run(command) == 0


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


def test_other_settings_are_refused_while_an_h5_file_is_unfinished(run, tmp_path, monkeypatch):
    out = tmp_path / "e.h5"
    with monkeypatch.context() as patch:
        full_disk(patch, 4)
        with pytest.raises(UnfinishedError):
            run(out, file_format="h5")
    assert not out.exists()
    with pytest.raises(ValueError, match=r"\.e\.h5\.parts: holds embeddings made with"):
        run(out, file_format="h5", layers=(0,))
    assert run(out, file_format="h5").reused > 0
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_that_is_something_else_is_not_overwritten(run, tmp_path):
    fasta = tmp_path / "proteins.fasta"
    fasta.write_text(">a\nMKTAY\n")
    with pytest.raises(ValueError, match="exists and is not an HDF5 file"):
        run(fasta, file_format="h5")
    assert fasta.read_text() == ">a\nMKTAY\n"
    foreign = tmp_path / "other.h5"
    with h5py.File(foreign, "w") as file:
        file["x"] = [1, 2]
    before = files(tmp_path)
    with pytest.raises(ValueError, match="holds no embeddings of esm-turbo"):
        run(foreign, file_format="h5")
    assert files(tmp_path) == before
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / INDEX_FILE).write_text("my own notes\n")
    with pytest.raises(ValueError, match="is not an index of embeddings"):
        run(tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [INDEX_FILE]
    assert (tmp_path / "folder" / INDEX_FILE).read_text() == "my own notes\n"
    (tmp_path / "folder" / INDEX_FILE).unlink()
    (tmp_path / "folder" / SETTINGS_FILE).write_text("[1]")
    with pytest.raises(ValueError, match=r"settings.json: damaged"):
        run(tmp_path / "folder")


# --- failures of single proteins


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
    # Halved until it fits, not smaller.
    assert (2, 36) in shapes and (1, 36) in shapes
    with pytest.raises(MemoryError, match="sequence 11: its 50 residues"):
        tiny.embed([record.sequence for record in records])


def test_what_is_not_finite_is_not_written_and_tried_again(run, tmp_path, monkeypatch, computed):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ProteinEmbedding, "is_finite", lambda self: len(self.representations[2]) != 18)
        result = run(out)
        assert [one.record for one in result.failed] == ["protein/4", "twin"]
        assert result.reused == 0
    assert set(ids_of(out)) == {f"protein/{i}" for i in range(9) if i != 4}
    computed.clear()
    result = run(out)
    assert (result.reused, result.failed) == (8, [])
    assert computed == [[proteins()[4].sequence]]


def test_progress(run, tmp_path):
    calls = []
    run(tmp_path / "out", progress=lambda *call: calls.append(call))
    total = sum(LENGTHS)
    assert calls[0] == ("embed", 0, total)
    assert calls[-1] == ("embed", total, total)
    assert [stage for stage, _, _ in calls].count("embed") == 5
    shutil.rmtree(tmp_path / "out" / "nothing", ignore_errors=True)
    (tmp_path / "out" / f"{sequence_hash(proteins()[8].sequence)}.pt").unlink()
    calls.clear()
    run(tmp_path / "out", progress=lambda *call: calls.append(call))
    assert ("check", 9, 9) in calls
    # What was there before does not make the rate look better than it is.
    assert calls[-1] == ("embed", LENGTHS[8], LENGTHS[8])


def test_files_of_the_safetensors_format_name_their_protein(run, tmp_path):
    run(tmp_path / "out", file_format="safetensors")
    for record in proteins()[:9]:
        metadata, tensors = read_embedding(tmp_path / "out" / f"{sequence_hash(record.sequence)}.safetensors")
        assert metadata == {"label": record.id, "residues": len(record.sequence)}
        assert tensors["representations.2"].shape == (len(record.sequence), 64)


def test_a_lock_can_be_waited_for(tmp_path):
    with only_writer(tmp_path / "folder"):
        begin = time.monotonic()
        with (
            pytest.raises(FolderBusyError, match=r"waited 0.2 s"),
            only_writer(tmp_path / "folder", timeout=0.2),
        ):
            pass
        assert time.monotonic() - begin >= 0.2
    assert not (tmp_path / "folder").exists()
