"""Candidates against targets as a matrix: one row per target, one column per candidate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, get_args

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import leaves_list, linkage

from esm_turbo.files.tables import write_table
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.tasks.common.checks import check_choice
from esm_turbo.tasks.common.options import SortBy
from esm_turbo.tasks.scoring.score import Scores, compared_with, specificities

UNIT_NAMES = {"nats": "nats per residue", "s.d.": "standard deviations"}
"""Units of log-likelihoods and specificities, in full."""

# Columns before those of the candidates.
_HEAD = ("target", "number")


@dataclass(frozen=True, eq=False)
class ScoreMatrix(Tabular):
    """One number of every candidate on every target.

    Attributes:
        targets: their names, one per row.
        candidates: their names, one per column; residues where names are missing or not unique.
        values: float64 [targets, candidates], in `unit`, higher is better; NaN where a candidate was not scored.
        by: `likelihood`, mean log-probability, or `specificity`.
        unit: `nats`, per residue, or `s.d.`, standard deviations of the background.
        background: of specificity, such as `12 decoys`.
    """

    targets: tuple[str, ...]
    candidates: tuple[str, ...]
    values: npt.NDArray[np.float64]
    by: SortBy
    unit: str = "nats"
    background: str | None = None

    @classmethod
    def of(
        cls, scores: Sequence[tuple[str, Scores]], names: Mapping[str, str] | None = None, by: SortBy | None = None
    ) -> ScoreMatrix:
        """The matrix of some scores.

        Args:
            scores: targets with their scores.
            names: of candidates, by their residues; None for none.
            by: the number; None is `specificity` where there is a background. It is in standard deviations if all
                candidates on all targets have it in them, see `specificities`.

        Raises:
            ValueError: `by` is neither, or is `specificity` without a background.
        """
        compared = any(own.background is not None for _, own in scores)
        number = check_choice("by", by or ("specificity" if compared else "likelihood"), get_args(SortBy))
        if number == "specificity" and not compared:
            raise ValueError("`by` 'specificity' needs scores with a `background`")
        every = [one for _, own in scores for one in own.scores]
        if number == "specificity":
            unit, found = specificities(every)
            background = compared_with(next(own.background for _, own in scores if own.background is not None), every)
        else:
            unit, found, background = "nats", [one.mean_log_probability for one in every], None
        columns = {sequence: index for index, sequence in enumerate(dict.fromkeys(one.candidate for one in every))}
        rows = (row for row, (_, own) in enumerate(scores) for _ in own.scores)
        values = np.full((len(scores), len(columns)), np.nan)
        for row, one, value in zip(rows, every, found, strict=True):
            values[row, columns[one.candidate]] = np.nan if value is None else value
        known = names or {}
        labels = [known.get(sequence, sequence) for sequence in columns]
        if len({*labels, *_HEAD}) < len(labels) + len(_HEAD):
            labels = list(columns)
        return cls(tuple(name for name, _ in scores), tuple(labels), values, number, unit, background)

    def __repr__(self) -> str:
        return named(self, counted(len(self.targets), "target"), counted(len(self.candidates), "candidate"), by=self.by)

    @property
    def label(self) -> str:
        """What the values are, with the background and the unit."""
        name = f"specificity against {self.background}" if self.by == "specificity" else "mean log p"
        return f"{name} ({UNIT_NAMES[self.unit]})"

    def columns(self) -> list[str]:
        """`target`, `number`, which is `label` in every row, and the candidates."""
        return [*_HEAD, *self.candidates]

    def rows(self) -> Iterator[list[object]]:
        """Per target its name, what the values are, and the values; None where there is none."""
        for name, own in zip(self.targets, self.values.tolist(), strict=True):
            yield [name, self.label, *(None if np.isnan(value) else value for value in own)]

    def write(self, out: str | os.PathLike[str] | TextIO, metadata: Mapping[str, Any] | None = None) -> None:
        """Write `rows` to a CSV, TSV or Parquet file, atomically, or as CSV to an open file."""
        write_table(out, self.columns(), self.rows(), dict.fromkeys(self.candidates, float), metadata or {})

    def clustered(self, most: int | None = None) -> ScoreMatrix:
        """With similar targets, and similar candidates, beside each other (average linkage).

        Args:
            most: keep this many candidates, those of the highest values; None keeps all.
        """
        best = np.nanmax(np.where(np.isnan(self.values), -np.inf, self.values), axis=0)
        kept = np.sort(np.argsort(-best, kind="stable")[:most])
        values = self.values[:, kept]
        rows, columns = _leaves(values), _leaves(values.T)
        return ScoreMatrix(
            tuple(self.targets[row] for row in rows),
            tuple(self.candidates[kept[column]] for column in columns),
            values[np.ix_(rows, columns)],
            self.by,
            self.unit,
            self.background,
        )


def _leaves(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """An order of rows in which similar ones are neighbours."""
    if len(values) < 3:
        return np.arange(len(values))
    known = np.isfinite(values)
    middle = float(values[known].mean()) if known.any() else 0.0
    return np.asarray(leaves_list(linkage(np.where(known, values, middle), "average")), dtype=np.int64)
