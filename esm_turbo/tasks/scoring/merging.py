"""Tables of scores that are joined from shards: ranks over all candidates, and specificity over all targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esm_turbo.tasks.scoring.score import SPECIFICITY_COLUMNS, scored_residues
from esm_turbo.tasks.scoring.specificity import figures_on_others, highest

Row = list[Any]
"""Cells of a table, in CSV all of them text."""


def ranked(
    columns: Sequence[str], settings: Mapping[str, Any], segments: Sequence[tuple[Sequence[int], Sequence[Row]]]
) -> Iterator[Row]:
    """The rows of one target, ranked over all segments; equal candidates keep their order in the input.

    Args:
        columns: of the rows.
        settings: of the run; `sort_by` says what ranks.
        segments: numbers of candidates, and their rows, one per arm.
    """
    rank, arm = columns.index("rank"), columns.index("arm")
    by_candidate: list[tuple[int, list[Row]]] = []
    for numbers, rows in segments:
        arms = len(rows) // len(numbers)
        by_candidate += [(number, list(rows[arms * i : arms * (i + 1)])) for i, number in enumerate(numbers)]
    by_candidate.sort(key=lambda one: one[0])
    names = [row[arm] for row in by_candidate[0][1]]
    orders = []
    for index in range(len(names)):
        values = _costs(columns, [own[index] for _, own in by_candidate], settings.get("sort_by", "likelihood"))
        orders.append(sorted(range(len(values)), key=values.__getitem__))
        for place, one in enumerate(orders[-1], start=1):
            row = by_candidate[one][1][index]
            row[rank] = type(row[rank])(place)
    # As in a run of its own, the arm `full` orders the candidates, or else the first.
    for one in orders[names.index("full") if "full" in names else 0]:
        yield from by_candidate[one][1]


def _costs(columns: Sequence[str], rows: Sequence[Row], sort_by: str) -> list[float]:
    """What ranks the rows of an arm, lowest first."""
    if sort_by == "likelihood":
        return [float(row[columns.index("pseudo_perplexity")]) for row in rows]
    difference, in_spreads = ([_number(row[columns.index(name)]) for row in rows] for name in SPECIFICITY_COLUMNS)
    use_spreads = all(z is not None for z, x in zip(in_spreads, difference, strict=True) if x is not None)
    return [math.inf if x is None else -x for x in (in_spreads if use_spreads else difference)]


def _number(cell: Any) -> float | None:
    return None if cell in (None, "") else float(cell)


def with_other_targets(columns: Sequence[str], settings: Mapping[str, Any], targets: Sequence[Sequence[Row]]) -> None:
    """Fill in the specificity of candidates on every target by all others.

    Args:
        columns: of the rows.
        settings: of the run.
        targets: rows of each target, which are changed.
    """
    target, sequence, arm = (columns.index(name) for name in ("target", "sequence", "arm"))
    likelihood = columns.index("pseudo_log_likelihood")
    at = columns.index(SPECIFICITY_COLUMNS[0])
    equal = settings.get("equal_targets", {})
    unknown = settings.get("unknown_residues", "omit")
    for name in dict.fromkeys(row[arm] for rows in targets for row in rows):
        own = [[row for row in rows if row[arm] == name] for rows in targets]
        means = [
            [(row[sequence], float(row[likelihood]) / scored_residues(row[sequence], unknown)) for row in rows]
            for rows in own
        ]
        names = [equal.get(rows[0][target], rows[0][target]) for rows in own]
        found = figures_on_others([(name, highest(values)) for name, values in zip(names, means, strict=True)])
        for rows, values, figures in zip(own, means, found, strict=True):
            for row, (candidate, value) in zip(rows, values, strict=True):
                background = figures.get(candidate)
                if background is not None:
                    difference = value - background.mean
                    row[at : at + 2] = difference, background.in_spreads(difference)
