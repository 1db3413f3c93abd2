"""Embeddings on disk: a folder of `.pt` or safetensors files with an index.

Files are named by an identifier, where that is a safe name, and else by a hash of the sequence. A file is written
atomically, and checked before a later run reuses it. A folder holds the embeddings of one model with one set of
options, recorded in `settings.json`, and one process writes to it at a time.

A batch is done when its rows are in `index.tsv`, to which they are appended after its files are written. A killed run
therefore leaves whole batches, and a run that resumes it computes the same batches as an uninterrupted one.
"""

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
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.files.writing import file_errors, refuse_links, remove_temporaries, replacing
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat, FileNames
from esm_turbo.tasks.embedding.index import EmbeddingIndex, SameSequence
from esm_turbo.tasks.embedding.request import RESULT_NAMES, ProteinEmbedding

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

FORMAT_VERSION = 2
CACHE_SUFFIX = ".cache.safetensors"
# Short enough for a file name with the longest suffix and that of a temporary. Not what could be the hash of another
# sequence, nor the name of a device on Windows.
_SAFE_LABEL = re.compile(
    r"(?![0-9a-f]{64}$)(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[a-z0-9_][a-z0-9_.|+=@-]{0,149}",
    re.ASCII | re.IGNORECASE,
)
# Recorded with the settings; another device changes results by rounding only.
_UNCOMPARED = {"device"}


def sequence_hash(sequence: str) -> str:
    """Name of a sequence's files and data sets, as in biotrainer: SHA-256 of the sequence and its length."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def safe_labels(groups: Iterable[SameSequence]) -> dict[str, list[str]]:
    """Sequences whose files can be named by a label, with their identifiers; the first one is the label.

    Safe are letters, digits and `_ . | + = @ -`, the punctuation but for `_` not at the beginning; what could be a hash
    is not. Names that only differ in case are the same to some systems.
    """
    identifiers = {group[0].sequence: list(dict.fromkeys(record.id for record in group)) for group in groups}
    uses = Counter(name.lower() for names in identifiers.values() for name in names)
    return {
        sequence: names
        for sequence, names in identifiers.items()
        if _SAFE_LABEL.fullmatch(names[0]) and not names[0].endswith((".", ".cache")) and uses[names[0].lower()] == 1
    }


def read_embedding(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read an embedding in safetensors format.

    Returns:
        Metadata (`label`, `residues`), and tensors by flat name.

    Raises:
        ValueError: the file is missing, damaged or of another kind.
    """
    tensors, metadata = read_artifact(path, "embedding", FORMAT_VERSION)
    return metadata, tensors


def embeddings_info(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of the embeddings in a folder, and their number of proteins.

    Raises:
        ValueError: the settings are damaged.
    """
    proteins = sum(1 for _ in EmbeddingIndex(Path(folder) / INDEX_FILE).rows)
    settings = read_settings(Path(folder))
    return described(str(settings.pop("format", None)), proteins, settings)


def described(file_format: str, proteins: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings as `esm-turbo info` describes them; the options of their caches stand as `cache_options`."""
    renamed = {"cache_options" if name == "cache" else name: value for name, value in settings.items()}
    return {"kind": "embeddings", "proteins": proteins, "format": file_format, **renamed}


def index_rows(folder: Path) -> list[list[str]]:
    """Rows of a folder's index: identifier, number of residues, and the files of the embedding and the cache."""
    return list(EmbeddingIndex(folder / INDEX_FILE).rows)


def pt_tensors(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Results of an embedding in the format of `torch.save`, by flat name such as `mean_representations.12`."""
    flat = {name: result for name, result in content.items() if isinstance(result, torch.Tensor)}
    for name, layers in content.items():
        flat |= {f"{name}.{layer}": x for layer, x in layers.items()} if isinstance(layers, dict) else {}
    return flat


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


class PartFiles:
    """Writes the parts of a run: one file for the embedding of each sequence, one for its cache, named by its hash.

    Several processes may do so, each for sequences of its own. A part counts once `FolderWriter.add` has moved it.

    Args:
        folder: the folder, a temporary of the run.
        file_format: format of the embeddings.
        include: the results that are requested.
        content: the settings on which their content depends.

    Raises:
        OSError: by `write`, if a file cannot be written.
    """

    def __init__(
        self, folder: Path, file_format: EmbeddingFormat, include: Iterable[str], content: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.file_format = file_format
        self.suffixes = [f".{file_format}"] if set(include) - {"cache"} else []
        self.suffixes += [CACHE_SUFFIX] if "cache" in include else []
        self._content = dict(content)

    def key(self, sequence: str) -> str:
        """What the content of a sequence's embedding depends on: a hash of its residues and of the settings."""
        return hashlib.sha256(json.dumps([sequence, self._content], sort_keys=True).encode()).hexdigest()

    def paths(self, sequence: str) -> dict[str, Path]:
        """The parts of a sequence by suffix."""
        return {suffix: self.folder / f"{sequence_hash(sequence)}{suffix}" for suffix in self.suffixes}

    def write(self, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        """Write the embedding of a protein, or of one of several with its sequence."""
        for suffix, path in self.paths(record.sequence).items():
            with file_errors(self.folder.parent / path.name), replacing(path, inside=True) as temporary:
                if suffix == CACHE_SUFFIX:
                    assert embedding.cache is not None
                    embedding.cache.save(temporary)
                else:
                    self._write_embedding(temporary, record, embedding)

    def _write_embedding(self, path: Path, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        if self.file_format == "safetensors":
            metadata = {"label": record.id, "residues": len(record.sequence), "key": self.key(record.sequence)}
            write_artifact(path, "embedding", FORMAT_VERSION, embedding.tensors(), metadata)
            return
        results = {
            name: getattr(embedding, name) for name in RESULT_NAMES.values() if getattr(embedding, name) is not None
        }
        # In memory first: torch writes a file's own name into it, and reports a full disk as an internal error.
        buffer = io.BytesIO()
        torch.save({"label": record.id, "key": self.key(record.sequence)} | results, buffer)
        path.write_bytes(buffer.getbuffer())


class FolderWriter:
    """A folder with one file per sequence, and one for its cache: what it holds, and what is added.

    Args:
        parts: a temporary folder in the folder, which no other process writes to, for the parts of this run.
        file_format: format of the files.
        settings: see `records.embedding_writer`.
        turbo: the model, which existing caches must belong to.
        labels: see `safe_labels`; files of other sequences are named by their hash, as are all if this is None.
        names: whether labels are used; None does as the folder does, and uses them in a new one.
        devices: what computes the embeddings; None for the model's own device.

    Attributes:
        damaged: names of existing files or entries that cannot be used and must be computed again.
        recorded: what is recorded beside the settings, and may differ between runs.
        parts: writes the parts.

    Raises:
        ValueError: the folder holds embeddings made with other settings, or an index that is not one of embeddings.
        OSError: by all methods that write, if a file cannot be written. An earlier version of it stays as it was.
    """

    def __init__(
        self,
        parts: Path,
        file_format: EmbeddingFormat,
        settings: Mapping[str, Any],
        turbo: ContextModel,
        labels: Mapping[str, Sequence[str]] | None = None,
        names: FileNames | None = None,
        devices: str | None = None,
    ) -> None:
        self.damaged: list[str] = []
        folder = parts.parent
        for own in (INDEX_FILE, SETTINGS_FILE):
            refuse_links(folder / own, folder)
        self.folder = folder
        self.file_format = file_format
        self.turbo = turbo
        self._content = dict(settings)
        self.settings = {"format": file_format, **settings}
        self.recorded = {"device": devices or str(turbo.model.device)}
        self._known_settings = (folder / SETTINGS_FILE).exists()
        existing = read_settings(folder) if self._known_settings else {"names": "label"}
        if labels is None or (names or existing.get("names")) != "label":
            labels = {}
        else:
            self.settings["names"] = "label"
        if self._known_settings:
            check_same_settings(folder, existing, self.settings)
        self.parts = PartFiles(parts, file_format, settings["include"], self._content)
        # safetensors makes files that nobody else can read.
        (parts / "mode").touch()
        self._mode = (parts / "mode").stat().st_mode
        self.index = EmbeddingIndex(folder / INDEX_FILE)
        if self.index.damaged and not self._known_settings:
            raise ValueError(f"{self.index.path}: is not an index of embeddings; give another folder")
        if self.index.damaged:
            self.damaged.append(os.fspath(self.index.path))
        self._labels: dict[str, str] = {}
        self._labels |= {sequence: own[0] for sequence, own in labels.items() if self._is_free(sequence, own)}
        remove_temporaries(folder)

    def _is_free(self, sequence: str, identifiers: Sequence[str]) -> bool:
        """Whether files may be named by the first of these identifiers: no others' are, and none has a hash yet."""
        files = [f"{identifiers[0]}{suffix}" for suffix in self.parts.suffixes]
        if not self._known_settings and any((self.folder / name).exists() for name in files):
            # Another program's, in a folder that is new to this one.
            return False
        named = any(set(identifiers) & self.index.identifiers(name) for name in self._names(sequence) if name)
        return not named and all(self.index.identifiers(name) <= set(identifiers) for name in files)

    def has(self, proteins: SameSequence) -> bool:
        """Whether an earlier run has embedded these proteins; reads and checks their whole embedding."""
        sequence = proteins[0].sequence
        names = self._names(sequence)
        if not self.index.holds(names) or not all(self._is_good(name, sequence) for name in names if name):
            return False
        # Other proteins with this sequence may be new.
        self.index.stage(proteins, names)
        return True

    def begin(self) -> None:
        """Record the settings, before the first part."""
        path = self.folder / SETTINGS_FILE
        if not self._known_settings:
            with replacing(path, inside=True) as temporary:
                temporary.write_text(json.dumps(self.settings | self.recorded, indent=2) + "\n", encoding="utf-8")
        self._known_settings = True

    def add(self, proteins: SameSequence) -> None:
        """Add proteins whose parts have been written; they count as done after the next `commit`."""
        names = self._names(proteins[0].sequence)
        parts = self.parts.paths(proteins[0].sequence).values()
        for name, part in zip(filter(None, names), parts, strict=True):
            with file_errors(self.folder / name):
                os.chmod(part, self._mode)
                os.replace(part, self.folder / name)
        self.index.stage(proteins, names)

    def commit(self) -> None:
        """Make everything added since the last call count as done, even if the process is killed afterwards."""
        with file_errors(self.index.path):
            self.index.commit()

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        """Complete the output, at the end of a run of all these records that was not interrupted."""
        self.commit()
        with file_errors(self.index.path):
            self.index.sort([record.id for record in records])

    def _names(self, sequence: str) -> tuple[str, str]:
        """Names of the files of a sequence's embedding and of its cache; empty if not requested."""
        name = self._labels.get(sequence) or sequence_hash(sequence)
        embedding, cache = (
            f"{name}{suffix}" if suffix in self.parts.suffixes else ""
            for suffix in (f".{self.file_format}", CACHE_SUFFIX)
        )
        return embedding, cache

    def _is_good(self, name: str, sequence: str) -> bool:
        """Whether a file is undamaged and holds this sequence's results under these settings."""
        path = self.folder / name
        if not path.exists():
            return False
        found: object
        expected: object
        try:
            if path.is_symlink():
                raise ArtifactError(f"{path}: is a symbolic link, which is not followed here")
            if name.endswith(CACHE_SUFFIX):
                found, expected = self._tokens(path), self._context(sequence)
            else:
                content = read_embedding(path)[0] if self.file_format == "safetensors" else read_pt(path)
                found, expected = content.get("key"), self.parts.key(sequence)
        # A cache of another model raises a ValueError.
        except ValueError:
            found, expected = None, ""
        if found != expected:
            self.damaged.append(os.fspath(path))
        return found == expected

    def _tokens(self, path: Path) -> list[list[int]]:
        cache = TurboKVCache.load(path, device="cpu", model=self.turbo.model)
        if cache.config != self.turbo.model.base_model.turbo_config:
            raise ArtifactError(f"{path}: a cache of preset {cache.config.name}")
        rows = zip(cache.token_ids.tolist(), cache.lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]

    def _context(self, sequence: str) -> list[list[int]]:
        """Token ids of the context that the cache of a sequence holds."""
        codes, length = self.turbo.codes, self._content.get("truncation_seq_length")
        return [[codes.cls, *codes.encode(sequence[:length], "the sequence")]]


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
