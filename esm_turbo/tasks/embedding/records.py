"""Embedding the records of a FASTA file and writing each batch as it is computed, as `esm-turbo embed` does.

An interrupted run can be resumed: existing embeddings are checked, and missing or damaged ones are computed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.files.identity import lasting_identity
from esm_turbo.files.kinds import INDEX_FILE, is_store
from esm_turbo.files.paths import check_writable
from esm_turbo.files.suffixes import embedding_format
from esm_turbo.files.writing import locked_parts, locked_temporary, only_writer
from esm_turbo.proteins.batches import encode_rows
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord, check_identifiers
from esm_turbo.tasks.common.checks import check_count
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.options import ONE_FILE, EmbeddingFormat, FileNames
from esm_turbo.tasks.common.pieces import InProcessRunner, Plan, Runner, forward_cost
from esm_turbo.tasks.common.progress import Progress, silent
from esm_turbo.tasks.common.same_model import run_on_model
from esm_turbo.tasks.embedding.batches import EmbedTask, embedding_batches
from esm_turbo.tasks.embedding.embed import embedding_settings
from esm_turbo.tasks.embedding.files import SameSequence, safe_labels, sequence_hash
from esm_turbo.tasks.embedding.folder import FolderWriter
from esm_turbo.tasks.embedding.one_file import ONE_FILE_FORMATS, OneFileWriter
from esm_turbo.tasks.embedding.request import EmbeddingRequest

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Lengths of sequences are counted and cut in characters.
_LETTERS = re.compile(r"[^\s<*]*")


@dataclass(frozen=True)
class EmbeddingRun:
    """Outcome of a run.

    Attributes:
        written: number of proteins in the output, those of `reused` among them.
        reused: number of proteins embedded by an earlier run.
        failed: proteins that could not be embedded, and why.
        damaged: files and entries that were damaged and computed again.
        numbers: of a run with a plan, the numbers in the input of the proteins in the output, from 0; of each
            identifier, the first.
    """

    written: int = 0
    reused: int = 0
    failed: list[BadRecord] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


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
    toks_per_batch: int | None = None,
    truncation_seq_length: int | None = None,
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
) -> EmbeddingRun:
    """Embed the proteins that a folder does not have yet, or write all to one file.

    Proteins with the same sequence are computed once. A resumed run gives the same bits as an uninterrupted one if the
    proteins and `toks_per_batch` are the same; if that is None, on the same kind of device.

    Args:
        records: the proteins.
        out: a folder for `pt` and `safetensors`, a file for `h5` and `parquet`.
        request: the results to compute.
        file_format: see `embedding_writer`; None is `h5` for an `out` that ends in `.h5` or `.hdf5`, `parquet` for one
            that ends in `.parquet`, and else `pt`.
        names: names of files in a folder: labels, the identifiers, as `esm-extract` names them, where they are safe and
            unique, and else hashes; or hashes of the sequences. None is `label`, or as in the folder. The index has the
            names either way.
        toks_per_batch: padded tokens per batch; None is 16,384 where CUDA devices compute them, and else 4,096. A
            longer protein forms a batch of its own.
        truncation_seq_length: length to which proteins are truncated; None truncates none.
        progress: called with stage `check` and proteins, then with `embed` and residues, see `Progress`.
        runner: where batches are computed; None is this process.
        plan: which batches are computed; None is all.

    Raises:
        ValueError: `out` holds embeddings made with other settings, is one file that lacks a protein, or another
            process is writing to it; an identifier has a tab or a line break, which the index cannot hold, or names two
            sequences, or a sequence has other characters than one per residue; or `truncation_seq_length` is not an
            integer of at least 1.
        UnfinishedError: (an OSError) a file could not be written, for example on a full disk, or the model failed.
        ImportError: h5py or pyarrow is missing.
    """
    records = list(records)
    _check_records(records)
    file_format = embedding_format(out, file_format)
    if names == "label" and file_format in ONE_FILE:
        raise ValueError(
            f"one {ONE_FILE[file_format]} file has no names of files: leave `names` out, or give another format"
        )
    begun = lasting_identity(turbo.model)
    settings = embedding_settings(turbo, request) | {"truncation_seq_length": truncation_seq_length}
    by_sequence: dict[str, list[ProteinRecord]] = {}
    for record in records:
        by_sequence.setdefault(record.sequence, []).append(record)
    groups: list[SameSequence] = list(by_sequence.values())
    if truncation_seq_length is not None:
        check_count("truncation_seq_length", truncation_seq_length)
    runner = InProcessRunner(turbo) if runner is None else runner
    toks_per_batch = protein_tokens(toks_per_batch, turbo, runner.devices)
    # Those of a shard follow from all shards, when they are joined.
    identifiers = {sequence_hash(group[0].sequence): [one.id for one in group] for group in groups}
    labels = safe_labels(identifiers) if plan is None else {}
    numbers: dict[str, int] = {}
    if plan is not None:
        numbers = {record.id: number for number, record in reversed([*enumerate(records)])}
        groups = _chosen(turbo, groups, request, toks_per_batch, truncation_seq_length, plan)
        chosen = {group[0].sequence for group in groups}
        records = [record for record in records if record.sequence in chosen]
    sequences = [group[0].sequence[:truncation_seq_length] for group in groups]
    rows = encode_rows(turbo.codes, sequences)
    failed: dict[str, str] = {}
    with (
        turbo.model.base_model.kv.in_call(),
        embedding_writer(out, records, file_format, settings, turbo, labels, names, runner.devices) as writer,
    ):
        done = _find_done(writer, groups, progress)
        batches = embedding_batches(turbo, rows, request, toks_per_batch, done)
        pieces = [[groups[index][0] for index in batch] for batch in batches]
        residues = [sum(len(sequences[index]) for index in batch) for batch in batches]
        parts = writer.parts if runner.shares_files else None
        task = EmbedTask(request, truncation_seq_length, finite=True, parts=parts)
        run = run_on_model(turbo, runner, task, pieces, stage="embed", units=residues, progress=progress, begun=begun)
        written = reused = sum(len(groups[index]) for index in done)
        try:
            if pieces:
                writer.begin()
            # Before the first batch too, since existing sequences may have new identifiers.
            writer.commit()
            for number, result in run:
                for row, record in enumerate(pieces[number]):
                    if row in result.failed:
                        failed[record.sequence] = result.failed[row]
                        continue
                    if row in result.embeddings:
                        writer.parts.write(record, result.embeddings[row])
                    writer.add(by_sequence[record.sequence])
                    written += len(by_sequence[record.sequence])
                writer.commit()
            embedded = [record for record in records if record.sequence not in failed]
            writer.finish([record.id for record in embedded])
        except OSError as error:
            raise UnfinishedError(
                f"{error}; {written} of {len(records)} proteins are done and kept: free some space, then run the same"
                " command again to continue"
            ) from error
        except ValueError as error:
            # The arguments were checked before, so this is a failure of the run.
            raise UnfinishedError(str(error)) from error
    bad = [
        BadRecord(one.id, failed[group[0].sequence]) for group in groups if group[0].sequence in failed for one in group
    ]
    own = dict.fromkeys(numbers[record.id] for record in embedded) if plan is not None else {}
    return EmbeddingRun(written, reused, bad, writer.damaged, list(own))


@contextlib.contextmanager
def embedding_writer(
    out: str | os.PathLike[str],
    records: Sequence[ProteinRecord],
    file_format: EmbeddingFormat,
    settings: Mapping[str, Any],
    turbo: ContextModel,
    labels: Mapping[str, Sequence[str]] | None = None,
    names: FileNames | None = None,
    devices: str | None = None,
) -> Iterator[FolderWriter]:
    """Open a folder or file for embeddings, exclusively for this process. Nothing is written before the first `write`.

    Args:
        out: a folder, created if necessary, for `pt` and `safetensors`; a file for `h5` and `parquet`.
        records: all proteins to embed.
        file_format: `pt` and `safetensors` write one file per sequence, `h5` one file for all, as biotrainer reads it,
            `parquet` a table of means.
        settings: the settings of the embeddings, JSON values; all embeddings in a folder must share them.
        turbo: the model that makes them.
        labels: names of files in a folder, see `FolderWriter`, as are `names` and `devices`.

    Raises:
        ValueError: `out` holds embeddings made with other settings, or is a context store, or cannot be written, or
            another process is writing to it; or it is one file, and lacks one of the proteins, or the format does not
            hold the results.
        ImportError: h5py or pyarrow is missing.
    """
    out = Path(out)
    if is_store(out):
        raise ValueError(f"{out}: is a context store; give a new or an empty folder")
    if file_format not in ONE_FILE:
        check_writable(out / INDEX_FILE)
        with only_writer(out), locked_temporary(out, "parts") as parts:
            yield FolderWriter(parts, file_format, settings, turbo, labels, names, devices)
        return
    check_writable(out)
    kind = ONE_FILE_FORMATS[file_format]
    kind.check(out, settings["include"])
    with locked_parts(out) as folder, locked_temporary(folder, "parts") as parts:
        yield OneFileWriter(kind, out, records, parts, settings, turbo, devices)


def _check_records(records: Sequence[ProteinRecord]) -> None:
    check_identifiers(records)
    for record in records:
        if any(character in record.id for character in "\t\n\r"):
            raise ValueError(f"identifier {record.id!r} has a tab or a line break; remove it")
        if not _LETTERS.fullmatch(record.sequence):
            raise ValueError(f"record {record.id!r}: give one letter per residue, without `<mask>`, white space or `*`")


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


def _chosen(
    turbo: ContextModel,
    groups: Sequence[SameSequence],
    request: EmbeddingRequest,
    toks_per_batch: int,
    truncation_seq_length: int | None,
    plan: Plan,
) -> list[SameSequence]:
    """The groups of the batches that a plan chooses; among themselves they form the same batches."""
    rows = encode_rows(turbo.codes, [group[0].sequence[:truncation_seq_length] for group in groups])
    names = [" ".join(record.id for record in group) for group in groups]
    costs = [forward_cost(turbo, len(row), len(row)) for row in rows]
    batches = plan.choose(embedding_batches(turbo, rows, request, toks_per_batch), names, costs)
    return [groups[index] for index in sorted(index for batch in batches for index in batch)]
