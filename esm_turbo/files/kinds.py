"""Recognise the contents of a file or folder by names and first bytes alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

CALIBRATION_FILE = "calibration.safetensors"
STORE_FILE = "store.safetensors"
INDEX_FILE = "index.tsv"
SETTINGS_FILE = "settings.json"
PARQUET_KIND, PICTURE_KIND = "a Parquet file", "a picture"

_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "vocab.txt")
_HDF5, _ZIP, _PARQUET = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"PAR1"
_PICTURES = (b"\x89PNG\r\n\x1a\n", b"%PDF-")
_HEAD_BYTES = 4096
# A larger header would not be one of safetensors.
_MAX_HEADER_BYTES = 100_000_000


def is_store(folder: str | os.PathLike[str]) -> bool:
    """True if a folder is a context store, of any version."""
    return (Path(folder) / STORE_FILE).is_file()


def is_embeddings(path: str | os.PathLike[str]) -> bool:
    """True if a path is a folder of embeddings."""
    return all((Path(path) / name).is_file() for name in (INDEX_FILE, SETTINGS_FILE))


def is_h5(path: str | os.PathLike[str]) -> bool:
    """True if a file is HDF5."""
    return _begins(path, _HDF5)


def is_parquet(path: str | os.PathLike[str]) -> bool:
    """True if a file is Parquet."""
    return _begins(path, _PARQUET)


def is_zip(path: str | os.PathLike[str]) -> bool:
    """True if a file is a zip archive, as `torch.save` writes it."""
    return _begins(path, _ZIP)


def _begins(path: str | os.PathLike[str], signature: bytes) -> bool:
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(signature)) == signature


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """True if a folder holds a model in the format of Hugging Face."""
    folder = Path(folder)
    return (folder / "config.json").is_file() and any(next(folder.glob(name), None) for name in _WEIGHTS)


def binary_kind(path: str | os.PathLike[str]) -> str | None:
    """Name the contents of a binary file, such as `a calibration`; None for text, an empty or missing file."""
    path = Path(path)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(_PARQUET):
            return PARQUET_KIND
        if head.startswith(_PICTURES):
            return PICTURE_KIND
        size = int.from_bytes(head[:8], "little")
        if head[8:9] == b"{" and size <= _MAX_HEADER_BYTES:
            file.seek(8)
            try:
                kind = json.loads(file.read(size)).get("__metadata__", {}).get("kind", "file of tensors")
            except ValueError:
                kind = "damaged file of tensors"
            return f"a {kind}"
    # Compressed files may begin with bytes other than zero.
    return "a binary file" if b"\0" in head or head.startswith(b"\x1f\x8b") else None
