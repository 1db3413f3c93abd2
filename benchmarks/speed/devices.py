"""One device against several: `embed`, `store` and `score` of real proteins, with workers that have loaded the model.

    python -m benchmarks.speed.devices --devices cpu cpu --proteins 48
    python -m benchmarks.speed.devices --devices cuda:0 cuda:1 --dtype bfloat16 --layers 33 --hidden 1280 --heads 20

With `--layers`, weights are random in that geometry of ESM-2, and contexts are stored at full precision.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import EsmConfig, EsmForMaskedLM

from benchmarks.harness.records import RESULTS, append
from esm_turbo import ContextStore, TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL, calibration_proteins
from esm_turbo.parallel.storing import store_sequences
from esm_turbo.parallel.workers import Workers
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta
from esm_turbo.tasks.embedding.embed import EmbeddingRequest
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.scoring.records import Candidate, score_records

Task = Callable[[TurboEsm, "list[ProteinRecord]", Path, Workers], Any]


@dataclass(frozen=True)
class Load:
    """Loads the model in a worker."""

    folder: str
    dtype: str

    def __call__(self, device: str) -> TurboEsm:
        preset = "turbo3" if self.folder == str(EMBEDDED_MODEL) else "exact"
        return TurboEsm.from_pretrained(self.folder, preset=preset, device=device, dtype=getattr(torch, self.dtype))


def embed(turbo: TurboEsm, records: list[ProteinRecord], folder: Path, workers: Workers) -> Any:
    """Mean embeddings in one folder."""
    request = EmbeddingRequest.of(turbo, [-1], ["mean"])
    assert not embed_records(turbo, records, folder, request, runner=workers).failed
    return sorted(path.name for path in folder.iterdir())


def store(turbo: TurboEsm, records: list[ProteinRecord], folder: Path, workers: Workers) -> Any:
    """Contexts in one store."""
    with ContextStore(folder, host_bytes=0, device_bytes=0) as contexts:
        sequences = [record.sequence for record in records]
        store_sequences(turbo, contexts, sequences, on_failure=_stop, runner=workers)
    return sorted(path.name for path in folder.rglob("*.safetensors"))


def score(turbo: TurboEsm, records: list[ProteinRecord], folder: Path, workers: Workers) -> Any:
    """Sixteen peptides on every protein."""
    peptides = [records[0].sequence[start : start + 12] for start in range(16)]
    candidates = [Candidate(str(number), peptide) for number, peptide in enumerate(peptides)]
    run = score_records(turbo, records, candidates, ["frozen"], runner=workers)
    assert not run.failed
    return list(run.rows())


def _stop(sequence: str, reason: str) -> None:
    raise RuntimeError(reason)


TASKS: dict[str, Task] = {"embed": embed, "store": store, "score": score}


def main() -> None:
    """Measure, and print the figures; `--save` appends them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", required=True)
    parser.add_argument("--proteins", type=int, default=2000)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    records = read_fasta(calibration_proteins())[0][: options.proteins]
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(EMBEDDED_MODEL)
        if options.layers is not None:
            folder = str(Path(temporary) / "model")
            _random(folder, options)
        turbo = Load(folder, options.dtype)("cpu")
        seconds: dict[str, list[float]] = {name: [] for name in TASKS}
        found: dict[str, list[Any]] = {name: [] for name in TASKS}
        for count in (1, len(options.devices)):
            with Workers(Load(folder, options.dtype), options.devices[:count]) as workers:
                for name, task in TASKS.items():
                    # Every process loads the model and compiles its kernels first.
                    task(turbo, records[: 8 * count], Path(temporary) / f"{name}-{count}-first", workers)
                    start = time.perf_counter()
                    found[name].append(task(turbo, records, Path(temporary) / f"{name}-{count}", workers))
                    seconds[name].append(time.perf_counter() - start)
        for name, (one, several) in found.items():
            assert one == several, f"{name}: the results differ"
    figures = {
        "devices": options.devices,
        "proteins": len(records),
        "residues": sum(len(record.sequence) for record in records),
        "seconds": seconds,
        "speedup": {name: one / several for name, (one, several) in seconds.items()},
        "geometry": None if options.layers is None else [options.layers, options.hidden, options.heads],
        "dtype": options.dtype,
    }
    print(json.dumps(figures, indent=2))
    if options.save:
        append(RESULTS / "devices.jsonl", "devices", figures, model=turbo.name, device=options.devices[0])


def _random(folder: str, options: argparse.Namespace) -> None:
    """Save a model of random weights."""
    own = TurboEsm.from_pretrained(device="cpu")
    config = EsmConfig.from_pretrained(EMBEDDED_MODEL)
    config.num_hidden_layers, config.hidden_size = options.layers, options.hidden
    config.num_attention_heads, config.intermediate_size = options.heads, 4 * options.hidden
    config.untrained_heads = ["contact_head"]
    torch.manual_seed(0)
    EsmForMaskedLM(config).save_pretrained(folder)
    own.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
