"""Embeddings in a folder: names, checks of files, the index, and files of other kinds."""

import contextlib
import hashlib
import io
import json
import shutil
from pathlib import Path

import h5py
import pyarrow.parquet
import pytest
import torch

from esm_turbo import TurboEsm
from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.pieces import Plan, Shard
from esm_turbo.tasks.embedding.files import read_pt, safe_labels, sequence_hash
from esm_turbo.tasks.embedding.folder import FolderWriter, merge_folders
from esm_turbo.tasks.embedding.records import UnfinishedError, embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from tests.helpers.embedding_files import DAMAGE, embedded_files, files, ids_of, index_rows, proteins


@pytest.fixture(params=["a run", "shards"])
def add(request, run, tmp_path):
    """`add(out, records)` embeds records into a folder, in one run or in shards that are joined."""

    def join(out, records=None):
        result = run(tmp_path / "shard", records, plan=Plan(Shard(1, 1)))
        merge_folders(out, [tmp_path / "shard"], [result.numbers])
        return result

    return run if request.param == "a run" else join


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", [".pt", ".safetensors", ".cache.safetensors"])
def test_a_damaged_file_is_found_and_computed_again(run, tmp_path, computed, kind, damage):
    out = tmp_path / "out"
    arguments = ("pt", ["per_tok"]) if kind == ".pt" else ("safetensors", ["per_tok", "cache"])
    # With one protein per batch, a result computed again has the same bits.
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


def test_any_damaged_byte_of_a_pt_file_is_found_or_harmless(run, tmp_path):
    # A file with one wrong byte is either refused or read as it was written.
    out = tmp_path / "out"
    run(out, proteins()[:1], include=["mean"])
    [path] = out.glob("*.pt")
    good = path.read_bytes()
    original = torch.load(path, weights_only=True)
    found = 0
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :])
        with contextlib.suppress(ArtifactError):
            read_pt(path)
            again = torch.load(path, weights_only=True)
            assert again["label"] == original["label"]
            assert torch.equal(again["mean_representations"][2], original["mean_representations"][2])
            continue
        found += 1
    assert found > len(good) / 2


@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("out", torch, "load"),
        ("out.h5", h5py.Dataset, "__getitem__"),
        ("out.h5", h5py.AttributeManager, "get"),
        ("out.parquet", pyarrow.parquet.ParquetFile, "read_row_group"),
    ],
)
def test_too_little_memory_is_no_damage(run, tmp_path, monkeypatch, name, owner, function):
    """A file that cannot be read now is neither reported nor computed again."""
    out = tmp_path / name
    run(out, file_format=None, include=["mean"])
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def load(*args, **options):
        raise MemoryError

    monkeypatch.setattr(owner, function, load)
    with pytest.raises(MemoryError):
        run(out, file_format=None, include=["mean"])
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def exchanged_names(content: bytes) -> bytes:
    """An index whose first two rows name each other's files."""
    rows = [line.split(b"\t") for line in content.splitlines()]
    rows[1][2], rows[2][2] = rows[2][2], rows[1][2]
    return b"\n".join(b"\t".join(row) for row in rows) + b"\n"


@pytest.mark.parametrize(
    "damaged",
    [
        lambda _: b"\xff\xfe" * 20 + b"\n",
        lambda _: b"id\tresidues\n",
        lambda _: b"id\tresidues\tembedding\tcache\n\x80\tx\n",
        exchanged_names,
        # A bit of an identifier, a number, a name of a file or a separator.
        *(
            lambda content, at=at: bytes(
                byte ^ (number == int(len(content) * at)) for number, byte in enumerate(content)
            )
            for at in (0.05, 0.3, 0.5, 0.77, 0.9)
        ),
    ],
)
def test_a_damaged_index_is_noticed_and_written_again(run, tmp_path, damaged):
    out = tmp_path / "out"
    # With one protein per batch, a result computed again has the same bits.
    run(out, toks_per_batch=1)
    expected = files(out)
    (out / INDEX_FILE).write_bytes(damaged((out / INDEX_FILE).read_bytes()))
    assert str(out / INDEX_FILE) in run(out, toks_per_batch=1).damaged
    assert files(out) == expected


@pytest.mark.parametrize(("kept", "reused"), [(0, 0), (-5, 10)])
def test_an_index_that_was_being_written_is_no_damage(run, tmp_path, computed, kept, reused):
    """Of a row that is not whole, a twin's names the same file, so nothing is computed."""
    out = tmp_path / "out"
    run(out, toks_per_batch=1)
    expected = files(out)
    content = (out / INDEX_FILE).read_bytes()
    (out / INDEX_FILE).write_bytes(content[:kept])
    computed.clear()
    result = run(out, toks_per_batch=1)
    assert (result.reused, result.damaged, len(computed)) == (reused, [], 0 if reused else 9)
    assert files(out) == expected


def test_a_full_disk_while_the_index_grows(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(out, proteins()[:3])
    before, original = (out / INDEX_FILE).read_bytes(), Path.open

    class Full(io.FileIO):
        """A file on a disk with ten bytes left."""

        def write(self, content):
            return super().write(content[:10])

    def open_on_full_disk(self, mode="r", **options):
        return Full(self, "r+") if mode == "r+b" else original(self, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        with pytest.raises(UnfinishedError, match=r"index.tsv: cannot be written \(No space left"):
            run(out)
    assert (out / INDEX_FILE).read_bytes() == before
    assert run(out).reused == 3


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
def test_files_have_the_usual_permissions(run, tmp_path, file_format):
    (tmp_path / "usual").touch()
    run(tmp_path / "out", proteins()[:2], file_format, ["mean", "cache"])
    paths = [path for path in (tmp_path / "out").iterdir() if path.name != INDEX_FILE]
    assert len(paths) == 5
    assert {path.stat().st_mode for path in paths} == {(tmp_path / "usual").stat().st_mode}


def test_a_folder_of_another_kind_is_not_written_to(add, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / INDEX_FILE).write_text("my own notes\n")
    with pytest.raises(ValueError, match="is not an index of embeddings"):
        add(out)
    assert [path.name for path in out.iterdir()] == [INDEX_FILE]
    assert (out / INDEX_FILE).read_text() == "my own notes\n"
    (out / INDEX_FILE).unlink()
    for content in ("[1]", "{"):
        (out / SETTINGS_FILE).write_text(content)
        with pytest.raises(ValueError, match=r"settings.json: damaged"):
            add(out)


@pytest.mark.parametrize("name", [INDEX_FILE, SETTINGS_FILE, ".lock"])
def test_links_in_the_place_of_its_own_files_are_refused(run, tmp_path, name):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.write_text("mine")
    (out / name).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a symbolic link, which is not followed here; remove it"):
        run(out)
    assert elsewhere.read_text() == "mine"


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
@pytest.mark.parametrize("include", [["mean"], ["cache"]])
@pytest.mark.parametrize("by", ["a link", "each other", "those of another model"])
def test_files_that_were_replaced_are_computed_again(
    run, turbo, tiny_model, tmp_path, computed, file_format, include, by
):
    """All are undamaged, and have the names that they should have."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    run(out, None, file_format, include)
    names = files(out).keys()
    first, second = embedded_files(out)[:2]
    if by == "a link":
        first.rename(mine), first.symlink_to(mine)
    elif by == "each other":
        first.rename(mine), second.rename(first), mine.rename(second)
    else:
        other = TurboEsm(tiny_model(seed=1, preset="exact"), turbo.tokenizer)
        request = EmbeddingRequest.of(other, (-1,), include)
        embed_records(other, proteins(), tmp_path / "other", request, file_format=file_format)
        shutil.copy(tmp_path / "other" / first.name, first)
    replaced = [first, second] if by == "each other" else [first]
    before = first.read_bytes()
    computed.clear()
    assert sorted(run(out, None, file_format, include).damaged) == [str(path) for path in replaced]
    assert sum(map(len, computed)) == len(replaced)
    # What the link named is not written to.
    assert not first.is_symlink() and (by != "a link" or mine.read_bytes() == before)
    assert run(out, None, file_format, include).damaged == []
    assert files(out).keys() == names


def record(name: str, sequence: str) -> ProteinRecord:
    return ProteinRecord(name, sequence)


def test_names_of_files():
    assert sequence_hash("MKT") == hashlib.sha256(b"MKT_3").hexdigest()
    good = ["sp|P1|HBA_HUMAN", "a.b-1"]
    bad = ["A/B", "../x", ".hidden", "-flag", "a b", "x.", "x.cache", "n" * 151, "é", "A" * 64, "con.1", "Same", "same"]
    groups = {str(index): [name] for index, name in enumerate([*good, *bad])}
    assert list(safe_labels(groups).values()) == [[name] for name in good]
    assert safe_labels({"1f": ["a", "b", "a"]}) == {"1f": ["a", "b", "a"]}


def test_files_are_named_by_labels(run, tmp_path, computed):
    out = tmp_path / "out"
    records = [record("one", "MKTAYIAK"), record("twin", "MKTAYIAK"), record("a/b", "GSGSG")]
    hashed = sequence_hash("GSGSG")
    assert run(out, records, include=["mean", "cache"]).reused == 0
    assert {path.name for path in out.iterdir()} == {
        INDEX_FILE, SETTINGS_FILE, "one.pt", "one.cache.safetensors", f"{hashed}.pt", f"{hashed}.cache.safetensors",
    }  # fmt: skip
    assert torch.load(out / "one.pt")["label"] == "one"
    assert index_rows(out) == [
        ["one", "8", "one.pt", "one.cache.safetensors"],
        ["twin", "8", "one.pt", "one.cache.safetensors"],
        ["a/b", "5", f"{hashed}.pt", f"{hashed}.cache.safetensors"],
    ]
    computed.clear()
    for names in ("label", None):
        assert run(out, records, include=["mean", "cache"], names=names).reused == 3
    assert computed == []
    with pytest.raises(ValueError, match="made with names label"):
        run(out, records, include=["mean", "cache"], names="hash")


def test_an_earlier_folder_of_hashes_keeps_its_names(run, tmp_path, computed):
    out = tmp_path / "out"
    records = [record("one", "MKTAYIAK"), record("two", "GSGSG")]
    run(out, records, names="hash")
    before = files(out)
    computed.clear()
    assert run(out, records).reused == 2
    assert (computed, files(out)) == ([], before)
    run(out, [record("three", "MK")])
    assert (out / f"{sequence_hash('MK')}.pt").exists() and not (out / "three.pt").exists()
    with pytest.raises(ValueError, match="made with names missing, not label"):
        run(out, records, names="label")


def test_a_folder_whose_settings_lost_its_names_is_refused(run, tmp_path):
    out = tmp_path / "out"
    records = [record("a/b", "GSGSG"), record("one", "MKTAYIAK")]
    run(out, records)
    settings = json.loads((out / SETTINGS_FILE).read_text())
    settings.pop("names")
    (out / SETTINGS_FILE).write_text(json.dumps(settings))
    before = files(out)
    for names in (None, "hash"):
        with pytest.raises(ValueError, match=r"settings.json: damaged \(`names` is missing"):
            run(out, records, names=names)
    assert files(out) == before


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        # The identifier names another protein now; its twin still has the old one.
        (["one MKTAYIAK", "twin MKTAYIAK"], ["one GSGSG"], {"twin": "one", "one": "GSGSG"}),
        # It names another protein whose first identifier is no name of a file.
        (["one MKTAYIAK"], ["dom/1 GSGSG", "one GSGSG"], {"dom/1": "GSGSG", "one": "GSGSG"}),
        # Names that only differ in case may be the same file.
        (["Same MKTAYIAK"], ["same GSGSG"], {"Same": "Same", "same": "GSGSG"}),
        # A label that is the hash of another sequence, whose own is not safe; in one run, and in a later one.
        (
            ["a/b MKTAYIAK", f"{sequence_hash('MKTAYIAK')} GSGSG"],
            [f"{sequence_hash('MKTAYIAK').upper()} WTC"],
            {"a/b": "MKTAYIAK", sequence_hash("MKTAYIAK"): "GSGSG", sequence_hash("MKTAYIAK").upper(): "WTC"},
        ),
    ],
)
def test_a_label_never_takes_a_file_that_others_use(run, add, tmp_path, computed, caplog, first, later, expected):
    out = tmp_path / "out"
    run(out, [record(*text.split()) for text in first])
    before = {path: path.read_bytes() for path in embedded_files(out)}
    for _ in range(2):
        assert add(out, [record(*text.split()) for text in later]).damaged == []
    assert {path: path.read_bytes() for path in before} == before
    assert sum(map(len, computed)) == len({text.split()[1] for text in [*first, *later]})
    # Names that only differ in case depend on the system.
    assert "one" not in expected or "its files named 'one' are older, of other sequences" in caplog.text
    # Where it is no label, the expected name is the hash of the sequence.
    names = {one: label if label in ("one", "Same") else sequence_hash(label) for one, label in expected.items()}
    assert {row[0]: row[2] for row in index_rows(out)} == {one: f"{name}.pt" for one, name in names.items()}


@pytest.mark.parametrize("earlier", [[], [record("two", "GSGSG")]])
def test_files_of_other_programs_are_not_replaced(add, run, tmp_path, caplog, earlier):
    out = tmp_path / "out"
    out.mkdir()
    (out / "one.pt").write_text("of esm-extract")
    if earlier:
        run(out, earlier)
    for reused in (0, 1):
        assert add(out, [record("one", "MKTAYIAK")]).reused == reused
        assert (out / "one.pt").read_text() == "of esm-extract"
        assert "its files named 'one' are older, of other sequences or another program's" in caplog.text
        caplog.clear()
    assert (out / f"{sequence_hash('MKTAYIAK')}.pt").exists()


def test_a_stopped_run_leaves_no_row_with_the_file_of_another_sequence(run, tmp_path, monkeypatch):
    out, old = tmp_path / "out", [record("one", "MKTAYIAK")]
    run(out, old)
    for kept in ([], ["two"]):
        with monkeypatch.context() as patch:
            # After the file is in its place, and before its row is.
            patch.setattr(FolderWriter, "record", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(out, [record("one", "WTC")])
        assert torch.load(out / "one.pt")["representations"][2].shape[0] == 3
        assert ids_of(out) == kept
        # What another run adds, or embeds again, is as in a new folder.
        run(out, [record("two", "GSGSG")])
        assert ids_of(out) == ["two"]
        run(out, old)
    run(tmp_path / "new", [record("two", "GSGSG")])
    run(tmp_path / "new", old)
    assert files(out) == files(tmp_path / "new")
