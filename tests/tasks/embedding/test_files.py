"""Embeddings in a folder: names, checks of files, the index, and files of other kinds."""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from esm_turbo import TurboEsm
from esm_turbo.files import artifacts
from esm_turbo.files.kinds import is_embeddings
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding import files as embedding_files
from esm_turbo.tasks.embedding.files import (
    INDEX_FILE,
    SETTINGS_FILE,
    embeddings_info,
    read_embedding,
    safe_labels,
    sequence_hash,
)
from esm_turbo.tasks.embedding.records import UnfinishedError, embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from tests.helpers.embedding_files import DAMAGE, files, proteins


def test_names_are_those_of_biotrainer():
    assert sequence_hash("MKT") == hashlib.sha256(b"MKT_3").hexdigest()


def test_facts_of_a_folder(run, tmp_path):
    out = tmp_path / "out"
    assert not is_embeddings(out)
    run(out)
    assert is_embeddings(out)
    facts = embeddings_info(out)
    assert (facts["kind"], facts["proteins"], facts["format"]) == ("embeddings", 10, "pt")
    assert facts["include"] == ["mean", "per_tok"]
    (out / SETTINGS_FILE).unlink()
    assert not is_embeddings(out)


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
        with contextlib.suppress(artifacts.ArtifactError):
            embedding_files.read_pt(path)
            again = torch.load(path, weights_only=True)
            assert again["label"] == original["label"]
            assert torch.equal(again["mean_representations"][2], original["mean_representations"][2])
            continue
        found += 1
    assert found > len(good) / 2


def test_too_little_memory_is_no_damage(run, tmp_path, monkeypatch):
    """A file that cannot be read now is neither reported nor computed again."""
    out = tmp_path / "out"
    run(out)
    before = files(out)

    def load(*args, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        run(out)
    assert files(out) == before


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe" * 20, b"id\tresidues\n", b"id\tresidues\tembedding\tcache\n\x80\tx\n", b""],
)
def test_a_damaged_index_is_written_again(run, tmp_path, content):
    out = tmp_path / "out"
    run(out)
    expected = files(out)
    (out / INDEX_FILE).write_bytes(content)
    run(out)
    assert files(out) == expected


@pytest.mark.parametrize("place", [0.05, 0.3, 0.5, 0.77, 0.9])
def test_a_changed_byte_of_the_index_is_noticed(run, tmp_path, place):
    """In an identifier, a number, a name of a file or a separator; a valid name of another file, too."""
    out = tmp_path / "out"
    run(out)
    expected = (out / INDEX_FILE).read_bytes()
    content = bytearray(expected)
    content[int(len(content) * place)] ^= 1
    (out / INDEX_FILE).write_bytes(content)
    assert str(out / INDEX_FILE) in run(out).damaged
    assert (out / INDEX_FILE).read_bytes() == expected
    rows = [line.split("\t") for line in (out / INDEX_FILE).read_text().splitlines()]
    rows[1][2], rows[2][2] = rows[2][2], rows[1][2]
    (out / INDEX_FILE).write_text("\n".join(["\t".join(row) for row in rows]) + "\n")
    assert str(out / INDEX_FILE) in run(out).damaged
    assert (out / INDEX_FILE).read_bytes() == expected


def test_a_truncated_line_of_the_index_is_ignored(run, tmp_path, computed):
    out = tmp_path / "out"
    run(out, toks_per_batch=1)
    expected = files(out)
    os.truncate(out / INDEX_FILE, (out / INDEX_FILE).stat().st_size - 5)
    computed.clear()
    # Its twin's row names the same file, so nothing is computed.
    assert run(out, toks_per_batch=1).reused == 10
    assert computed == []
    assert files(out) == expected


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


def test_files_of_the_safetensors_format_name_their_protein(run, tmp_path):
    run(tmp_path / "out", file_format="safetensors")
    for record in proteins()[:9]:
        metadata, tensors = read_embedding(tmp_path / "out" / f"{sequence_hash(record.sequence)}.safetensors")
        assert len(metadata.pop("key")) == 64
        assert metadata == {"label": record.id, "residues": len(record.sequence)}
        assert tensors["representations.2"].shape == (len(record.sequence), 64)


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
def test_files_have_the_usual_permissions(run, tmp_path, file_format):
    (tmp_path / "usual").touch()
    run(tmp_path / "out", proteins()[:2], file_format, ["mean", "cache"])
    paths = [path for path in (tmp_path / "out").iterdir() if path.name != INDEX_FILE]
    assert len(paths) == 5
    assert {path.stat().st_mode for path in paths} == {(tmp_path / "usual").stat().st_mode}


def test_a_folder_of_another_kind_is_not_written_to(run, tmp_path):
    (tmp_path / INDEX_FILE).write_text("my own notes\n")
    with pytest.raises(ValueError, match="is not an index of embeddings"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_FILE]
    assert (tmp_path / INDEX_FILE).read_text() == "my own notes\n"
    (tmp_path / INDEX_FILE).unlink()
    for content in ("[1]", "{"):
        (tmp_path / SETTINGS_FILE).write_text(content)
        with pytest.raises(ValueError, match=r"settings.json: damaged"):
            run(tmp_path)


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
def test_links_in_the_place_of_embeddings_are_replaced(run, tmp_path, computed, file_format):
    out = tmp_path / "out"
    run(out, None, file_format, ["mean", "cache"])
    paths = sorted(path for path in out.iterdir() if path.suffix in (".pt", ".safetensors"))[:2]
    targets = [tmp_path / path.name for path in paths]
    for path, target in zip(paths, targets, strict=True):
        path.rename(target)
        path.symlink_to(target)
    before = [target.read_bytes() for target in targets]
    computed.clear()
    result = run(out, None, file_format, ["mean", "cache"])
    assert result.damaged and set(result.damaged) <= set(map(str, paths)) and computed
    assert not any(path.is_symlink() for path in paths)
    assert [target.read_bytes() for target in targets] == before


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
@pytest.mark.parametrize("include", [["mean"], ["cache"]])
def test_exchanged_files_are_computed_again(run, tmp_path, computed, file_format, include):
    """Each is undamaged, but holds the results of another sequence."""
    out = tmp_path / "out"
    run(out, None, file_format, include)
    expected = files(out)
    first, second = sorted(path for path in out.iterdir() if path.suffix in (".pt", ".safetensors"))[:2]
    first.rename(out / "x"), second.rename(first), (out / "x").rename(second)
    computed.clear()
    result = run(out, None, file_format, include)
    assert sorted(result.damaged) == [str(first), str(second)]
    assert sum(map(len, computed)) == 2
    assert run(out, None, file_format, include).damaged == []
    assert files(out).keys() == expected.keys()


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
@pytest.mark.parametrize("include", [["mean"], ["cache"]])
def test_files_of_another_model_are_computed_again(turbo, tiny_model, run, tmp_path, file_format, include):
    """Their names are the same, since the sequences are."""
    other = TurboEsm(tiny_model(seed=1, preset="exact"), turbo.tokenizer)
    request = EmbeddingRequest.of(other, (-1,), include)
    embed_records(other, proteins(), tmp_path / "other", request, file_format=file_format)
    out = tmp_path / "out"
    run(out, None, file_format, include)
    path = next(path for path in sorted(out.iterdir()) if path.suffix in (".pt", ".safetensors"))
    shutil.copy(tmp_path / "other" / path.name, path)
    assert run(out, None, file_format, include).damaged == [str(path)]


def record(name: str, sequence: str) -> ProteinRecord:
    return ProteinRecord(name, sequence)


def test_labels_that_can_name_files():
    names = [
        "sp|P1|HBA_HUMAN",
        "a.b-1",
        "A/B",
        "../x",
        ".hidden",
        "-flag",
        "a b",
        "x.",
        "x.cache",
        "n" * 151,
        "é",
        "A" * 64,
        "con.1",
        "Same",
        "same",
    ]
    sequences = ["MK" + "A" * index for index in range(len(names))]
    groups = [[record(name, sequence)] for name, sequence in zip(names, sequences, strict=True)]
    assert list(safe_labels(groups).values()) == [["sp|P1|HBA_HUMAN"], ["a.b-1"]]
    assert safe_labels([[record("a", "MK"), record("b", "MK"), record("a", "MK")]]) == {"MK": ["a", "b"]}


def test_files_are_named_by_labels(run, tmp_path, computed):
    out = tmp_path / "out"
    records = [record("one", "MKTAYIAK"), record("twin", "MKTAYIAK"), record("a/b", "GSGSG")]
    hashed = f"{sequence_hash('GSGSG')}"
    assert run(out, records, include=["mean", "cache"]).reused == 0
    assert {path.name for path in out.iterdir() if path.is_file()} == {
        INDEX_FILE, SETTINGS_FILE, "one.pt", "one.cache.safetensors", f"{hashed}.pt", f"{hashed}.cache.safetensors",
    }  # fmt: skip
    assert torch.load(out / "one.pt")["label"] == "one"
    rows = [line.split("\t")[:4] for line in (out / INDEX_FILE).read_text().splitlines()[1:]]
    assert rows == [
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
    with pytest.raises(ValueError, match="one HDF5 file has no names of files"):
        run(tmp_path / "x.h5", records, "h5", ["mean"], names="label")


def test_a_label_never_takes_a_file_that_others_use(run, tmp_path):
    out = tmp_path / "out"
    run(out, [record("one", "MKTAYIAK"), record("twin", "MKTAYIAK")])
    before = (out / "one.pt").read_bytes()
    # The identifier names another protein now; its twin still has the old one.
    run(out, [record("one", "GSGSG")])
    assert (out / "one.pt").read_bytes() == before
    rows = dict(line.split("\t")[::2][:2] for line in (out / INDEX_FILE).read_text().splitlines()[1:])
    assert rows == {"twin": "one.pt", "one": f"{sequence_hash('GSGSG')}.pt"}


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


def test_labels_of_two_runs_that_only_differ_in_case(run, tmp_path, computed):
    out = tmp_path / "out"
    run(out, [record("Same", "MKTAYIAK")])
    before = (out / "Same.pt").read_bytes()
    for _ in range(2):
        run(out, [record("same", "GSGSG")])
    assert (out / "Same.pt").read_bytes() == before
    assert {path.name for path in out.glob("*.pt")} == {"Same.pt", f"{sequence_hash('GSGSG')}.pt"}
    assert computed == [["MKTAYIAK"], ["GSGSG"]]


def test_a_label_that_is_the_hash_of_another_sequence(run, tmp_path):
    out, hashed = tmp_path / "out", sequence_hash("MKTAYIAK")
    # In one run, and in a later one; the first record falls back to its hash, which the second one's label is.
    run(out, [record("a/b", "MKTAYIAK"), record(hashed, "GSGSG")])
    run(out, [record(hashed.upper(), "WTC")])
    rows = dict(line.split("\t")[::2][:2] for line in (out / INDEX_FILE).read_text().splitlines()[1:])
    assert rows == {
        name: f"{sequence_hash(sequence)}.pt"
        for name, sequence in (("a/b", "MKTAYIAK"), (hashed, "GSGSG"), (hashed.upper(), "WTC"))
    }


def test_files_of_other_programs_are_not_replaced(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "one.pt").write_text("of esm-extract")
    for reused in (0, 1):
        assert run(out, [record("one", "MKTAYIAK")]).reused == reused
        assert (out / "one.pt").read_text() == "of esm-extract"
    assert (out / f"{sequence_hash('MKTAYIAK')}.pt").exists()
