"""Select the long proteins of `calibration_data/evaluation/`, for accuracy by position.

    python scripts/select_long_evaluation_proteins.py SOURCES

Run by maintainers, after `select_calibration_proteins.py`. SOURCES has `human_refseq.fasta.gz`. Selects the first
proteins, in the order of a hash of their sequences, of 600 to 1,022 standard residues that share at most two 10-mers
with the calibration proteins and with each other.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from esm_turbo.files.writing import replacing
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord, read_fasta_strict

DATA = Path(__file__).resolve().parents[1] / "calibration_data"
OUT = DATA / "evaluation" / "long_human.fasta"
NUM_PROTEINS = 12
MIN_LENGTH, MAX_LENGTH = 600, 1022
KMER, MAX_SHARED_KMERS = 10, 2


def kmers(sequence: str) -> set[str]:
    return {sequence[i : i + KMER] for i in range(len(sequence) - KMER + 1)}


def choose(candidates: list[ProteinRecord], taken: set[str]) -> list[ProteinRecord]:
    """The first candidates that share at most two 10-mers with `taken` and with each other."""
    chosen: list[ProteinRecord] = []
    taken = set(taken)
    for record in sorted(candidates, key=lambda r: hashlib.sha256(r.sequence.encode()).digest()):
        own = kmers(record.sequence)
        if len(own & taken) <= MAX_SHARED_KMERS:
            chosen.append(record)
            taken |= own
        if len(chosen) == NUM_PROTEINS:
            break
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    sources: Path = parser.parse_args().sources
    candidates = [
        record
        for record in read_fasta_strict(sources / "human_refseq.fasta.gz")
        if MIN_LENGTH <= len(record.sequence) <= MAX_LENGTH and set(record.sequence) <= set(STANDARD_RESIDUES)
    ]
    taken = set().union(*(kmers(record.sequence) for record in read_fasta_strict(DATA / "proteins.fasta")))
    with replacing(OUT) as path, path.open("w") as file:
        for record in choose(candidates, taken):
            file.write(f">{record.id}\n{record.sequence}\n")


if __name__ == "__main__":
    main()
