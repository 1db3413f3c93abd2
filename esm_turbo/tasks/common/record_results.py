"""Results of the records of files, such as targets with candidates, and the table that is written of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TextIO, TypeVar

from esm_turbo.files.tables import write_table
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.tasks.common.records import kept_columns
from esm_turbo.tasks.common.run_info import RUN_COLUMNS, RunInfo, run_metadata


class RecordResult(Tabular):
    """What was scored of one record.

    Attributes:
        record: the record.
        numbers: of what was scored here among all that belongs to the record, where that is not all.
    """

    numbers: tuple[int, ...] | None = None

    @property
    def record(self) -> ProteinRecord:
        raise NotImplementedError

    def given(self) -> Iterable[Mapping[str, str]]:
        """For each row the columns that the file has of it; none if it is no table."""
        raise NotImplementedError

    def ranking(self) -> list[int]:
        """Indices of what was scored, best first."""
        raise NotImplementedError


ResultT = TypeVar("ResultT", bound=RecordResult)


@dataclass
class RecordRun(Tabular, Generic[ResultT]):
    """Results of all records.

    Attributes:
        results: one per record that could be scored.
        failed: records, and what belongs to them, that could not be scored.
    """

    results: list[ResultT] = field(default_factory=list)
    failed: list[BadRecord] = field(default_factory=list)

    noun: ClassVar[str]
    no_columns: ClassVar[tuple[str, ...]]
    """Columns of a table without results."""
    replaced: ClassVar[tuple[str, ...]] = ()
    """Columns of the file that stand in the table under other names."""
    types: ClassVar[Mapping[str, type[int] | type[float]]]
    """Columns that hold numbers."""

    def __repr__(self) -> str:
        return named(self, counted(len(self.results), self.noun), f"{len(self.failed):,} failed")

    def columns(self) -> list[str]:
        """Those of the results, and the other columns of the file."""
        return [*self._own_columns(), *self._other_columns()]

    def rows(self) -> Iterator[list[object]]:
        """Rows of `columns`, record by record."""
        others = self._other_columns()
        for result in self.results:
            for row, given in zip(result.rows(), result.given(), strict=True):
                yield [*row, *(given.get(name, "") for name in others)]

    def _own_columns(self) -> Sequence[str]:
        return next((one.columns() for one in self.results), self.no_columns)

    def _other_columns(self) -> list[str]:
        given = (one for result in self.results for one in result.given())
        return kept_columns(given, [*self._own_columns(), *self.replaced, *RUN_COLUMNS])

    def places(self, records: Sequence[ProteinRecord]) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Where the rows belong among those of all shards, see `Manifest`.

        Args:
            records: all records of the input.

        Returns:
            Numbers of records with those of their rows; and by number of a record of which not all was scored here,
            numbers of what was, in the order of the rows.
        """
        numbers = {record.id: number for number, record in enumerate(records)}
        order = [(numbers[one.record.id], sum(1 for _ in one.given())) for one in self.results]
        partial = {
            numbers[one.record.id]: [one.numbers[index] for index in one.ranking()]
            for one in self.results
            if one.numbers is not None
        }
        return order, partial

    def write(
        self,
        out: str | os.PathLike[str] | TextIO,
        run: RunInfo | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `rows` to a CSV, TSV or Parquet file, atomically, or as CSV to an open file.

        Args:
            out: the file.
            run: what the run used, added in `RUN_COLUMNS`.
            settings: the run's options, JSON values, for the metadata of a Parquet file.
        """
        columns, rows, own = self.columns(), self.rows(), list(self._own_columns())
        if run is not None:
            # A row is of one arm, or of all of them.
            arm = own.index("arm") if "arm" in own else None
            cells: dict[object, list[str]] = {None: run.cells()} | {name: run.cells(name) for name in run.arms}
            rows = ([*row, *cells[None if arm is None else row[arm]]] for row in rows)
            columns += RUN_COLUMNS
        write_table(out, columns, rows, self.types, run_metadata(run, settings))
