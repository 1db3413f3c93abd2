"""Variants of many proteins, in batches that do not end where a protein does (`tasks.common.waves`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import as_list
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.ahead import Ahead
from esm_turbo.tasks.common.arms import ReadableSource, batch_tokens, check_store, resolve_arm
from esm_turbo.tasks.common.checks import check_choice, check_count
from esm_turbo.tasks.common.memory import check_memory, failure_reason
from esm_turbo.tasks.common.options import Arm, MarginalMethod
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.common.waves import Extensions, Rows, merge_errors, predict_rows
from esm_turbo.tasks.variants.score import VariantScores, added_up, first_position_of, score_variants, window_rows
from esm_turbo.tasks.variants.substitutions import RESIDUE_COLUMNS, Substitutions, all_substitutions

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class WildType(NamedTuple):
    """A protein with its variants.

    Attributes:
        residues: of the protein.
        variants: their notations; None for all single substitutions.
        first_position: position of the protein's first residue.
    """

    residues: str
    variants: Sequence[str] | None = None
    first_position: int = 1


@dataclass(frozen=True)
class ManyVariantScores(Tabular):
    """Scores of variants of many proteins.

    Attributes:
        scores: one entry per protein, in their order; None for one that failed.
        failed: by index of the protein, why its variants could not be scored.
    """

    scores: tuple[VariantScores | None, ...]
    failed: Mapping[int, str]

    def __repr__(self) -> str:
        variants = sum(len(one.scores) for one in self.scores if one is not None)
        sizes = counted(len(self.scores), "protein"), counted(variants, "variant")
        return named(self, *sizes, f"{len(self.failed):,} failed")

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> VariantScores:
        """Scores of the variants of a protein.

        Raises:
            ValueError: they could not be scored.
        """
        found = self.scores[index]
        if found is None:
            raise ValueError(f"protein {index} was not scored: {self.failed[index % len(self)]}")
        return found

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["protein", "mutant", *RESIDUE_COLUMNS, "score"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per protein, by its index, and variant, its name, position, residues and score."""
        for index, one in enumerate(self.scores):
            for row in () if one is None else one.rows():
                yield index, *row


def score_many_variants(
    turbo: ContextModel,
    wild_types: Sequence[str | ProteinRecord],
    variants: Sequence[Sequence[str]] | None = None,
    *,
    method: MarginalMethod = "masked",
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
) -> ManyVariantScores:
    """Score variants of many proteins: as `score_variants` on each, up to rounding, in batches filled across proteins.

    Args:
        wild_types: residues of each, or its record, whose header may state the position of its first residue. One
            that is invalid, does not have the residues that its variants name, or does not fit into memory fails, and
            the others are scored.
        variants: those of each protein, as many lists as there are proteins; None for all single substitutions.
        progress: called with stage `score` and proteins, see `Progress`.

    `method`, `arm`, `refresh`, `toks_per_batch` and `store` are those of `score.score_variants`.

    Raises:
        ValueError: there are no proteins, not as many lists as proteins, or an option is invalid.
    """
    given, lists = checked_proteins(wild_types, variants)
    residues = as_list(given, "wild_type")
    own = repeat(None, len(given)) if lists is None else lists
    proteins = [
        WildType(sequence, names, first_position_of(one))
        for one, sequence, names in zip(given, residues, own, strict=True)
    ]
    found = iter_variants(
        turbo, proteins, method=method, arm=arm, refresh=refresh, toks_per_batch=toks_per_batch, store=store
    )
    counter = StageProgress(progress, "score", len(given))
    scored: list[VariantScores | None] = []
    failed: dict[int, str] = {}
    for index, one in found:
        if isinstance(one, Exception):
            failed[index] = failure_reason(residues[index], one, turbo.model.device)
        scored.append(one if isinstance(one, VariantScores) else None)
        counter.advance(1)
    return ManyVariantScores(tuple(scored), failed)


def iter_variants(
    turbo: ContextModel,
    wild_types: Sequence[WildType],
    *,
    method: MarginalMethod = "masked",
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    counter: StageProgress | None = None,
    ahead: Ahead | None = None,
) -> Iterator[tuple[int, VariantScores | Exception]]:
    """Score variants of many proteins, and yield the scores protein by protein.

    Args:
        counter: counts the positions of all proteins.
        ahead: see `waves.predict_rows`.

    `score_many_variants` has the other arguments.

    Yields:
        For each protein, in order, its index and scores, or the ValueError or lack of memory that it failed with.

    Raises:
        ValueError: an option is invalid.
    """
    check_choice("method", method, get_args(MarginalMethod))
    check_store(store)
    check_count("refresh", refresh, 0)
    arm, preset = resolve_arm(turbo, arm)
    tokens = batch_tokens(toks_per_batch, arm, turbo.model.device)
    counter = StageProgress(None, "score", 0) if counter is None else counter
    if arm == "full":
        return _recomputed(turbo, wild_types, method, tokens, counter)
    warn_if_long((len(one.residues) for one in wild_types), turbo.model.family, stacklevel=3)
    proteins = _Proteins(turbo, wild_types, method, arm, preset, refresh if method == "masked" else 0)
    return proteins.scores(tokens, store, counter, ahead)


def _recomputed(
    turbo: ContextModel, wild_types: Sequence[WildType], method: MarginalMethod, tokens: int, counter: StageProgress
) -> Iterator[tuple[int, VariantScores | Exception]]:
    """One protein after the other: every row holds a whole protein, so that there is nothing to share."""
    for index, one in enumerate(wild_types):
        try:
            # Before there is an object for each of its variants.
            check_memory(turbo.model.base_model, len(one.residues) + 2)
            scores = score_variants(
                turbo,
                one.residues,
                one.variants,
                method=method,
                arm="full",
                first_position=one.first_position,
                toks_per_batch=tokens,
                progress=counter.part(),
            )
        except Exception as error:
            if not (isinstance(error, ValueError) or is_out_of_memory(error)):
                raise
            yield index, error.with_traceback(None)
        else:
            yield index, scores


def checked_proteins(
    wild_types: Sequence[str | ProteinRecord], variants: Sequence[Sequence[str]] | None
) -> tuple[list[str | ProteinRecord], list[Sequence[str]] | None]:
    """The proteins, and the variants of each, as lists; arguments and errors are those of `score_many_variants`."""
    given: list[str | ProteinRecord] = [wild_types] if isinstance(wild_types, str | ProteinRecord) else list(wild_types)
    as_list(given, "wild_type")
    if variants is None:
        return given, None
    lists = [[own] if isinstance(own, str) else own for own in variants]
    if isinstance(variants, str) or len(lists) != len(given):
        got = repr(variants) if isinstance(variants, str) else len(lists)
        raise ValueError(f"`variants` must be one list per protein ({len(given)}), got {got}")
    return given, lists


class _Parsed(NamedTuple):
    """Variants of a protein.

    Attributes:
        residues: of the protein.
        substitutions: of all variants.
        row: row of the predictions that each substitution reads, int64.
        refresh: residues around a position that run with it.
    """

    residues: str
    substitutions: Substitutions
    row: npt.NDArray[np.int64]
    refresh: int


class _Proteins:
    """The proteins of a run, as rows that extend their contexts in place."""

    def __init__(
        self,
        turbo: ContextModel,
        wild_types: Sequence[WildType],
        method: MarginalMethod,
        arm: Arm,
        preset: str | None,
        refresh: int,
    ) -> None:
        self.turbo, self.wild_types = turbo, wild_types
        self.method, self.arm, self.preset, self.refresh = method, arm, preset, refresh
        self.parsed: dict[int, _Parsed] = {}
        self.invalid: dict[int, ValueError] = {}

    def scores(
        self, tokens: int, store: ReadableSource | None, counter: StageProgress, ahead: Ahead | None
    ) -> Iterator[tuple[int, VariantScores | Exception]]:
        predicted = predict_rows(
            self.turbo, self._jobs(), self.arm, tokens, store=store, advance=counter.advance, ahead=ahead
        )
        scored = (
            (index, values if isinstance(values, Exception) else self._scores(index, values[0]))
            for index, values in predicted
        )
        return merge_errors(scored, self.invalid, len(self.wild_types))

    def _jobs(self) -> Iterator[Rows]:
        codes = self.turbo.codes
        for index, (wild_type, variants, first_position) in enumerate(self.wild_types):
            try:
                inner = codes.encode(wild_type, "the wild type")
                if codes.mask in inner:
                    raise ValueError("the wild type holds a <mask>; give residues only")
                residues = codes.decode(inner)
                if variants is None:
                    parsed = Substitutions.all(residues)
                else:
                    parsed = Substitutions.parse(as_list(variants, "variant"), residues, first_position)
            except ValueError as error:
                self.invalid[index] = error
                continue
            refresh = min(self.refresh, len(residues) - 1)
            positions, row = np.unique(parsed.index, return_inverse=True)
            self.parsed[index] = _Parsed(residues, parsed, row, refresh)
            ids = (codes.cls, *inner, codes.eos)
            make = self._maker(ids, torch.from_numpy(positions), refresh)
            yield Rows(index, ids, len(ids), len(positions), refresh + 1, make, hides=True)

    def _maker(self, ids: Sequence[int], positions: Tensor, refresh: int) -> Callable[[Tensor], Extensions]:
        def make(numbers: Tensor) -> Extensions:
            residues = len(ids) - 2
            own = positions[numbers]
            input_ids, at, options = window_rows(self.turbo.codes, ids, residues, own, self.method, refresh)
            return Extensions(input_ids, at, options["attention_mask"][:, : len(ids)], options["position_ids"])

        return make

    def _scores(self, index: int, predicted: Tensor) -> VariantScores:
        """Scores from the log-probabilities at each position."""
        one, (_, variants, first_position) = self.parsed.pop(index), self.wild_types[index]
        # All single ones get their names only now: there are many, and the wave may hold many proteins.
        names = all_substitutions(one.residues, first_position) if variants is None else as_list(variants, "variant")
        scores = added_up(self.turbo.codes, names, one.substitutions, one.row, predicted)
        return VariantScores(
            scores, one.residues, self.method, self.arm, self.preset, one.refresh, self.turbo.name, first_position
        )
