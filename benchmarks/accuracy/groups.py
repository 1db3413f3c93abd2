"""Accuracy by fold and at motifs of active sites, leave-one-out on all domains."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from benchmarks.harness.embedded import embedded, evaluation_set, exactness, rounded
from benchmarks.harness.measure import Case, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRESETS
from esm_turbo.evaluate.protocols import Comparison, Protein, leave_one_out
from esm_turbo.proteins.fasta import ProteinRecord

PRESET_NAMES = ("paper", "turbo3", "turbo1")
FOLDS = {
    "mainly alpha": r"1\.",
    "mainly beta": r"2\.",
    "beta barrels": r"2\.40\.",
    "beta propellers": r"2\.1[1-4]\d\.",
    "alpha beta": r"3\.",
    "TIM barrels": r"3\.20\.20\.",
    "little structure": r"4\.",
}
"""Beginnings of CATH codes by name; a fold is also part of its class."""
MOTIFS = {
    "GxSxG, serine hydrolases": "G.S.G",
    "GDSGG, trypsin-like proteases": "GDSGG",
    "D[ST]G, aspartic proteases": "D[ST]G",
    "HExxH, zinc proteases": "HE..H",
    "CxxC, thiol oxidoreductases": "C..C",
    "GxxxxGK[ST], P-loops": "G....GK[ST]",
}
"""Patterns of sequences by name: a match need not be a site."""


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case with a row for each preset."""
    proteins = evaluation_set("cath_val200", max_proteins)
    yield Case(
        name="folds and motifs",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "set": "cath_val200.fasta", "tested": len(proteins)},
        check=lambda: exactness(proteins[0]),
        measure=functools.partial(_measure, proteins),
    )


def _measure(proteins: Sequence[ProteinRecord], repeats: int) -> list[Figures]:
    configs = {name: PRESETS[name] for name in PRESET_NAMES}
    chosen = [Protein(record.id, record.sequence) for record in proteins]
    arms = leave_one_out(embedded(), chosen, configs, lambda done: None, layers=False)
    codes = {record.id: record.description for record in proteins}
    return [
        {"preset": name, "proteins": len(proteins), **_by_group(arms.turbo_frozen[name], codes)} for name in configs
    ]


def _by_group(found: Comparison, codes: dict[str, str]) -> Figures:
    errors = found.residues
    names = np.array([protein.name for protein in found.proteins])
    groups: Figures = {"all": {"residues": rounded(asdict(errors.accuracy()))}}
    for fold, pattern in FOLDS.items():
        members = {name for name, code in codes.items() if re.match(pattern, code)}
        if members:
            of_fold = errors[np.isin(names, sorted(members))].accuracy()
            groups[fold] = {"domains": len(members), "residues": rounded(asdict(of_fold))}
    motifs: Figures = {}
    for motif, pattern in MOTIFS.items():
        inside = np.array([
            position - 1 in in_matches(pattern, protein.sequence)
            for protein, position in zip(found.proteins, found.positions, strict=True)
        ])  # fmt: skip
        if inside.any():
            motifs[motif] = {"residues": rounded(asdict(errors[inside].accuracy()))}
    return {"folds": groups, "motifs": motifs}


@functools.cache
def in_matches(pattern: str, sequence: str) -> frozenset[int]:
    """Residues inside matches of a pattern, which may overlap, counted from 0."""
    found = re.finditer(f"(?=({pattern}))", sequence)
    return frozenset(place for match in found for place in range(match.start(), match.start() + len(match[1])))
