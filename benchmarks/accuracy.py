"""Accuracy and memory of full precision, the paper's preset and its ablation, on the embedded model.

    python -m benchmarks.accuracy [--proteins FASTA ...] [--max-proteins N] [--presets NAME ...] [--no-outliers]

Every preset and protein set adds one line of kind "accuracy" to benchmarks/results/accuracy.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks import records
from esm_turbo import TurboEsm
from esm_turbo.assets import evaluation_proteins
from esm_turbo.config import PRESETS, TurboConfig
from esm_turbo.evaluate import PAPER_ABLATION, Evaluation
from esm_turbo.fasta import read_fasta_strict

PROTEINS = (evaluation_proteins(), evaluation_proteins().with_name("paper_six.fasta"))


def choose_presets(names: list[str] | None) -> dict[str, TurboConfig]:
    """Presets by name; None is full precision, the paper's, and the paper's ablation."""
    known = PRESETS | {f"paper, {name}": config for name, config in PAPER_ABLATION.items() if name != "full"}
    chosen = [name for name in known if name not in PRESETS or name in ("exact", "paper")] if names is None else names
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise ValueError(f"no such preset: {unknown}; there are {sorted(known)}")
    return {name: known[name] for name in chosen}


def write(evaluation: Evaluation, path: Path, proteins: Path, seconds: float) -> None:
    """One line per preset."""
    whole = evaluation.to_dict()
    for preset in whole["presets"]:
        figures = {
            "proteins": proteins.name,
            "seconds": round(seconds, 1),
            "provenance": whole["provenance"],
            "frozen": whole["frozen"],
            "outliers": whole["outliers"],
            "preset": preset,
        }
        about = evaluation.provenance
        records.append(path, "accuracy", figures, model=about.model, device=about.device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proteins", type=Path, nargs="+", default=PROTEINS, metavar="FASTA")
    parser.add_argument("--max-proteins", type=int, metavar="N")
    parser.add_argument("--presets", nargs="+", metavar="NAME")
    parser.add_argument("--no-outliers", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "accuracy.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    presets = choose_presets(options.presets)
    turbo = TurboEsm.from_pretrained(device="cpu")
    for path in options.proteins:
        proteins = read_fasta_strict(path)
        begin = time.perf_counter()
        evaluation = turbo.evaluate(
            [protein.sequence for protein in proteins],
            presets,
            options.max_proteins,
            names=[protein.id for protein in proteins],
            classes=[protein.structural_class for protein in proteins],
            progress=_show,
            **({"outlier_scales": ()} if options.no_outliers else {}),
        )
        write(evaluation, options.out, path, time.perf_counter() - begin)
        print(f"\n{path.name}\n{evaluation.table()}")


def _show(stage: str, done: int, total: int) -> None:
    print(f"\r{stage}: {done} of {total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
