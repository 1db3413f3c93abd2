"""The embeddings of a whole FASTA file, written as they are made: what `esm-turbo embed` does.

A run that was interrupted, in whatever way, goes on where it stopped: what is there is checked, and what is missing or
damaged is made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.config import DEFAULT_TOKS_PER_BATCH
from esm_turbo.files.paths import check_writable
from esm_turbo.files.writing import only_writer
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.store.files import is_store
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.common.progress import Progress, StageProgress, silent
from esm_turbo.tasks.embedding.embed import EmbeddingRequest, ProteinEmbedding, embedding_settings, iter_embeddings
from esm_turbo.tasks.embedding.files import INDEX_FILE, EmbeddingWriter, FolderWriter, SameSequence
from esm_turbo.tasks.embedding.h5 import H5Writer, check_h5, parts_folder

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@dataclass(frozen=True)
class EmbeddingRun:
    """What became of the proteins.

    Attributes:
        reused: proteins whose embeddings were there from an earlier run.
        failed: those that could not be embedded, and why.
        damaged: files and entries that were there, but damaged, and were made anew.
    """

    reused: int = 0
    failed: list[BadRecord] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class UnfinishedError(OSError):
    """A run could not go on; what it has written so far is kept."""


def embed_records(
    turbo: ContextModel,
    records: Sequence[ProteinRecord],
    out: str | os.PathLike[str],
    request: EmbeddingRequest,
    *,
    file_format: EmbeddingFormat = "pt",
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    truncation_seq_length: int | None = None,
    progress: Progress | None = None,
) -> EmbeddingRun:
    """Embeds proteins into a folder or a file, those that are not there yet.

    Proteins of the same sequence are computed once. A run that goes on with an interrupted one gives the same bits, if
    proteins and `toks_per_batch` are the same.

    Args:
        turbo: the model and its tokenizer.
        records: the proteins.
        out: a folder for `pt` and `safetensors`, a file for `h5`.
        request: what to compute.
        file_format: see `embedding_writer`.
        toks_per_batch: padded tokens of a batch; a longer protein forms a batch of its own.
        truncation_seq_length: residues after which a protein is cut; None cuts none.
        progress: called with stage `check` and proteins, then with `embed` and residues, see `Progress`.

    Raises:
        ValueError: the place holds embeddings made with other settings, or another process writes there; an identifier
            has a tab or a line break, which the index could not hold, or stands for two sequences.
        UnfinishedError: (an OSError) a file could not be written, as on a full disk, or the model failed.
        ImportError: h5py is missing.
    """
    _check_identifiers(records)
    settings = embedding_settings(turbo, request) | {"truncation_seq_length": truncation_seq_length}
    groups = _by_sequence(records)
    sequences = [group[0].sequence[:truncation_seq_length] for group in groups]
    failed: dict[int, str] = {}
    with embedding_writer(out, file_format, settings) as writer:
        done = _find_done(writer, groups, progress)
        batches = iter_embeddings(turbo, sequences, request, toks_per_batch, done=done, on_failure=failed.__setitem__)
        residues = sum(len(sequences[index]) for index in range(len(groups)) if index not in done)
        counter = StageProgress(progress, "embed", residues)
        written = sum(len(groups[index]) for index in done)
        reused = written
        try:
            # Also before the first batch: identifiers of sequences that are there may be new.
            writer.commit()
            counter.advance(0)
            for batch in batches:
                failed |= _write(writer, groups, batch)
                written += sum(len(groups[index]) for index, _ in batch if index not in failed)
                counter.advance(sum(len(sequences[index]) for index, _ in batch))
            writer.finish(records)
        except OSError as error:
            raise UnfinishedError(
                f"{error}; {written} of {len(records)} proteins are done and kept: make room, then give the same"
                " command again to go on"
            ) from error
        except ValueError as error:
            # Not the fault of what was asked for, which was checked before.
            raise UnfinishedError(str(error)) from error
        damaged = list(writer.damaged)
    bad = [BadRecord(record.id, reason) for index, reason in sorted(failed.items()) for record in groups[index]]
    return EmbeddingRun(reused, bad, damaged)


@contextlib.contextmanager
def embedding_writer(
    out: str | os.PathLike[str], file_format: EmbeddingFormat, settings: Mapping[str, Any]
) -> Iterator[EmbeddingWriter]:
    """Opens a place for embeddings, for this process alone; none is written before the first `write`.

    Args:
        out: a folder, made if need be, for `pt` and `safetensors`; a file for `h5`.
        file_format: `pt` and `safetensors` write one file a sequence, `h5` one file for all, as biotrainer reads them.
        settings: how the embeddings are made, JSON values; all in a folder must be made the same way.

    Raises:
        ValueError: the place holds embeddings made with other settings, or a store of contexts, cannot be written, or
            another process is writing there.
        ImportError: h5py is missing.
    """
    out = Path(out)
    if is_store(out):
        raise ValueError(f"{out}: is a store of contexts; give a new or an empty folder")
    check_writable(out if file_format == "h5" else out / INDEX_FILE)
    if file_format == "h5":
        check_h5(out)
        parts = parts_folder(out)
        with (
            only_writer(parts),
            contextlib.closing(H5Writer(out, FolderWriter(parts, "safetensors", settings), settings)) as writer,
        ):
            yield writer
    else:
        with only_writer(out):
            yield FolderWriter(out, file_format, settings)


def _check_identifiers(records: Sequence[ProteinRecord]) -> None:
    known: dict[str, str] = {}
    for record in records:
        if any(character in record.id for character in "\t\n\r"):
            raise ValueError(f"identifier {record.id!r} has a tab or a line break; leave it out")
        if known.setdefault(record.id, record.sequence) != record.sequence:
            raise ValueError(f"identifier {record.id!r} stands for two sequences; call one of them otherwise")


def _by_sequence(records: Sequence[ProteinRecord]) -> list[SameSequence]:
    groups: dict[str, list[ProteinRecord]] = {}
    for record in records:
        groups.setdefault(record.sequence, []).append(record)
    return list(groups.values())


def _find_done(writer: EmbeddingWriter, groups: Sequence[SameSequence], progress: Progress | None) -> set[int]:
    report = progress or silent
    done = set()
    for index, group in enumerate(groups):
        if writer.has(group):
            done.add(index)
        # A new place needs no bar.
        if done:
            report("check", index + 1, len(groups))
    return done


def _write(
    writer: EmbeddingWriter, groups: Sequence[SameSequence], batch: Sequence[tuple[int, ProteinEmbedding]]
) -> dict[int, str]:
    """Writes a batch; returns those that are not fit to be written, and why."""
    failed = {}
    for index, embedding in batch:
        if embedding.is_finite():
            writer.write(groups[index], embedding)
        else:
            failed[index] = "its embedding is not finite; try --dtype float32"
    writer.commit()
    return failed
