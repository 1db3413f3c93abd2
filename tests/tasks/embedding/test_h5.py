"""Embeddings in an HDF5 file: its entries, damage, and files of other kinds."""

import gc
import json
import re
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch

from esm_turbo.files.extras import install_hint
from esm_turbo.files.writing import LOCK_FILE, parts_folder
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import sequence_hash
from esm_turbo.tasks.embedding.h5 import H5File, h5_info
from esm_turbo.tasks.embedding.records import UnfinishedError
from tests.helpers.embedding_files import DAMAGE, files, full_disk, h5_content, proteins


def test_one_result_is_a_data_set_and_several_are_a_group(run, tiny, tmp_path):
    records = [ProteinRecord("a/b", "MKTAY"), ProteinRecord("twin", "MKTAY"), ProteinRecord("c", "GS")]
    run(tmp_path / "one.h5", records, "h5", ["mean"])
    run(tmp_path / "two.h5", records, "h5", ["mean", "per_tok"])
    [expected, _, _] = tiny.embed([record.sequence for record in records])
    name = sequence_hash("MKTAY")
    with h5py.File(tmp_path / "one.h5") as one, h5py.File(tmp_path / "two.h5") as two:
        assert set(one) == set(two) == {name, sequence_hash("GS")}
        for entry in (one[name], two[name]):
            assert (entry.attrs["original_id"], list(entry.attrs["other_ids"])) == ("a/b", ["twin"])
        assert "other_ids" not in one[sequence_hash("GS")].attrs
        assert json.loads(one.attrs["settings"])["include"] == ["mean"]
        mean, per_tok = expected.mean_representations[2], expected.representations[2]
        for found, tensor in (
            (one[name], mean),
            (two[name]["mean_representations/2"], mean),
            (two[name]["representations/2"], per_tok),
        ):
            assert found.dtype == np.float32
            torch.testing.assert_close(torch.from_numpy(found[()]), tensor, rtol=1e-5, atol=1e-5)
    assert not parts_folder(tmp_path / "one.h5").exists()


def test_an_entry_shared_by_many_proteins(run, tmp_path):
    # More than the 64 KiB that attributes of old HDF5 files can hold.
    records = [ProteinRecord(f"a_rather_long_identifier_{index}", "MKTAY") for index in range(6000)]
    run(tmp_path / "e.h5", records, "h5", ["mean"])
    with h5py.File(tmp_path / "e.h5") as file:
        [entry] = file.values()
        assert list(entry.attrs["other_ids"]) == [record.id for record in records[1:]]


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_file_is_computed_again(run, tmp_path, computed, damage):
    out = tmp_path / "e.h5"
    run(out, None, "h5")
    expected = h5_content(out)
    DAMAGE[damage](out)
    computed.clear()
    result = run(out, None, "h5")
    assert result.damaged == [str(out)]
    assert len(computed) == 4
    assert h5_content(out) == expected


def test_a_file_whose_settings_cannot_be_read_is_computed_again(run, tmp_path, computed, monkeypatch):
    out = tmp_path / "e.h5"
    run(out, None, "h5")
    expected = h5_content(out)
    computed.clear()
    read = h5py.AttributeManager.__getitem__

    def damaged(self, name):
        if name != "settings":
            return read(self, name)
        raise OSError("Can't synchronously read data (ran off end of input buffer while decoding)")

    with monkeypatch.context() as patch:
        patch.setattr(h5py.AttributeManager, "__getitem__", damaged)
        result = run(out, None, "h5")
    assert result.damaged == [str(out)]
    assert len(computed) == 4
    assert h5_content(out) == expected


def test_a_damaged_entry_is_computed_again(run, tmp_path, computed):
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


def test_other_settings_are_refused_for_an_unfinished_file(run, tmp_path, monkeypatch):
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


def test_identifiers_of_an_unfinished_file_are_not_escaped(run, tmp_path, monkeypatch):
    """Its index neutralises what a spreadsheet would run."""
    out = tmp_path / "e.h5"
    records = [ProteinRecord("=abc", "MKTAY"), ProteinRecord("-x", "GSGS")]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(H5File, "write", Mock(side_effect=KeyboardInterrupt))
        run(out, records, "h5")
    run(out, records, "h5")
    with h5py.File(out) as file:
        assert sorted(entry.attrs["original_id"] for entry in file.values()) == ["-x", "=abc"]
        assert not any("other_ids" in entry.attrs for entry in file.values())


def test_a_file_of_another_kind_is_not_overwritten(run, tmp_path):
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
    with pytest.raises(ValueError, match="holds no embeddings of esm-turbo"):
        h5_info(foreign)
    assert files(tmp_path) == before


def test_a_new_or_empty_file_can_be_written(tmp_path):
    path = tmp_path / "e.h5"
    H5File.check(path, ["mean"])
    assert not path.exists()
    path.touch()
    H5File.check(path, ["mean"])


def test_without_h5py_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=re.escape(f"format h5 needs h5py: {install_hint('h5')}")):
        H5File.check(tmp_path / "e.h5", ["mean"])


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


def test_exchanged_entries_are_computed_again(run, tmp_path, computed):
    out = tmp_path / "e.h5"
    run(out, None, "h5", toks_per_batch=1)
    expected = h5_content(out)
    first, second = (sequence_hash(proteins()[index].sequence) for index in (1, 7))
    with h5py.File(out, "a") as file:
        file.move(first, "x"), file.move(second, first), file.move("x", second)
    computed.clear()
    result = run(out, None, "h5", toks_per_batch=1)
    assert sorted(result.damaged) == sorted(f"{out}, entry {name}" for name in (first, second))
    assert sum(map(len, computed)) == 2
    assert h5_content(out) == expected


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
