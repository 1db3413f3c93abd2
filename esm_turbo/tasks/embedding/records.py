"""Embedding the records of a FASTA file and writing each batch as it is computed, as `esm-turbo embed` does.

An interrupted run can be resumed: existing embeddings are checked, and missing or damaged ones are computed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.config import DEFAULT_TOKS_PER_BATCH
from esm_turbo.files.kinds import INDEX_FILE, is_store
from esm_turbo.files.paths import check_writable
from esm_turbo.files.suffixes import embedding_format
from esm_turbo.files.writing import only_writer, refuse_links
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat, FileNames
from esm_turbo.tasks.common.progress import Progress, StageProgress, silent
from esm_turbo.tasks.embedding.embed import EmbeddingRequest, ProteinEmbedding, embedding_settings, iter_embeddings
from esm_turbo.tasks.embedding.files import FolderWriter, SameSequence, safe_labels
from esm_turbo.tasks.embedding.h5 import H5Writer, check_h5, parts_folder

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@dataclass(frozen=True)
class EmbeddingRun:
    """Outcome of a run.

    Attributes:
        reused: number of proteins embedded by an earlier run.
        failed: proteins that could not be embedded, and why.
        damaged: files and entries that were damaged and computed again.
    """

    reused: int = 0
    failed: list[BadRecord] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class UnfinishedError(OSError):
    """A run could not continue; the embeddings written so far are kept."""


def embed_records(
    turbo: ContextModel,
    records: Sequence[ProteinRecord],
    out: str | os.PathLike[str],
    request: EmbeddingRequest,
    *,
    file_format: EmbeddingFormat | None = None,
    names: FileNames | None = None,
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    truncation_seq_length: int | None = None,
    progress: Progress | None = None,
) -> EmbeddingRun:
    """Embed the proteins that a folder or file does not have yet.

    Proteins with the same sequence are computed once. A resumed run gives the same bits as an uninterrupted one if the
    proteins and `toks_per_batch` are the same.

    Args:
        records: the proteins.
        out: a folder for `pt` and `safetensors`, a file for `h5`.
        request: the results to compute.
        file_format: see `embedding_writer`; None is `h5` for an `out` that ends in `.h5` or `.hdf5`, and else `pt`.
        names: names of files in a folder: labels, the identifiers, as `esm-extract` names them, where they are safe and
            unique, and else hashes; or hashes of the sequences. None is `label`, or as in the folder. The index has the
            names either way.
        toks_per_batch: padded tokens per batch; a longer protein forms a batch of its own.
        truncation_seq_length: length to which proteins are truncated; None truncates none.
        progress: called with stage `check` and proteins, then with `embed` and residues, see `Progress`.

    Raises:
        ValueError: `out` holds embeddings made with other settings, or another process is writing to it; an identifier
            has a tab or a line break, which the index cannot hold, or names two sequences.
        UnfinishedError: (an OSError) a file could not be written, for example on a full disk, or the model failed.
        ImportError: h5py is missing.
    """
    _check_identifiers(records)
    file_format = embedding_format(out, file_format)
    if names == "label" and file_format == "h5":
        raise ValueError("one HDF5 file has no names of files: leave `names` out, or give another format")
    settings = embedding_settings(turbo, request) | {"truncation_seq_length": truncation_seq_length}
    by_sequence: dict[str, list[ProteinRecord]] = {}
    for record in records:
        by_sequence.setdefault(record.sequence, []).append(record)
    groups = list(by_sequence.values())
    sequences = [group[0].sequence[:truncation_seq_length] for group in groups]
    failed: dict[int, str] = {}
    with embedding_writer(out, file_format, settings, turbo, safe_labels(groups), names) as writer:
        done = _find_done(writer, groups, progress)
        batches = iter_embeddings(turbo, sequences, request, toks_per_batch, done=done, on_failure=failed.__setitem__)
        residues = sum(len(sequences[index]) for index in range(len(groups)) if index not in done)
        counter = StageProgress(progress, "embed", residues)
        written = sum(len(groups[index]) for index in done)
        reused = written
        try:
            # Before the first batch too, since existing sequences may have new identifiers.
            writer.commit()
            counter.advance(0)
            for batch in batches:
                failed |= _write(writer, groups, batch)
                written += sum(len(groups[index]) for index, _ in batch if index not in failed)
                counter.advance(sum(len(sequences[index]) for index, _ in batch))
            writer.finish(records)
        except OSError as error:
            raise UnfinishedError(
                f"{error}; {written} of {len(records)} proteins are done and kept: free some space, then run the same"
                " command again to continue"
            ) from error
        except ValueError as error:
            # The arguments were checked before, so this is a failure of the run.
            raise UnfinishedError(str(error)) from error
        damaged = list(writer.damaged)
    bad = [BadRecord(record.id, reason) for index, reason in sorted(failed.items()) for record in groups[index]]
    return EmbeddingRun(reused, bad, damaged)


@contextlib.contextmanager
def embedding_writer(
    out: str | os.PathLike[str],
    file_format: EmbeddingFormat,
    settings: Mapping[str, Any],
    turbo: ContextModel,
    labels: Mapping[str, Sequence[str]] | None = None,
    names: FileNames | None = None,
) -> Iterator[FolderWriter]:
    """Open a folder or file for embeddings, exclusively for this process. Nothing is written before the first `write`.

    Args:
        out: a folder, created if necessary, for `pt` and `safetensors`; a file for `h5`.
        file_format: `pt` and `safetensors` write one file per sequence, `h5` one file for all, as biotrainer reads it.
        settings: the settings of the embeddings, JSON values; all embeddings in a folder must share them.
        turbo: the model that makes them.
        labels: names of files in a folder, see `FolderWriter`, as is `names`.

    Raises:
        ValueError: `out` holds embeddings made with other settings, or is a context store, or cannot be written, or
            another process is writing to it.
        ImportError: h5py is missing.
    """
    out = Path(out)
    if is_store(out):
        raise ValueError(f"{out}: is a context store; give a new or an empty folder")
    check_writable(out if file_format == "h5" else out / INDEX_FILE)
    if file_format == "h5":
        check_h5(out)
        refuse_links(parts_folder(out), out.parent)
        with only_writer(parts_folder(out)), contextlib.closing(H5Writer(out, settings, turbo)) as writer:
            yield writer
    else:
        with only_writer(out):
            yield FolderWriter(out, file_format, settings, turbo, labels, names)


def _check_identifiers(records: Sequence[ProteinRecord]) -> None:
    known: dict[str, str] = {}
    for record in records:
        if any(character in record.id for character in "\t\n\r"):
            raise ValueError(f"identifier {record.id!r} has a tab or a line break; remove it")
        if known.setdefault(record.id, record.sequence) != record.sequence:
            raise ValueError(f"identifier {record.id!r} names two sequences; rename one of them")


def _find_done(writer: FolderWriter, groups: Sequence[SameSequence], progress: Progress | None) -> set[int]:
    """Indices of the groups that an earlier run has embedded."""
    report = progress or silent
    done = set()
    for index, group in enumerate(groups):
        if writer.has(group):
            done.add(index)
        # An empty folder needs no progress bar.
        if done:
            report("check", index + 1, len(groups))
    return done


def _write(
    writer: FolderWriter, groups: Sequence[SameSequence], batch: Sequence[tuple[int, ProteinEmbedding]]
) -> dict[int, str]:
    """Write a batch; return the indices that cannot be written, each with the reason."""
    failed = {}
    for index, embedding in batch:
        if embedding.is_finite():
            writer.write(groups[index], embedding)
        else:
            failed[index] = "its embedding is not finite; try --dtype float32"
    writer.commit()
    return failed
