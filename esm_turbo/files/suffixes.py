"""The suffix of an output's name: it decides the format, or the name is refused. A name without one is accepted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TABLES = (*TABLE_DELIMITERS, PARQUET)
SEQUENCES = (".fasta", ".fa", ".faa", ".fas")
TENSORS = (".safetensors",)
HDF5 = (".h5", ".hdf5")
_ONE_FILE: dict[str, Literal["h5", "parquet"]] = {**dict.fromkeys(HDF5, "h5"), PARQUET: "parquet"}
PICTURES = (".html", ".pdf", ".png", ".svg")
# Not `.5`, as in the name of a setting, nor `.v2`.
_FILE_SUFFIX = re.compile(r"(?!\.v\d+$)\.[A-Za-z]\w*", re.ASCII)


class SuffixError(ValueError):
    """The name of an output promises a format that is not written."""


def check_suffix(path: str | os.PathLike[str], allowed: Iterable[str]) -> str:
    """Return the suffix of an output's name, in lower case; empty if there is none.

    Raises:
        SuffixError: it is not one of `allowed`.
    """
    suffix, allowed = Path(path).suffix.lower(), tuple(allowed)
    if suffix and suffix not in allowed:
        raise SuffixError(f"{os.fspath(path)}: must end in {one_of(allowed)}, or have no suffix; got {suffix}")
    return suffix


def one_of(names: Sequence[str]) -> str:
    """Names as a choice in words, such as `.csv, .tsv or .parquet`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def embedding_format(
    out: str | os.PathLike[str], given: Literal["pt", "h5", "safetensors", "parquet"] | None = None
) -> Literal["pt", "h5", "safetensors", "parquet"]:
    """Format of embeddings: the given one, or else `h5` or `parquet` for a name that ends so, and `pt` for any other.

    Raises:
        SuffixError: the name belongs to another format than the given one.
    """
    suffix = Path(out).suffix.lower()
    named = _ONE_FILE.get(suffix)
    if named is not None:
        if given in ("pt", "safetensors"):
            raise SuffixError(
                f"{os.fspath(out)}: ends in {suffix}, but {given} embeddings are a folder; name one, or use format"
                f" {named}"
            )
        if given not in (None, named):
            raise SuffixError(f"{os.fspath(out)}: ends in {suffix}, which is format {named}, not {given}")
        return named
    if given == "parquet":
        check_suffix(out, [PARQUET])
    elif given != "h5":
        check_folder_name(out, f", or one that ends in {' or '.join(_ONE_FILE)} for one file")
    return given or "pt"


def check_folder_name(path: str | os.PathLike[str], alternative: str = "") -> None:
    """Make sure that a folder to write is not named as a file; one that exists may be named anyhow.

    Args:
        path: of the folder.
        alternative: end of the error, what else could be named.

    Raises:
        SuffixError: it is.
    """
    suffix = Path(path).suffix
    if _FILE_SUFFIX.fullmatch(suffix) and not Path(path).is_dir():
        raise SuffixError(f"{os.fspath(path)}: a folder is written; give a name without {suffix}{alternative}")
