"""The suffix of an output decides its format, or is refused."""

from pathlib import Path

import pytest

from esm_turbo.files.suffixes import TABLES, SuffixError, check_suffix, embedding_format
from esm_turbo.tasks.common.options import EmbeddingFormat


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.csv", ".csv"), ("A.TSV", ".tsv"), ("a.Parquet", ".parquet"), ("scores", ""), ("b.d/scores", "")],
)
def test_suffixes_of_what_is_written(name: str, suffix: str) -> None:
    assert check_suffix(Path(name), TABLES) == suffix


@pytest.mark.parametrize("name", ["a.xlsx", "a.csv.gz", "a.json"])
def test_other_suffixes_are_refused(name: str) -> None:
    with pytest.raises(
        SuffixError, match=rf"{name}: must end in \.csv, \.tsv or \.parquet, or have no suffix; got \.\w+$"
    ):
        check_suffix(name, TABLES)


@pytest.mark.parametrize(
    ("out", "given", "expected"),
    [
        ("x", None, "pt"),
        ("x.v2", None, "pt"),
        ("x.parquet", None, "parquet"),
        ("x.PARQUET", "parquet", "parquet"),
        ("x", "parquet", "parquet"),
        ("scale_0.5", None, "pt"),
        ("x.npz", "h5", "h5"),
        ("x.h5", None, "h5"),
        ("x.HDF5", None, "h5"),
        ("x", "h5", "h5"),
        ("x", "safetensors", "safetensors"),
    ],
)
def test_the_format_of_embeddings(out: str, given: str | None, expected: str) -> None:
    assert embedding_format(out, given) == expected


@pytest.mark.parametrize("name", ["x.npz", "x.pt", "x.CSV", "b/x.safetensors"])
@pytest.mark.parametrize("given", [None, "pt", "safetensors"])
def test_a_folder_has_no_suffix_of_a_file(tmp_path: Path, name: str, given: EmbeddingFormat | None) -> None:
    out = tmp_path / name
    with pytest.raises(
        SuffixError, match=rf"{out.name}: a folder is written; give a name without {out.suffix}, or one"
    ):
        embedding_format(out, given)
    out.mkdir(parents=True)
    assert embedding_format(out, given) == (given or "pt")


@pytest.mark.parametrize("given", ["pt", "safetensors"])
def test_a_folder_is_not_named_as_a_file(given: str) -> None:
    with pytest.raises(SuffixError, match=f"x.h5: ends in .h5, but {given} embeddings are a folder"):
        embedding_format("x.h5", given)


def test_a_file_is_not_named_as_one_of_another_format() -> None:
    with pytest.raises(SuffixError, match=r"x\.h5: ends in \.h5, which is format h5, not parquet"):
        embedding_format("x.h5", "parquet")
    with pytest.raises(SuffixError, match=r"x\.parquet: ends in \.parquet, which is format parquet, not h5"):
        embedding_format("x.parquet", "h5")
    with pytest.raises(SuffixError, match=r"x\.csv: must end in \.parquet, or have no suffix; got \.csv"):
        embedding_format("x.csv", "parquet")
