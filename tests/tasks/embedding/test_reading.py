"""Reading embeddings again, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.reading import read_embeddings

RECORDS = [ProteinRecord("a/b", "MKTAY"), ProteinRecord("twin", "MKTAY"), ProteinRecord("c", "GS")]


@pytest.mark.parametrize("file_format", ["pt", "safetensors", "h5"])
@pytest.mark.parametrize("include", [["mean"], ["per_tok"], ["contacts"], ["mean", "per_tok", "contacts"]])
def test_what_was_written_is_read(run, tiny, tmp_path, file_format: str, include: list[str]) -> None:
    out = tmp_path / ("e.h5" if file_format == "h5" else "e")
    run(out, RECORDS, file_format, include)
    expected = tiny.embed([record.sequence for record in RECORDS], include=include)
    found = list(read_embeddings(out, file_format, RECORDS[::-1]))[::-1]
    for arrays, embedding in zip(found, expected, strict=True):
        tensors = embedding.tensors()
        assert set(arrays) == set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_allclose(arrays[name], tensor.numpy(), rtol=1e-5, atol=1e-5)


def test_means_of_a_table(run, tiny, tmp_path) -> None:
    run(tmp_path / "e.parquet", RECORDS, "parquet", ["mean"], layers=(0, -1))
    expected = tiny.embed([record.sequence for record in RECORDS], repr_layers=(0, -1), include=["mean"])
    for arrays, embedding in zip(read_embeddings(tmp_path / "e.parquet", "parquet", RECORDS), expected, strict=True):
        assert arrays.keys() == embedding.tensors().keys()
        for name, tensor in embedding.tensors().items():
            np.testing.assert_allclose(arrays[name], tensor.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file_format", ["pt", "h5", "parquet"])
def test_a_protein_that_is_not_there(run, tmp_path, file_format: str) -> None:
    out = tmp_path / {"pt": "e", "h5": "e.h5", "parquet": "e.parquet"}[file_format]
    run(out, RECORDS[:1], file_format, ["mean"])
    with pytest.raises(ValueError, match="holds no embedding of 'c'; embed it first"):
        list(read_embeddings(out, file_format, RECORDS[2:]))
