"""One device against several: `embed`, `store` and `score` of proteins, with workers that have loaded the model.

    python -m benchmarks.speed.devices --devices cpu cpu --proteins 48
    python -m benchmarks.speed.devices --devices cuda:0 cuda:1 --dtype bfloat16 --layers 33 --hidden 1280 --heads 20

With `--layers`, weights are random in that geometry of ESM-2, with a calibration on random proteins. Beyond the shipped
proteins, the same are taken again from another residue on, so that lengths stay those of real ones. The figures are
printed, and saved where asked for, before the results of several devices are compared with those of one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EsmForMaskedLM

from benchmarks.harness import records as results
from benchmarks.harness.models import Architecture, random_calibration, turbo_of
from esm_turbo import ContextStore, TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL, calibration_proteins
from esm_turbo.parallel.storing import store_sequences
from esm_turbo.parallel.workers import Workers
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta
from esm_turbo.tasks.common.pieces import Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.embedding.reading import read_embeddings
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from esm_turbo.tasks.scoring.records import Candidate, score_records

Results = Mapping[str, Tensor]
"""Of a task, float32 by the name of a protein."""

# Largest difference between the results of one device and of several for one protein, as a part of its results' norm.
# A batch is computed as a whole, wherever it runs, so that none is expected; half precision rounds by 2^-9 or 2^-12.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
_PRESET = "turbo3"
# Contexts whose contents are compared, spread over all of them.
_COMPARED_CONTEXTS = 32


@dataclass(frozen=True)
class Load:
    """Loads the model in a worker."""

    folder: str
    dtype: str

    def __call__(self, device: str) -> TurboEsm:
        return TurboEsm.from_pretrained(self.folder, preset=_PRESET, device=device, dtype=getattr(torch, self.dtype))


def embed(turbo: TurboEsm, proteins: Sequence[ProteinRecord], folder: Path, runner: Runner | None) -> None:
    """Mean embeddings in one folder."""
    request = EmbeddingRequest.of(turbo, [-1], ["mean"])
    assert not embed_records(turbo, proteins, folder, request, file_format="safetensors", runner=runner).failed


def embedded(turbo: TurboEsm, proteins: Sequence[ProteinRecord], folder: Path, _: None) -> dict[str, Tensor]:
    """The files that `embed` has written."""
    arrays = read_embeddings(folder, "safetensors", proteins)
    return {
        protein.id: torch.cat([torch.from_numpy(array) for array in own.values()])
        for protein, own in zip(proteins, arrays, strict=True)
    }


def store(turbo: TurboEsm, proteins: Sequence[ProteinRecord], folder: Path, runner: Runner | None) -> None:
    """Contexts in one store."""
    with ContextStore(folder, host_bytes=0, device_bytes=0) as contexts:
        sequences = [protein.sequence for protein in proteins]
        store_sequences(turbo, contexts, sequences, on_failure=_stop, runner=runner)


def stored(turbo: TurboEsm, proteins: Sequence[ProteinRecord], folder: Path, _: None) -> dict[str, Tensor]:
    """Keys and values of some contexts that `store` has written, as they are read."""
    found = {}
    with ContextStore(folder, host_bytes=0, device_bytes=0, read_only=True) as contexts:
        assert contexts.count_missing(turbo, [protein.sequence for protein in proteins]) == 0
        for protein in proteins[:: -(-len(proteins) // _COMPARED_CONTEXTS)]:
            [cache] = contexts.get(turbo, protein.sequence)
            assert cache is not None
            tensors = dict(turbo.model.base_model.decoded(cache).named_tensors())
            parts = (tensors[name].float().flatten() for name in sorted(tensors) if ".packed." in name)
            found[protein.id] = torch.cat(list(parts))
    return found


def score(turbo: TurboEsm, proteins: Sequence[ProteinRecord], folder: Path, runner: Runner | None) -> Any:
    """Sixteen peptides on every protein."""
    peptides = [proteins[0].sequence[start : start + 12] for start in range(16)]
    candidates = [Candidate(str(number), peptide) for number, peptide in enumerate(peptides)]
    run = score_records(turbo, proteins, candidates, ["frozen"], runner=runner)
    assert not run.failed
    return run


def scored(turbo: TurboEsm, proteins: Sequence[ProteinRecord], folder: Path, run: Any) -> dict[str, Tensor]:
    """Pseudo-log-likelihoods by target."""
    assert len(run.results) == len(proteins)
    return {
        one.target.id: torch.tensor([score.pseudo_log_likelihood for score in one.scores["frozen"].scores])
        for one in run.results
    }


def _stop(sequence: str, reason: str) -> None:
    raise RuntimeError(reason)


TASKS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Tensor]]]] = {
    "embed": (embed, embedded),
    "store": (store, stored),
    "score": (score, scored),
}
"""The tasks that are timed, and the functions that read their results."""


@dataclass(frozen=True)
class WarmUp:
    """Runs a task once in every process: as many pieces as processes, none of which ends before all have begun.

    Attributes:
        task: name of the task.
        proteins: a few.
        folder: an empty one.
        count: number of processes.
    """

    task: str
    proteins: Sequence[ProteinRecord]
    folder: Path
    count: int

    def run(self, turbo: TurboEsm, pieces: Iterable[int], progress: Progress) -> Iterator[int]:
        for number in pieces:
            TASKS[self.task][0](turbo, self.proteins, self.folder / f"out-{number}", None)
            (self.folder / f"begun-{number}").touch()
            while len(list(self.folder.glob("begun-*"))) < self.count:
                time.sleep(0.01)
            yield number

    def failed(self, piece: int, reason: str) -> int:
        raise RuntimeError(reason)

    def has_failed(self, result: int) -> bool:
        return False


def largest_difference(one: Results, other: Results) -> float:
    """Norm of the difference of a protein's results, as a part of their norm; of all proteins, the largest."""
    assert one.keys() == other.keys(), "the results are those of different proteins"
    return max(float((other[name] - value).norm() / value.norm()) for name, value in one.items())


def shipped_proteins(count: int) -> list[ProteinRecord]:
    """The shipped proteins, again and again, each time from another residue on."""
    shipped = read_fasta(calibration_proteins())[0]
    found = []
    for number in range(count):
        turn, index = divmod(number, len(shipped))
        record = shipped[index]
        sequence = record.sequence[turn:] + record.sequence[:turn]
        found.append(ProteinRecord(f"{record.id}_{turn}" if turn else record.id, sequence))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the figures, then compare the results; `--save` appends the figures to those of the project."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", required=True)
    parser.add_argument("--proteins", type=int, default=2000)
    parser.add_argument("--embedded", type=int, help="proteins of `embed`, which is fast; by default as many")
    parser.add_argument("--stored", type=int, default=500, help="proteins at most of `store`, whose files are large")
    parser.add_argument("--folder", type=Path, help="for what is written; one for temporary files by default")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    counts = {
        "embed": options.embedded or options.proteins,
        "store": min(options.stored, options.proteins),
        "score": options.proteins,
    }
    of_task = {name: shipped_proteins(counts[name]) for name in TASKS}
    seconds: dict[str, list[float]] = {name: [] for name in TASKS}
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        file_system = subprocess.run(["stat", "-f", "-c", "%T", temporary], check=True, capture_output=True, text=True)
        folder = str(EMBEDDED_MODEL)
        if options.layers is not None:
            folder = str(Path(temporary) / "model")
            _save_random(folder, options)
        load = Load(folder, options.dtype)
        turbo = load("cpu")
        found: dict[str, Results] = {}
        for count in (1, len(options.devices)):
            with Workers(load, options.devices[:count]) as workers:
                for name, (task, read) in TASKS.items():
                    work = Path(temporary) / f"{name}-{count}"
                    work.mkdir()
                    first = WarmUp(name, of_task[name][:8], work, count)
                    list(workers.run(first, range(count), stage="first", units=[1] * count))
                    start = time.perf_counter()
                    outcome = task(turbo, of_task[name], work / "out", workers)
                    seconds[name].append(time.perf_counter() - start)
                    result = read(turbo, of_task[name], work / "out", outcome)
                    if count == 1:
                        found[name] = result
                    differences[name] = largest_difference(found[name], result)
                    # Two stores of all contexts would fill a small disk.
                    shutil.rmtree(work)
    figures = {
        "devices": options.devices,
        "proteins": {name: len(own) for name, own in of_task.items()},
        "residues": {name: sum(len(protein.sequence) for protein in own) for name, own in of_task.items()},
        "seconds": seconds,
        "speedup": {name: one / several for name, (one, several) in seconds.items()},
        "largest_difference": differences,
        "tolerance": TOLERANCES[options.dtype],
        "geometry": None if options.layers is None else [options.layers, options.hidden, options.heads],
        "dtype": options.dtype,
        "preset": _PRESET,
        "file_system": file_system.stdout.strip(),
    }
    print(json.dumps(figures, indent=2), flush=True)
    if options.save:
        model = turbo.name if options.layers is None else "random weights"
        results.append(results.RESULTS / "devices.jsonl", "devices", figures, model=model, device=options.devices[0])
    # Not `difference > tolerance`, which NaN is not.
    differ = [name for name, difference in differences.items() if not difference <= TOLERANCES[options.dtype]]
    if differ:
        raise SystemExit(f"the results of one device and of several differ: {', '.join(differ)}")


def _save_random(folder: str, options: argparse.Namespace) -> None:
    """Save a model of random weights with a calibration, made on the first device in the dtype in which it runs."""
    architecture = Architecture(
        "random weights",
        num_layers=options.layers,
        num_heads=options.heads,
        head_dim=options.hidden // options.heads,
        intermediate_size=4 * options.hidden,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with torch.device(options.devices[0]):
            model = EsmForMaskedLM(architecture.config()).eval()
    finally:
        torch.set_default_dtype(before)
    turbo_of(model, random_calibration(model.esm, [_PRESET]), _PRESET).save_pretrained(folder)


if __name__ == "__main__":
    main()
