"""Results of the records of files, such as targets with candidates, and the table that is written of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TextIO, TypeVar

from esm_turbo.files.tables import write_table
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.run_info import RUN_COLUMNS, RunInfo, run_metadata
from esm_turbo.tasks.common.scoring_task import Scored


class RecordResult(Tabular):
    """What was scored of one record.

    Attributes:
        record: the record.
        scores: of what belongs to it, by arm.
        numbers: of what was scored here among all that belongs to the record; None for all.
    """

    scores: Mapping[Arm, Any]
    numbers: Sequence[int] | None = None

    scored: ClassVar[str]
    """Name of the attribute that holds what was scored, in the order of the scores."""

    @property
    def record(self) -> ProteinRecord:
        raise NotImplementedError

    def given(self) -> Iterable[Mapping[str, str]]:
        """For each row the columns that the file has of it; none if it is no table."""
        raise NotImplementedError

    def to_state(self) -> dict[str, Any]:
        """JSON values of which `from_state` makes it again."""
        # Results are data classes.
        values: dict[str, Any] = asdict(replace(self, scores={}))  # type: ignore[call-overload, type-var]
        return values | {"scores": {arm: one.to_dict() for arm, one in self.scores.items()}}

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_state`."""
        raise NotImplementedError

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The result of a record from parts of it."""
        if len(parts) == 1:
            return parts[0]
        whole = Scored.joined([Scored(dict(one.scores), numbers=one.numbers) for one in parts])
        numbered = {
            number: scored
            for one in parts
            for number, scored in zip(one.numbers or (), getattr(one, cls.scored), strict=True)
        }
        own = {cls.scored: tuple(numbered[number] for number in sorted(numbered))}
        return replace(parts[0], scores=whole.scores, numbers=whole.numbers, **own)  # type: ignore[type-var]


ResultT = TypeVar("ResultT", bound=RecordResult)


@dataclass
class RecordRun(Tabular, Generic[ResultT]):
    """Results of all records.

    Attributes:
        results: one per record that could be scored.
        failed: records, and what belongs to them, that could not be scored.
        lost: identifiers of the records among them: a part that another shard has scored counts for nothing.
    """

    results: list[ResultT] = field(default_factory=list)
    failed: list[BadRecord] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    noun: ClassVar[str]
    result_class: ClassVar[type[Any]]
    """Class of the results."""
    no_columns: ClassVar[tuple[str, ...]]
    """Columns of a table without results."""
    more_columns: ClassVar[tuple[str, ...]]
    """Columns of text that tables may have besides."""
    types: ClassVar[Mapping[str, type[int] | type[float]]]
    """Columns that hold numbers."""

    def __repr__(self) -> str:
        return named(self, counted(len(self.results), self.noun), f"{len(self.failed):,} failed")

    def columns(self) -> list[str]:
        """Those of the results, and the other columns of the file but those `left_out`."""
        return [*self._own_columns(), *self._other_columns()]

    def rows(self) -> Iterator[list[object]]:
        """Rows of `columns`, record by record."""
        others = self._other_columns()
        for result in self.results:
            for row, given in zip(result.rows(), result.given(), strict=True):
                yield [*row, *(given.get(name, "") for name in others)]

    def _own_columns(self) -> Sequence[str]:
        return next((one.columns() for one in self.results), self.no_columns)

    @classmethod
    def own_names(cls) -> set[str]:
        """Names of all columns that tables of such runs have of their own, in lower case."""
        return {*cls.no_columns, *cls.more_columns, *cls.types, *RUN_COLUMNS}

    def left_out(self) -> list[str]:
        """Other columns of the file that have such a name: figures of an earlier run are not those of this one."""
        return [name for name in self._given_columns() if name.lower() in self.own_names()]

    def _other_columns(self) -> list[str]:
        return [name for name in self._given_columns() if name.lower() not in self.own_names()]

    def _given_columns(self) -> Iterable[str]:
        return next((one for result in self.results for one in result.given()), {})

    def lose(self, record: ProteinRecord, reason: str) -> None:
        """Add a record that could not be scored."""
        self.failed.append(BadRecord(record.id, reason))
        self.lost.add(record.id)

    def to_state(self, records: Sequence[ProteinRecord]) -> list[Any]:
        """JSON values of the results, each with the number of its record among all, for `of_shards`; None if lost."""
        results = {one.record.id: one.to_state() for one in self.results} | dict.fromkeys(self.lost)
        return [[number, results[one.id]] for number, one in enumerate(records) if one.id in results]

    @classmethod
    def of_shards(cls, shards: Iterable[Sequence[Any]]) -> Self:
        """The results of the run that its shards are parts of, given `to_state` of each."""
        parts: defaultdict[int, list[Any]] = defaultdict(list)
        for number, values in (one for shard in shards for one in shard):
            parts[number].append(values)
        whole = [own for _, own in sorted(parts.items()) if None not in own]
        return cls([cls.result_class.joined(list(map(cls.result_class.from_state, own))) for own in whole])

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
