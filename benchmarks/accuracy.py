"""Accuracy and memory of the presets, and of the paper's ablation, on the embedded model.

    python -m benchmarks.accuracy [--proteins FASTA ...] [--max-proteins N] [--presets NAME ... | --ablation]
        [--no-extend] [--no-outliers]

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
from esm_turbo.config import PRESETS, PRODUCT_PRESETS, TurboConfig
from esm_turbo.evaluate import PAPER_ABLATION, Evaluation
from esm_turbo.fasta import read_fasta_strict

SETS = ("cath_val200", "long_human", "paper_six")
PROTEINS = tuple(evaluation_proteins().with_name(f"{name}.fasta") for name in SETS)


def choose_presets(names: list[str] | None, ablation: bool) -> dict[str, TurboConfig]:
    """Presets by name, by default the product's, or the paper's ablation."""
    if ablation:
        return {"paper" if name == "full" else f"paper, {name}": config for name, config in PAPER_ABLATION.items()}
    if names is None:
        return PRODUCT_PRESETS
    unknown = sorted(set(names) - set(PRESETS))
    if unknown:
        raise ValueError(f"no such preset: {unknown}; there are {sorted(PRESETS)}")
    return {name: PRESETS[name] for name in names}


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
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--no-extend", action="store_true")
    parser.add_argument("--no-outliers", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "accuracy.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    presets = choose_presets(options.presets, options.ablation)
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
            **({"extend_ks": ()} if options.no_extend else {}),
            **({"outlier_scales": ()} if options.no_outliers else {}),
        )
        write(evaluation, options.out, path, time.perf_counter() - begin)
        print(f"\n{path.name}\n{evaluation.table()}")


def _show(stage: str, done: int, total: int) -> None:
    print(f"\r{stage}: {done} of {total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
