"""Joining embeddings: what is there stays, and other settings are refused."""

from __future__ import annotations

import os
from itertools import chain

import pandas
import pytest

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding import merging, parquet
from esm_turbo.tasks.embedding.merging import merge_embeddings, merge_h5, merge_parquet
from tests.helpers.embedding_files import h5_content, ids_of, proteins


def test_joined_folders_keep_what_is_there(run, tmp_path):
    records = proteins()
    run(tmp_path / "out", records[:2])
    run(tmp_path / "a", records[2:4])
    run(tmp_path / "b", records[4:5])
    merge_embeddings(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], [[3, 9], [5]])
    assert ids_of(tmp_path / "out") == [records[index].id for index in (0, 1, 2, 4, 3)]
    # Nothing needs to be computed again.
    assert run(tmp_path / "out", records[:5]).reused == 5
    run(tmp_path / "other", records[:1], include=("mean",))
    with pytest.raises(ValueError, match="holds embeddings made with include"):
        merge_embeddings(tmp_path / "out", [tmp_path / "other"], [[0]])


def test_joined_files_keep_what_is_there(run, tmp_path):
    records = proteins()
    for name, part in (("out", records[:2]), ("a", records[2:4]), ("whole", records[:4])):
        run(tmp_path / f"{name}.h5", part, file_format="h5", toks_per_batch=1)
    merge_h5(tmp_path / "out.h5", [tmp_path / "a.h5"])
    assert h5_content(tmp_path / "out.h5") == h5_content(tmp_path / "whole.h5")
    (tmp_path / "text.h5").write_text("text")
    with pytest.raises(ValueError, match="exists and is not an HDF5 file"):
        merge_h5(tmp_path / "text.h5", [tmp_path / "a.h5"])
    run(tmp_path / "other.h5", records[:1], file_format="h5", include=("mean",))
    with pytest.raises(ValueError, match="holds embeddings made with include"):
        merge_h5(tmp_path / "out.h5", [tmp_path / "other.h5"])


@pytest.mark.parametrize(("rows_per_group", "rows_held"), [(1, 9), (3, 3), (4096, 6), (4096, 65_536)])
def test_joined_tables_are_in_the_order_of_the_input(run, tmp_path, monkeypatch, rows_per_group: int, rows_held: int):
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", rows_per_group)
    monkeypatch.setattr(merging, "_ROWS_HELD", rows_held)
    records = proteins()
    orders = {"a": [0, 3, 4, 8], "b": [1, 2, 7], "c": [5]}
    for name, order in orders.items():
        run(tmp_path / f"{name}.parquet", [records[one] for one in order], None, ["mean"], (0, 2), toks_per_batch=1)
    whole = [records[one] for one in sorted(chain(*orders.values()))]
    run(tmp_path / "whole.parquet", whole, None, ["mean"], (0, 2), toks_per_batch=1)
    out, paths = tmp_path / "out.parquet", [tmp_path / f"{name}.parquet" for name in orders]
    # Twice: what is there is replaced by the same rows.
    for _ in range(2):
        merge_parquet(out, paths, list(orders.values()))
        assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    # What is there of other proteins is kept, and comes first.
    run(tmp_path / "d.parquet", [records[6], records[5]], None, ["mean"], (0, 2), toks_per_batch=1)
    merge_parquet(out, [tmp_path / "d.parquet"], [[3, 9]])
    identifiers = [one.id for one in whole if one is not records[5]] + [records[6].id, records[5].id]
    found = pandas.read_parquet(out)
    assert found["id"].tolist() == [one for one in identifiers for _ in range(2)]
    run(
        tmp_path / "expected.parquet",
        [record for record in records if record.id in identifiers],
        None,
        ["mean"],
        (0, 2),
    )
    expected = pandas.read_parquet(tmp_path / "expected.parquet").set_index(["id", "layer"])
    for row in found.itertuples():
        assert row.mean == pytest.approx(expected.loc[(row.id, row.layer), "mean"], rel=1e-5, abs=1e-5)


def test_more_tables_than_may_be_open(run, tmp_path):
    resource = pytest.importorskip("resource")
    records = proteins(range(3, 43))[:40]
    orders = [[index, 40 + index] for index in range(30)]
    records += [ProteinRecord(f"more {index}", f"MK{record.sequence}") for index, record in enumerate(records)]
    paths = [tmp_path / f"{index}.parquet" for index in range(30)]
    for path, order in zip(paths, orders, strict=True):
        run(path, [records[one] for one in order], None, ["mean"], toks_per_batch=1)
    numbers = sorted(chain(*orders))
    run(tmp_path / "whole.parquet", [records[one] for one in numbers], None, ["mean"], toks_per_batch=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, limits[1]))
    try:
        merge_parquet(tmp_path / "out.parquet", paths, orders)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_tables_that_do_not_belong_together(run, tmp_path):
    records = proteins()
    run(tmp_path / "a.parquet", records[:2], None, ["mean"])
    run(tmp_path / "b.parquet", records[2:4], None, ["mean"], (0,))
    both = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(ValueError, match=r"b\.parquet: holds embeddings made with repr_layers"):
        merge_parquet(tmp_path / "out.parquet", both, [[0, 1], [2, 3]])
    for order in ([0], [1, 0]):
        with pytest.raises(ValueError, match="does not hold the proteins that its manifest names"):
            merge_parquet(tmp_path / "out.parquet", both[:1], [order])
    assert not (tmp_path / "out.parquet").exists()
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(ValueError, match="exists and is not a Parquet file"):
        merge_parquet(tmp_path / "text.parquet", both[:1], [[0, 1]])
    with pytest.raises(ValueError, match="holds embeddings made with repr_layers"):
        merge_parquet(both[1], both[:1], [[0, 1]])
