"""Means in a Parquet file: rows, damage, and files of other kinds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch

from esm_turbo.files.extras import install_hint
from esm_turbo.files.parquet import parquet_info, write_parquet
from esm_turbo.files.writing import parts_folder
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding import parquet
from esm_turbo.tasks.embedding.files import sequence_hash
from esm_turbo.tasks.embedding.parquet import MeansFile
from esm_turbo.tasks.embedding.records import UnfinishedError
from tests.helpers.embedding_files import DAMAGE, files, full_disk, proteins

RECORDS = [ProteinRecord("=a/b", "MKTAY"), ProteinRecord("twin", "MKTAY"), ProteinRecord("c", "GS")]


@pytest.fixture
def means(run):
    """`means(out, records)` writes the means of two layers."""

    def write(out: Path, records=None, **options):
        options = {"include": ("mean",), "layers": (1, 2)} | options
        return run(out, records, None, options.pop("include"), options.pop("layers"), **options)

    return write


@pytest.mark.parametrize("rows_per_group", [1, 4, 4096])
def test_a_row_for_every_layer_of_every_protein(means, tiny, tmp_path, monkeypatch, rows_per_group: int) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", rows_per_group)
    means(tmp_path / "m.parquet", RECORDS)
    table = pyarrow.parquet.read_table(tmp_path / "m.parquet")
    hidden = tiny.model.config.hidden_size
    assert [f"{field.name} {field.type}" for field in table.schema] == [
        "id string", "sequence_hash string", "residues int64", "layer int64",
        f"mean fixed_size_list<element: float>[{hidden}]",
    ]  # fmt: skip
    frame = pandas.read_parquet(tmp_path / "m.parquet")
    assert frame[["id", "residues", "layer"]].values.tolist() == [
        ["=a/b", 5, 1], ["=a/b", 5, 2], ["twin", 5, 1], ["twin", 5, 2], ["c", 2, 1], ["c", 2, 2],
    ]  # fmt: skip
    assert frame["sequence_hash"].tolist() == [sequence_hash(one.sequence) for one in RECORDS for _ in range(2)]
    expected = tiny.embed([one.sequence for one in RECORDS], repr_layers=(1, 2), include=["mean"])
    tensors = [one.mean_representations[layer] for one in expected for layer in (1, 2)]
    found = torch.from_numpy(np.stack(frame["mean"].to_list()))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(tensors), rtol=1e-5, atol=1e-5)
    assert MeansFile(tmp_path / "m.parquet").settings["repr_layers"] == [1, 2]
    info = parquet_info(tmp_path / "m.parquet")
    assert info["rows"] == 6 and info["settings"]["include"] == ["mean"] and info["settings"]["device"] == "cpu"
    assert list(tmp_path.iterdir()) == [tmp_path / "m.parquet"]


def test_a_folder_of_tables_is_one(means, tmp_path) -> None:
    for number in (0, 1):
        means(tmp_path / f"shard-{number}.parquet", proteins()[5 * number : 5 * number + 5])
    # Of a shard that was stopped, and its manifest.
    (tmp_path / ".shard-2.parquet.parts").mkdir()
    (tmp_path / ".shard-2.parquet.parts" / "x.safetensors").write_text("")
    (tmp_path / "_shard-1.json").write_text("{}")
    frame = pandas.read_parquet(tmp_path, filters=[("layer", "==", 2)])
    assert frame["id"].tolist() == [record.id for record in proteins()]
    assert pyarrow.dataset.dataset(tmp_path).count_rows() == 20


def test_an_interrupted_run_continues_with_the_same_bytes(means, tmp_path, monkeypatch, computed) -> None:
    means(tmp_path / "whole.parquet")
    whole = len(computed)
    computed.clear()
    out = tmp_path / "m.parquet"
    with monkeypatch.context() as patch:
        full_disk(patch, 4)
        with pytest.raises(UnfinishedError):
            means(out)
    assert not out.exists() and parts_folder(out).exists()
    assert len(computed) < whole
    assert means(out).reused > 0
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.parquet", "whole.parquet"]


def test_what_is_there_is_kept(means, tmp_path, computed, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 4)
    records, out = proteins(), tmp_path / "m.parquet"
    means(out, records[:3], toks_per_batch=1)
    computed.clear()
    assert means(out, [records[4], *records[1:3]], toks_per_batch=1).reused == 2
    assert computed == [[records[4].sequence]]
    found = pyarrow.parquet.read_table(out)
    assert found.column("id").to_pylist()[::2] == [records[index].id for index in (0, 4, 1, 2)]
    means(tmp_path / "new.parquet", [records[index] for index in (0, 4, 1, 2)], toks_per_batch=1)
    assert out.read_bytes() == (tmp_path / "new.parquet").read_bytes()
    before = out.stat().st_mtime_ns
    assert means(out, [records[4], *records[1:3]], toks_per_batch=1).reused == 3
    assert out.stat().st_mtime_ns == before
    # A twin has rows of its own, which need no computation.
    computed.clear()
    assert means(out, [*proteins()[4:5], records[-1]], toks_per_batch=1).reused == 2 and not computed
    assert pandas.read_parquet(out)["id"].tolist()[-1] == "twin"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_table_is_computed_again(means, tmp_path, damage: str) -> None:
    out = tmp_path / "m.parquet"
    means(out)
    before = out.read_bytes()
    DAMAGE[damage](out)
    run = means(out)
    assert run.reused == 0 and run.damaged == [str(out)]
    assert out.read_bytes() == before


def test_a_table_that_another_program_changed_is_computed_again(means, tmp_path) -> None:
    out = tmp_path / "m.parquet"
    means(out)
    table, before = pyarrow.parquet.read_table(out), out.read_bytes()
    for changed in (table.slice(1), table.slice(0, 3), table.drop_columns(["residues"]), table.take([0, 3])):
        pyarrow.parquet.write_table(changed, out)
        assert means(out).damaged == [str(out)]
        assert out.read_bytes() == before


def test_other_results_settings_and_files_are_refused(means, tmp_path) -> None:
    out = tmp_path / "m.parquet"
    with pytest.raises(ValueError, match="a Parquet file holds means: include `mean` alone, not mean per_tok"):
        means(out, include=("mean", "per_tok"))
    with pytest.raises(ValueError, match="one Parquet file has no names of files"):
        means(out, names="label")
    assert not list(tmp_path.iterdir())
    means(out)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"m\.parquet: holds embeddings made with repr_layers \[1, 2\], not \[2\]"):
        means(out, layers=(2,))
    assert files(tmp_path) == before
    out.write_text(">a\nMKTAY\n")
    with pytest.raises(ValueError, match="exists and is not a Parquet file"):
        means(out)
    write_parquet(out, ["id"], [["a"]], {}, {"settings": {"arm": "full"}})
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"m\.parquet: holds no embeddings of esm-turbo"):
        means(out)
    assert files(tmp_path) == before


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=re.escape(f"Parquet needs pyarrow: {install_hint('parquet')}")):
        MeansFile.check(tmp_path / "m.parquet", ["mean"])
