"""Calibration on one kind of protein and evaluation on another, by structural class and by source.

All calibrations use the same number of residues of the shipped proteins, and are evaluated on shipped proteins that
none of them uses. No two shipped proteins share more than two 10-mers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.embedded import (
    about,
    embedded,
    evaluate,
    exactness,
    manifest,
    rounded,
    shipped_proteins,
    with_calibration,
)
from benchmarks.harness.measure import Case, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRESETS
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records, first_records

MIXED = "all kinds"
TESTED_PRESETS = ("paper", "turbo3", "turbo2", "turbo1")
# Within these lengths, proteins of different kinds differ in little besides their kind.
_TESTED_LENGTHS = range(60, 351)


@dataclass(frozen=True)
class Grouping:
    """A partition of the shipped proteins.

    Attributes:
        column: of the manifest.
        groups: values of the column.
        max_residues: of each calibration.
        tested: number of proteins to evaluate per group.
    """

    column: str
    groups: tuple[str, ...]
    max_residues: int
    tested: int


CLASSES = Grouping(
    "class",
    ("mainly_alpha", "mainly_beta", "alpha_beta", "little_structure", "transmembrane", "disordered"),
    max_residues=12_000,
    tested=12,
)
SOURCES = Grouping(
    "source",
    ("PDB", "RefSeq (human)", "UniProtKB/Swiss-Prot (mitochondria)", "UniProtKB/Swiss-Prot (viruses)"),
    max_residues=6_000,
    tested=10,
)


def cases(groupings: Sequence[Grouping] = (CLASSES, SOURCES), max_proteins: int | None = None) -> Iterator[Case]:
    """One case per calibration: on each group, and on all groups in equal parts.

    Args:
        groupings: partitions of the proteins.
        max_proteins: maximum number of proteins to evaluate per group.
    """
    for grouping in groupings:
        tested, calibrations = split(grouping)
        tested = {group: proteins[:max_proteins] for group, proteins in tested.items()}
        for name, proteins in calibrations.items():
            yield _case(grouping, name, proteins, tested)


def split(
    grouping: Grouping,
) -> tuple[dict[str, list[ProteinRecord]], dict[str, list[ProteinRecord]]]:
    """Proteins to evaluate by group, and proteins of each calibration, without overlap.

    Raises:
        ValueError: a group has too few proteins.
    """
    known = manifest()
    members = {
        group: [p for p in shipped_proteins() if known[p.id][grouping.column] == group] for group in grouping.groups
    }
    tested = {}
    for group, proteins in members.items():
        short = [protein for protein in proteins if len(protein.sequence) in _TESTED_LENGTHS]
        tested[group] = short[-grouping.tested :]
        if len(tested[group]) < grouping.tested:
            raise ValueError(f"{group} has {len(tested[group])} proteins to evaluate, not {grouping.tested}")
    held_out = {protein.id for proteins in tested.values() for protein in proteins}
    rest = {group: [p for p in proteins if p.id not in held_out] for group, proteins in members.items()}
    in_turn = [p for turn in itertools.zip_longest(*rest.values()) for p in turn if p is not None]
    pools = {MIXED: in_turn, **rest}
    for name, proteins in pools.items():
        if sum(len(p.sequence) for p in proteins) < grouping.max_residues:
            raise ValueError(f"{name} has too few residues for a calibration of {grouping.max_residues}")
    return tested, {name: first_records(proteins, grouping.max_residues) for name, proteins in pools.items()}


def _case(
    grouping: Grouping,
    calibrated_on: str,
    calibration: Sequence[ProteinRecord],
    tested: Mapping[str, Sequence[ProteinRecord]],
) -> Case:
    proteins = [protein for group in tested.values() for protein in group]
    labels = [name for name, group in tested.items() for _ in group]

    def measure(repeats: int) -> Figures:
        presets = {name: PRESETS[name] for name in TESTED_PRESETS}
        made = calibrate_records(embedded(), calibration, presets=presets.values())
        evaluation = evaluate(with_calibration(made), proteins, presets, classes=labels)
        whole = rounded(evaluation.to_dict())
        return {
            "grouping": grouping.column,
            "calibrated_on": calibrated_on,
            "calibration_proteins": len(calibration),
            "calibration_residues": sum(len(p.sequence) for p in calibration),
            "provenance": about(evaluation),
            "presets": {p["name"]: p["leave_one_out"]["by_class"] for p in whole["presets"]},
        }

    return Case(
        name=f"{grouping.column}: {calibrated_on}",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "max_residues": grouping.max_residues, "tested": len(proteins)},
        check=lambda: exactness(proteins[0]),
        measure=measure,
    )
