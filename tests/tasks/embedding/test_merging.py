"""Joining embeddings: what is there stays, and other settings are refused."""

from __future__ import annotations

import pytest

from esm_turbo.tasks.embedding.merging import merge_embeddings, merge_h5
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
