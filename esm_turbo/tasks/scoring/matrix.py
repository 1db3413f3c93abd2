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
from esm_turbo.tasks.scoring.score import Scores


@dataclass(frozen=True, eq=False)
class ScoreMatrix(Tabular):
    """One number of every candidate on every target.

    Attributes:
        targets: their names, one per row.
        candidates: their names, one per column; residues where names are missing or not unique.
        values: float64 [targets, candidates], nats per residue, higher is better; NaN where a candidate was not scored.
        by: `likelihood`, mean log-probability, or `specificity`.
    """

    targets: tuple[str, ...]
    candidates: tuple[str, ...]
    values: npt.NDArray[np.float64]
    by: SortBy

    @classmethod
    def of(
        cls, scores: Sequence[tuple[str, Scores]], names: Mapping[str, str] | None = None, by: SortBy | None = None
    ) -> ScoreMatrix:
        """The matrix of some scores.

        Args:
            scores: targets with their scores.
            names: of candidates, by their residues; None for none.
            by: the number; None is `specificity` where there is a background.

        Raises:
            ValueError: `by` is neither, or is `specificity` without a background.
        """
        compared = any(own.background is not None for _, own in scores)
        number = check_choice("by", by or ("specificity" if compared else "likelihood"), get_args(SortBy))
        if number == "specificity" and not compared:
            raise ValueError("`by` 'specificity' needs scores with a `background`")
        columns: dict[str, int] = {}
        cells: list[tuple[int, int, float]] = []
        for row, (_, own) in enumerate(scores):
            for one in own.scores:
                value = one.mean_log_probability if number == "likelihood" else one.specificity
                cells.append((row, columns.setdefault(one.candidate, len(columns)), np.nan if value is None else value))
        values = np.full((len(scores), len(columns)), np.nan)
        for row, column, value in cells:
            values[row, column] = value
        known = names or {}
        labels = [known.get(sequence, sequence) for sequence in columns]
        if len({*labels, "target"}) <= len(labels):
            labels = list(columns)
        return cls(tuple(name for name, _ in scores), tuple(labels), values, number)

    def __repr__(self) -> str:
        return named(self, counted(len(self.targets), "target"), counted(len(self.candidates), "candidate"), by=self.by)

    def columns(self) -> list[str]:
        """`target`, and the candidates."""
        return ["target", *self.candidates]

    def rows(self) -> Iterator[list[object]]:
        """Per target its name and values; None where there is none."""
        for name, own in zip(self.targets, self.values.tolist(), strict=True):
            yield [name, *(None if np.isnan(value) else value for value in own)]

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
        )


def _leaves(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """An order of rows in which similar ones are neighbours."""
    if len(values) < 3:
        return np.arange(len(values))
    known = np.isfinite(values)
    middle = float(values[known].mean()) if known.any() else 0.0
    return np.asarray(leaves_list(linkage(np.where(known, values, middle), "average")), dtype=np.int64)
