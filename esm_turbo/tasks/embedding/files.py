"""The files of embeddings in a folder: their names, how they are written and read, and the settings of the folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.identity import OTHER_OUTPUTS, same_outputs
from esm_turbo.files.kinds import SETTINGS_FILE
from esm_turbo.files.writing import file_errors, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.request import RESULT_NAMES, ProteinEmbedding

FORMAT_VERSION = 2
CACHE_SUFFIX = ".cache.safetensors"
_HASH = "[0-9a-f]{64}"
# Short enough for a file name with the longest suffix and that of a temporary. Not what could be the hash of another
# sequence, nor the name of a device on Windows.
_SAFE_LABEL = re.compile(
    rf"(?!{_HASH}$)(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[a-z0-9_][a-z0-9_.|+=@-]{{0,149}}",
    re.ASCII | re.IGNORECASE,
)
# Recorded with the settings; another device changes results by rounding only.
_UNCOMPARED = {"device", "probe"}

SameSequence = Sequence[ProteinRecord]
"""Proteins with the same sequence, at least one; they share one embedding."""

Arrays = dict[str, npt.NDArray[np.float32]]
"""Results of a protein by flat name, such as `mean_representations.12`."""


class Row(NamedTuple):
    """A protein in one file of many.

    Attributes:
        identifier: of the protein.
        name: hash of its whole sequence.
        residues: of its whole sequence.
        arrays: its results.
    """

    identifier: str
    name: str
    residues: int
    arrays: Arrays


def sequence_hash(sequence: str) -> str:
    """Name of a sequence's files and data sets, as in biotrainer: SHA-256 of the sequence and its length."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def is_hashed(name: str) -> bool:
    """Whether a file in a folder is named by the hash of a sequence."""
    return re.fullmatch(_HASH, name.partition(".")[0]) is not None


def file_suffixes(file_format: EmbeddingFormat, include: Iterable[str]) -> list[str]:
    """Suffixes of the files of a sequence: that of its embedding, and that of its cache."""
    return [f".{file_format}"] * bool(set(include) - {"cache"}) + [CACHE_SUFFIX] * ("cache" in include)


def safe_labels(identifiers: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Of the identifiers of sequences, by hash, those of sequences whose files can be named by the first: the label.

    Safe are letters, digits and `_ . | + = @ -`, the punctuation but for `_` not at the beginning; what could be a hash
    is not. Names that only differ in case are the same to some systems.
    """
    uses = Counter(name.lower() for names in identifiers.values() for name in set(names))
    return {
        sequence: names
        for sequence, names in identifiers.items()
        if _SAFE_LABEL.fullmatch(names[0]) and not names[0].endswith((".", ".cache")) and uses[names[0].lower()] == 1
    }


class PartFiles:
    """Writes the parts of a run: one file for the embedding of each sequence, one for its cache, named by its hash.

    Several processes may do so, each for sequences of its own. A part counts once `FolderWriter.add` has moved it.

    Args:
        folder: the folder, a temporary of the run.
        suffixes: of the files, see `file_suffixes`.
        content: the settings on which their content depends.

    Raises:
        OSError: by `write`, if a file cannot be written.
    """

    def __init__(self, folder: Path, suffixes: Sequence[str], content: Mapping[str, Any]) -> None:
        self.folder, self.suffixes = folder, suffixes
        self._content = dict(content)

    def key(self, sequence: str) -> str:
        """What the content of a sequence's embedding depends on: a hash of its residues and of the settings."""
        return hashlib.sha256(json.dumps([sequence, self._content], sort_keys=True).encode()).hexdigest()

    def path(self, sequence: str, suffix: str) -> Path:
        """The part of a sequence with one of the suffixes."""
        return self.folder / f"{sequence_hash(sequence)}{suffix}"

    def write(self, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        """Write the embedding of a protein, or of one of several with its sequence."""
        metadata = {"label": record.id, "key": self.key(record.sequence)}
        for suffix in self.suffixes:
            path = self.path(record.sequence, suffix)
            with file_errors(self.folder.parent / path.name), replacing(path, inside=True) as temporary:
                if suffix == CACHE_SUFFIX:
                    assert embedding.cache is not None
                    embedding.cache.save(temporary)
                elif suffix == ".pt":
                    results = {name: getattr(embedding, name) for name in RESULT_NAMES.values()}
                    results = {name: result for name, result in results.items() if result is not None}
                    # In memory first: torch writes a file's own name into it, and reports a full disk as an internal
                    # error.
                    buffer = io.BytesIO()
                    torch.save(metadata | results, buffer)
                    temporary.write_bytes(buffer.getbuffer())
                else:
                    about = metadata | {"residues": len(record.sequence)}
                    write_artifact(temporary, "embedding", FORMAT_VERSION, embedding.tensors(), about)


def read_entry(path: Path) -> tuple[Arrays, str]:
    """Read the embedding in a file, and the hash of the sequence and the settings that it was written with.

    Raises:
        ValueError: the file is missing, damaged or of another kind.
    """
    if path.suffix == ".pt":
        metadata = read_pt(path)
        tensors = pt_tensors(metadata)
    else:
        metadata, tensors = read_embedding(path)
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}, str(metadata.get("key", ""))


def read_embedding(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read an embedding in safetensors format.

    Returns:
        Metadata (`label`, `residues`), and tensors by flat name.

    Raises:
        ValueError: the file is missing, damaged or of another kind.
    """
    tensors, metadata = read_artifact(path, "embedding", FORMAT_VERSION)
    return metadata, tensors


def read_pt(path: Path) -> dict[str, Any]:
    """Read a file of torch.save, and check the checksums of its parts, which torch ignores.

    Raises:
        ArtifactError: the file is damaged or truncated.
        MemoryError: an undamaged file does not fit into memory.
    """
    bad: str | None = ""
    try:
        buffer = io.BytesIO(path.read_bytes())
        with zipfile.ZipFile(buffer) as file:
            bad = file.testzip()
            # For a part marked as a folder, torch reads uninitialised memory; it marks none itself.
            bad = bad or next((part.filename for part in file.infolist() if part.external_attr), None)
        buffer.seek(0)
        content = dict(torch.load(buffer, weights_only=True))
    # A damaged header can raise almost any exception.
    except Exception as error:
        if isinstance(error, MemoryError) and not bad:
            raise
        raise ArtifactError(f"{path}: damaged ({error})") from error
    if bad is not None:
        raise ArtifactError(f"{path}: damaged ({bad} was altered)")
    return content


def pt_tensors(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Results of an embedding in the format of `torch.save`, by flat name such as `mean_representations.12`."""
    flat: dict[str, Any] = {}
    for name, result in content.items():
        layers = result.items() if isinstance(result, dict) else ()
        flat |= {name: result} | {f"{name}.{layer}": x for layer, x in layers}
    return {name: x for name, x in flat.items() if isinstance(x, torch.Tensor)}


def pt_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents of one embedding in the format of `torch.save`.

    Raises:
        ArtifactError: (a ValueError) the file is damaged, or another program's.
    """
    content = read_pt(Path(path))
    if "label" not in content:
        raise ArtifactError(f"{os.fspath(path)}: is not an embedding of esm_turbo")
    tensors = {name: list(tensor.shape) for name, tensor in pt_tensors(content).items()}
    texts = {name: value for name, value in content.items() if isinstance(value, str)}
    return {"kind": "embedding", **texts, "tensors": tensors}


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings that a folder of embeddings records.

    Raises:
        ValueError: they are damaged.
    """
    path = folder / SETTINGS_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); give another folder") from error
    return settings


def check_same_settings(path: Path, existing: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that existing embeddings were made with the same settings as new ones.

    Args:
        path: the folder or file of the embeddings, for the error.
        existing: their settings.
        settings: those of the new ones.

    Raises:
        ValueError: a setting differs; the message names the first one.
    """
    for name in dict.fromkeys([*settings, *existing]):
        # A field may be None, but not absent.
        old, new = existing.get(name, "missing"), settings.get(name, "missing")
        if name not in _UNCOMPARED and old != new:
            raise ValueError(
                f"{path}: holds embeddings made with {name} {old}, not {new}; give another path, or the same options"
            )
    if not same_outputs(existing.get("probe", ""), settings.get("probe", ""), settings.get("dtype", "")):
        raise ValueError(f"{path}: holds embeddings of another model: {OTHER_OUTPUTS}; give another path")
