"""What writing mean embeddings costs beside computing them: seconds and bytes a protein, in every format."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness.measure import Case, Check, Figures, worst
from benchmarks.harness.models import Architecture, masked_lm, turbo_of
from esm_turbo import TurboEsm
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.embed import EmbeddingRequest, ProteinEmbedding, embedding_settings
from esm_turbo.tasks.embedding.reading import read_embeddings
from esm_turbo.tasks.embedding.records import embedding_writer

_OUT: dict[EmbeddingFormat, str] = {"safetensors": "out", "pt": "out.d/pt", "h5": "out.h5", "parquet": "out.parquet"}
_HEAD_DIM = 64
# Proteins of a batch, whose rows are committed together.
_BATCH = 16
_RESIDUES = 30


def means_cases(proteins: int, hidden_size: int) -> Iterator[Case]:
    """Random means, on the CPU: what a worker does with each, and what ends the run."""
    model = masked_lm(Architecture("one layer", 1, hidden_size // _HEAD_DIM, _HEAD_DIM, hidden_size))
    turbo = turbo_of(model)
    generator = torch.Generator().manual_seed(0)
    letters = "ACDEFGHIKLMNPQRSTVWY"
    drawn = torch.randint(20, (proteins, _RESIDUES), generator=generator).tolist()
    records = [ProteinRecord(f"p{index}", "".join(letters[one] for one in row)) for index, row in enumerate(drawn)]
    means = torch.randn(proteins, hidden_size, generator=generator)

    def measure(repeats: int) -> Figures:
        runs = {name: [_write(turbo, name, records, means) for _ in range(repeats)] for name in _OUT}
        middle = {name: sorted(found, key=lambda one: one[0] + one[1])[len(found) // 2] for name, found in runs.items()}
        seconds = {
            name: {"each": each / proteins, "at the end": end / proteins} for name, (each, end, _) in middle.items()
        }
        return {"seconds": seconds, "bytes": {name: size / proteins for name, (_, _, size) in middle.items()}}

    yield Case(
        name=f"means of {hidden_size}",
        model="none",
        shape={"proteins": proteins, "hidden_size": hidden_size, "batch": _BATCH, "layers": 1},
        check=lambda: _check(turbo, records[:_BATCH], means),
        measure=measure,
    )


def _write(
    turbo: TurboEsm, file_format: EmbeddingFormat, records: Sequence[ProteinRecord], means: torch.Tensor
) -> tuple[float, float, int]:
    """Seconds to write all embeddings, and to end the run; bytes of what it left."""
    with tempfile.TemporaryDirectory() as folder:
        each, end = write_means(turbo, file_format, Path(folder) / _OUT[file_format], records, means)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return each, end, size


def write_means(
    turbo: TurboEsm,
    file_format: EmbeddingFormat,
    out: Path,
    records: Sequence[ProteinRecord],
    means: torch.Tensor,
) -> tuple[float, float]:
    """Write means as a run of `embed` does, [proteins, hidden_size]; seconds for all of them, and for the end."""
    settings = embedding_settings(turbo, EmbeddingRequest.of(turbo, [-1], ["mean"])) | {"truncation_seq_length": None}
    begun = time.perf_counter()
    with embedding_writer(out, file_format, settings, turbo) as writer:
        writer.begin()
        for first in range(0, len(records), _BATCH):
            for record, mean in zip(records[first : first + _BATCH], means[first : first + _BATCH], strict=True):
                embedding = ProteinEmbedding(mean_representations={1: mean.clone()})
                writer.parts.write(record, embedding)
                writer.add([record])
            writer.commit()
        written = time.perf_counter()
        writer.finish(records)
    return written - begun, time.perf_counter() - written


def _check(turbo: TurboEsm, records: Sequence[ProteinRecord], means: torch.Tensor) -> Check:
    """What is read again is what was written."""
    errors = []
    for file_format, name in _OUT.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / name
            write_means(turbo, file_format, out, records, means[: len(records)])
            found = read_embeddings(out, file_format, records)
            errors += [
                float(np.abs(one["mean_representations.1"] - mean.numpy()).max())
                for one, mean in zip(found, means, strict=False)
            ]
    return Check("means read again, largest difference", worst(errors), 0.0)
