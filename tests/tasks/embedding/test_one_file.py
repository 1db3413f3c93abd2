"""Embeddings in one file, HDF5 or Parquet: contents, damage, files of other kinds, and files that are joined."""

import gc
import json
import re
import sys
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch

from esm_turbo.cli.info import embeddings_info
from esm_turbo.files.extras import install_hint
from esm_turbo.files.parquet import parquet_info, write_parquet
from esm_turbo.files.writing import LOCK_FILE, parts_folder
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding import h5, parquet
from esm_turbo.tasks.embedding.files import sequence_hash
from esm_turbo.tasks.embedding.folder import merge_folders
from esm_turbo.tasks.embedding.one_file import ONE_FILE_FORMATS, merge_files
from esm_turbo.tasks.embedding.records import UnfinishedError
from tests.helpers.embedding_files import DAMAGE, files, full_disk, h5_content, ids_of, proteins, read_embeddings

RECORDS = [ProteinRecord("=a/b", "MKTAY"), ProteinRecord("twin", "MKTAY"), ProteinRecord("-c", "GS")]
BOTH = pytest.mark.parametrize("file_format", ["h5", "parquet"])


@pytest.fixture
def means(run):
    """`means(out, records)` writes the means of two layers, in the format that the name says."""

    def write(out: Path, records=None, **options):
        options = {"include": ("mean",), "layers": (1, 2), "file_format": None} | options
        return run(out, records, **options)

    return write


def content(path: Path) -> object:
    """All that a file holds; the bytes of an HDF5 file follow from the order in which it was written, too."""
    return h5_content(path) if path.suffix == ".h5" else path.read_bytes()


@pytest.mark.parametrize("file_format", ["pt", "safetensors", "h5", "parquet"])
@pytest.mark.parametrize("include", [["mean"], ["per_tok"], ["contacts"], ["mean", "per_tok", "bos", "contacts"]])
def test_what_was_written_is_read_and_described(run, tiny, tmp_path, file_format, include):
    if file_format == "parquet" and include != ["mean"]:
        with pytest.raises(ValueError, match="a Parquet file holds means: give `include` mean, not "):
            run(tmp_path / "e.parquet", RECORDS, file_format, include)
        return
    out = tmp_path / {"h5": "e.h5", "parquet": "e.parquet"}.get(file_format, "e")
    run(out, RECORDS, file_format, include, (0, -1))
    expected = tiny.embed([record.sequence for record in RECORDS], (0, -1), include)
    found = list(read_embeddings(out, RECORDS[::-1]))[::-1]
    for arrays, embedding in zip(found, expected, strict=True):
        tensors = embedding.tensors()
        assert set(arrays) == set(tensors)
        for name, tensor in tensors.items():
            assert arrays[name].dtype == np.float32
            np.testing.assert_allclose(arrays[name], tensor.numpy(), rtol=1e-5, atol=1e-5)
    if file_format != "parquet":
        facts = embeddings_info(out)
        assert (facts["kind"], facts["proteins"], facts["format"]) == ("embeddings", 3, file_format)
        assert facts["include"] == sorted(include)


def test_one_result_is_a_data_set_and_several_are_a_group(run, tmp_path):
    run(tmp_path / "one.h5", RECORDS, "h5", ["mean"])
    run(tmp_path / "two.h5", RECORDS, "h5", ["mean", "per_tok"])
    name, alone = map(sequence_hash, ("MKTAY", "GS"))
    with h5py.File(tmp_path / "one.h5") as one, h5py.File(tmp_path / "two.h5") as two:
        assert set(one) == set(two) == {name, alone}
        for entry in (one[name], two[name]):
            assert (entry.attrs["original_id"], list(entry.attrs["other_ids"])) == ("=a/b", ["twin"])
        assert "other_ids" not in one[alone].attrs
        assert json.loads(one.attrs["settings"])["include"] == ["mean"]
        np.testing.assert_allclose(one[name][()], two[name]["mean_representations/2"][()], rtol=1e-5, atol=1e-5)
        assert two[name]["representations/2"].shape == (5, 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.h5", "two.h5"]


@pytest.mark.parametrize("rows_per_group", [1, 4, 4096])
def test_a_row_for_every_layer_of_every_protein(means, tiny, tmp_path, monkeypatch, rows_per_group):
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", rows_per_group)
    means(tmp_path / "m.parquet", RECORDS)
    table = pyarrow.parquet.read_table(tmp_path / "m.parquet")
    assert [f"{field.name} {field.type}" for field in table.schema] == [
        "id string", "sequence_hash string", "residues int64", "layer int64",
        f"mean fixed_size_list<element: float>[{tiny.model.config.hidden_size}]",
    ]  # fmt: skip
    frame = pandas.read_parquet(tmp_path / "m.parquet")
    assert frame[["id", "residues", "layer"]].values.tolist() == [
        ["=a/b", 5, 1], ["=a/b", 5, 2], ["twin", 5, 1], ["twin", 5, 2], ["-c", 2, 1], ["-c", 2, 2],
    ]  # fmt: skip
    assert frame["sequence_hash"].tolist() == [sequence_hash(one.sequence) for one in RECORDS for _ in range(2)]
    expected = tiny.embed([one.sequence for one in RECORDS], repr_layers=(1, 2), include=["mean"])
    tensors = [one.mean_representations[layer] for one in expected for layer in (1, 2)]
    torch.testing.assert_close(torch.tensor(np.stack(frame["mean"])), torch.stack(tensors), rtol=1e-5, atol=1e-5)
    info = parquet_info(tmp_path / "m.parquet")
    assert info["rows"] == 6 and info["settings"]["include"] == ["mean"] and info["settings"]["device"] == "cpu"


def test_a_folder_of_tables_is_one(means, tmp_path):
    for number in (0, 1):
        means(tmp_path / f"shard-{number}.parquet", proteins()[5 * number : 5 * number + 5])
    # Of a shard that was stopped, and its manifest.
    (tmp_path / ".shard-2.parquet.parts").mkdir()
    (tmp_path / ".shard-2.parquet.parts" / "x.safetensors").write_text("")
    (tmp_path / "_shard-1.json").write_text("{}")
    frame = pandas.read_parquet(tmp_path, filters=[("layer", "==", 2)])
    assert frame["id"].tolist() == [record.id for record in proteins()]
    assert pyarrow.dataset.dataset(tmp_path).count_rows() == 20


def test_an_entry_shared_by_many_proteins(run, tmp_path):
    # More than the 64 KiB that attributes of old HDF5 files can hold.
    records = [ProteinRecord(f"a_rather_long_identifier_{index}", "MKTAY") for index in range(6000)]
    run(tmp_path / "e.h5", records, "h5", ["mean"])
    with h5py.File(tmp_path / "e.h5") as file:
        [entry] = file.values()
        assert list(entry.attrs["other_ids"]) == [record.id for record in records[1:]]


@pytest.mark.parametrize(
    ("file_format", "damage"),
    [("h5", "cut"), ("h5", "empty"), ("parquet", "flip"), ("parquet", "cut"), ("parquet", "empty")],
)
def test_a_damaged_file_is_computed_again(means, tmp_path, computed, file_format, damage):
    out = tmp_path / f"m.{file_format}"
    means(out)
    expected = content(out)
    DAMAGE[damage](out)
    computed.clear()
    result = means(out)
    assert (result.reused, result.damaged, len(computed)) == (0, [str(out)], 4)
    assert content(out) == expected


def test_settings_that_cannot_be_read_are_damage(means, tmp_path, monkeypatch):
    out = tmp_path / "e.h5"
    means(out)
    expected, read = h5_content(out), h5py.AttributeManager.__getitem__

    def damaged(self, name):
        if name != "settings":
            return read(self, name)
        raise OSError("Can't synchronously read data (ran off end of input buffer while decoding)")

    with monkeypatch.context() as patch:
        patch.setattr(h5py.AttributeManager, "__getitem__", damaged)
        assert means(out).damaged == [str(out)]
    assert h5_content(out) == expected


@pytest.mark.parametrize("change", ["altered", "exchanged"])
def test_a_file_with_a_damaged_entry_is_written_again_or_refused(means, tmp_path, change):
    out = tmp_path / "e.h5"
    means(out)
    expected = h5_content(out)
    one, two = (sequence_hash(proteins()[index].sequence) for index in (1, 7))
    with h5py.File(out, "a") as file:
        if change == "altered":
            file[two]["mean_representations/2"][4] += 1
        else:
            file.move(one, "x"), file.move(two, one), file.move("x", two)
    if change == "altered":
        assert means(out).damaged == [str(out)]
        assert h5_content(out) == expected
    else:
        with pytest.raises(ValueError, match=r"e\.h5: exists, and lacks 2 of the proteins"):
            means(out)


def test_a_table_that_another_program_changed_is_computed_again(means, tmp_path):
    out = tmp_path / "m.parquet"
    means(out)
    table, before = pyarrow.parquet.read_table(out), out.read_bytes()
    for changed in (table.slice(1), table.slice(0, 3), table.drop_columns(["residues"]), table.take([0, 3])):
        pyarrow.parquet.write_table(changed, out)
        assert means(out).damaged == [str(out)]
        assert out.read_bytes() == before


@BOTH
def test_a_file_that_is_complete_stays_and_takes_no_more(means, tmp_path, computed, file_format):
    records, out = proteins(), tmp_path / f"m.{file_format}"
    means(out, records[:5])
    before = files(tmp_path)
    computed.clear()
    if file_format == "parquet":
        for other in (records[1:3], records[4::-1]):
            with pytest.raises(ValueError, match="exists, with more proteins or in another order than the input"):
                means(out, other)
    for again in (records[:5], *([records[1:3]] if file_format == "h5" else [])):
        result = means(out, again)
        assert (result.written, result.reused, computed) == (len(again), len(again), [])
    with pytest.raises(ValueError, match=r"exists, and lacks 2 of the proteins; they can be added to a folder"):
        means(out, records[3:7])
    with pytest.raises(ValueError, match="holds embeddings made with repr_layers"):
        means(out, records[:5], layers=(0,))
    assert files(tmp_path) == before


@BOTH
@pytest.mark.parametrize("count", [10, 8])
def test_an_interrupted_run_continues(means, tmp_path, monkeypatch, computed, file_format, count):
    means(tmp_path / f"whole.{file_format}", proteins()[:count], toks_per_batch=1)
    whole, out = len(computed), tmp_path / f"m.{file_format}"
    computed.clear()
    with monkeypatch.context() as patch:
        full_disk(patch, 6)
        with pytest.raises(UnfinishedError):
            means(out, toks_per_batch=1)
    assert not out.exists() and parts_folder(out).exists() and len(computed) < whole
    with pytest.raises(ValueError, match=rf"\.m\.{file_format}\.parts: holds embeddings made with"):
        means(out, layers=(0,))
    # What it left of other proteins is not in the file.
    assert means(out, proteins()[:count], toks_per_batch=1).reused > 0
    assert content(out) == content(tmp_path / f"whole.{file_format}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, f"whole.{file_format}"]


def test_identifiers_of_an_unfinished_file_are_not_escaped(run, tmp_path, monkeypatch):
    """Its index neutralises what a spreadsheet would run."""
    out = tmp_path / "e.h5"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(h5, "write", Mock(side_effect=KeyboardInterrupt))
        run(out, RECORDS, "h5")
    run(out, RECORDS, "h5")
    with h5py.File(out) as file:
        assert sorted(entry.attrs["original_id"] for entry in file.values()) == ["-c", "=a/b"]


@BOTH
def test_other_files_and_results_are_refused(means, run, tmp_path, file_format):
    out, noun = tmp_path / f"m.{file_format}", {"h5": "an HDF5", "parquet": "a Parquet"}[file_format]
    with pytest.raises(ValueError, match=r"one (HDF5|Parquet) file has no names of files"):
        means(out, names="label")
    if file_format == "h5":
        with pytest.raises(ValueError, match="caches cannot be stored in an HDF5 file"):
            means(out, include=("mean", "cache"))
    assert not list(tmp_path.iterdir())
    out.touch()
    means(out, RECORDS)
    foreign = {
        "exists and is not " + noun: lambda: out.write_text(">a\nMKTAY\n"),
        "holds no embeddings of esm-turbo": lambda: (
            write_parquet(out, ["id"], [["a"]], {}, {"settings": {"arm": "full"}})
            if file_format == "parquet"
            else h5py.File(out, "w").close()
        ),
    }
    for message, write in foreign.items():
        write()
        before = files(tmp_path)
        with pytest.raises(ValueError, match=message):
            means(out)
        assert files(tmp_path) == before


@BOTH
def test_a_missing_package_is_named(tmp_path, monkeypatch, file_format):
    package, message = {
        "h5": ("h5py", f"format h5 needs h5py: {install_hint('h5')}"),
        "parquet": ("pyarrow", f"Parquet needs pyarrow: {install_hint('parquet')}"),
    }[file_format]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=re.escape(message)):
        ONE_FILE_FORMATS[file_format].check(tmp_path / "e", ["mean"])


def test_another_run_keeps_its_lock_and_its_temporaries(run, tmp_path, monkeypatch):
    """While a run ends, others may begin: of the same file, and of one whose name begins alike."""
    out, other = tmp_path / "run1", tmp_path / ".run1.h5.abcdefgh.tmp"
    other.mkdir()
    locks = []
    original = Path.unlink

    def noting(path, *arguments, **options):
        if path.parent == parts_folder(out):
            locks.append((parts_folder(out) / LOCK_FILE).exists())
        original(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", noting)
        run(out, file_format="h5")
    # The lock is there until the end of the run that holds it, and removed last.
    assert len(locks) > 5 and all(locks)
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "run1"]


def test_a_link_in_the_place_of_the_parts_is_refused(run, tmp_path):
    out, elsewhere = tmp_path / "e.h5", tmp_path / "elsewhere"
    elsewhere.mkdir()
    parts_folder(out).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a symbolic link, which is not followed here; remove it"):
        run(out, file_format="h5")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("missing", [1, 3000, 20000])
def test_a_file_that_cannot_grow_is_named(run, tmp_path, capfd, missing):
    """HDF5 writes when it closes, where h5py prints errors instead of raising them."""
    resource = pytest.importorskip("resource")
    run(tmp_path / "whole.h5", file_format="h5")
    out = tmp_path / "e.h5"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "whole.h5").stat().st_size - missing, limits[1]))
    try:
        with pytest.raises(UnfinishedError, match=r"e.h5: cannot be written \(File too large\)"):
            run(out, file_format="h5")
        gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in capfd.readouterr().err
    assert not out.exists()
    run(out, file_format="h5")
    assert h5_content(out) == h5_content(tmp_path / "whole.h5")


def test_joined_folders_keep_what_is_there(run, tmp_path):
    records = proteins()
    run(tmp_path / "out", records[:2])
    run(tmp_path / "a", records[2:4])
    run(tmp_path / "b", records[4:5])
    merge_folders(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], [[3, 9], [5]])
    assert ids_of(tmp_path / "out") == [records[index].id for index in (0, 1, 2, 4, 3)]
    # Nothing needs to be computed again.
    assert run(tmp_path / "out", records[:5]).reused == 5
    run(tmp_path / "other", records[:1], include=("mean",))
    with pytest.raises(ValueError, match="holds embeddings made with include"):
        merge_folders(tmp_path / "out", [tmp_path / "other"], [[0]])


@pytest.fixture
def shard(means, tmp_path):
    """`shard(name, numbers)` writes a folder with the means of some proteins, as a shard of one file does."""

    def write(name: str, numbers: list[int], **options) -> Path:
        means(tmp_path / name, [proteins()[one] for one in numbers], file_format="safetensors", names="hash", **options)
        return tmp_path / name

    return write


@BOTH
def test_joined_shards_are_in_the_order_of_the_input(means, shard, tmp_path, monkeypatch, file_format):
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 4)
    orders = {"a": [0, 3, 4, 8], "b": [1, 2, 7], "c": [5]}
    folders = [shard(name, order, toks_per_batch=1) for name, order in orders.items()]
    out, whole = tmp_path / f"out.{file_format}", tmp_path / f"whole.{file_format}"
    means(whole, [proteins()[one] for one in sorted(chain(*orders.values()))], toks_per_batch=1)
    # Twice: what is there is the same; and over a damaged file.
    for change in (None, None, DAMAGE["cut"]):
        if change is not None:
            change(out)
        merge_files(file_format, out, folders, list(orders.values()))
        assert content(out) == content(whole)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    before = files(tmp_path)
    with pytest.raises(ValueError, match="exists, and lacks 1 of the proteins"):
        merge_files(file_format, out, [shard("d", [6])], [[6]])
    assert before.items() <= files(tmp_path).items()


@BOTH
def test_shards_that_do_not_belong_together(means, shard, tmp_path, file_format):
    a, b = shard("a", [0, 1]), shard("b", [2, 3], layers=(0,))
    out, text, other = (tmp_path / f"{name}.{file_format}" for name in ("out", "text", "other"))
    text.write_text("text")
    means(other, proteins()[:2], layers=(0,))
    for target, sources, orders, message in (
        (out, [a, b], [[0, 1], [2, 3]], "b: holds embeddings made with repr_layers"),
        (other, [a], [[0, 1]], "holds embeddings made with repr_layers"),
        (text, [a], [[0, 1]], r"exists and is not an? (HDF5|Parquet) file"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_files(file_format, target, sources, orders)
        assert not out.exists() and text.read_text() == "text"
