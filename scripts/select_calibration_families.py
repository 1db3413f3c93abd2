"""Select families of homologs for calibration.

    python scripts/select_calibration_families.py SEQUENCES.txt.gz EXCLUDED.fasta

Sequences are one per line. Those of 40 to 400 residues are grouped by shared 5-mers (MinHash, Broder 1997), the longest
of a group being its first; sequences with three or more 10-mers of the excluded ones are left out. Writes the families,
in a random order, to calibration_data/families.fasta.
"""

from __future__ import annotations

import gzip
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from esm_turbo.proteins.fasta import read_fasta_strict

OUT = Path(__file__).resolve().parents[1] / "calibration_data" / "families.fasta"
FAMILIES, MEMBERS, FEWEST = 64, 6, 5
SHORTEST, LONGEST = 40, 400
# A sequence is of a group if it shares so many of the smallest hashes of its first one.
_HASHES, _SHARED = 24, 4
_ODD = 0x9E3779B97F4A7C15


def smallest_hashes(sequence: str) -> list[int]:
    """The smallest hashes of a sequence's 5-mers."""
    letters = np.frombuffer(sequence.encode(), dtype=np.uint8).astype(np.uint64) - np.uint64(64)
    words = np.lib.stride_tricks.sliding_window_view(letters, 5) @ (np.uint64(32) ** np.arange(5, dtype=np.uint64))
    found: list[int] = np.unique((words * np.uint64(_ODD)) >> np.uint64(20))[:_HASHES].tolist()
    return found


def families(sequences: list[str], excluded: set[str]) -> list[list[str]]:
    """Groups of at least `FEWEST` sequences."""
    known: dict[int, list[str]] = defaultdict(list)
    groups: dict[str, list[str]] = defaultdict(list)
    for sequence in sorted(dict.fromkeys(sequences), key=lambda one: (-len(one), one)):
        if sum(sequence[i : i + 10] in excluded for i in range(len(sequence) - 9)) >= 3:
            continue
        hashes = smallest_hashes(sequence)
        nearest = Counter(first for one in hashes for first in known.get(one, ())).most_common(1)
        if nearest and nearest[0][1] >= _SHARED:
            groups[nearest[0][0]].append(sequence)
            continue
        groups[sequence] = [sequence]
        for one in hashes:
            known[one].append(sequence)
    return [group for group in groups.values() if len(group) >= FEWEST]


def main(source: str, held_out: str) -> None:
    with gzip.open(source, "rt") as file:
        sequences = [line.strip() for line in file]
    excluded = {
        record.sequence[i : i + 10] for record in read_fasta_strict(held_out) for i in range(len(record.sequence) - 9)
    }
    found = families([one for one in sequences if SHORTEST <= len(one) <= LONGEST], excluded)
    generator = random.Random(0)
    generator.shuffle(found)
    with OUT.open("w") as file:
        for number, group in enumerate(found[:FAMILIES]):
            for member, sequence in enumerate(generator.sample(group, min(MEMBERS, len(group)))):
                print(f">family{number}_{member} family={number}", sequence, sep="\n", file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
