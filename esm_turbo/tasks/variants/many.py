"""Variants of many proteins, in batches that do not end where a protein does (`tasks.common.waves`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import as_list
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.arms import ReadableSource, batch_tokens, resolve_arm
from esm_turbo.tasks.common.checks import check_choice, check_count
from esm_turbo.tasks.common.memory import too_large
from esm_turbo.tasks.common.options import Arm, MarginalMethod
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.common.waves import Extensions, Rows, predict_rows
from esm_turbo.tasks.variants.score import VariantScores, added_up, score_variants, window_rows
from esm_turbo.tasks.variants.substitutions import RESIDUE_COLUMNS, Substitutions, all_substitutions

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


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
    wild_types: Sequence[str],
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
        wild_types: residues of each. One that is invalid, does not have the residues that its variants name, or does
            not fit into memory fails, and the others are scored.
        variants: those of each protein, as many lists as there are proteins; None for all single substitutions.
        progress: called with stage `score` and proteins, see `Progress`.

    `method`, `arm`, `refresh`, `toks_per_batch` and `store` are those of `score.score_variants`.

    Raises:
        ValueError: there are no proteins, not as many lists as proteins, or an option is invalid.
    """
    check_choice("method", method, get_args(MarginalMethod))
    check_count("refresh", refresh, 0)
    wild_types = as_list(wild_types, "wild_type")
    if variants is not None and len(variants) != len(wild_types):
        raise ValueError(f"`variants` must be one list per protein ({len(wild_types)}), got {len(variants)}")
    arm, preset = resolve_arm(turbo, arm)
    tokens = batch_tokens(toks_per_batch, arm, turbo.model.device)
    counter = StageProgress(progress, "score", len(wild_types))
    found: dict[int, VariantScores | Exception] = {}
    proteins = _Proteins(turbo, wild_types, variants, method, refresh if method == "masked" else 0, found)
    if arm == "full":
        # Every row holds a whole protein, so that there is nothing to share.
        for index, wild_type in enumerate(wild_types):
            own = None if variants is None else variants[index]
            try:
                found[index] = score_variants(turbo, wild_type, own, method=method, arm=arm, toks_per_batch=tokens)
            except Exception as error:
                if not (isinstance(error, ValueError) or is_out_of_memory(error)):
                    raise
                found[index] = error.with_traceback(None)
            counter.advance(1)
    else:
        warn_if_long(map(len, wild_types), turbo.model.family, stacklevel=3)
        for index, predicted in predict_rows(turbo, proteins.jobs(), arm, tokens, store=store):
            if isinstance(predicted, Exception):
                found[index] = predicted
            else:
                one = proteins.parsed.pop(index)
                scores = added_up(turbo.codes, one.names, one.substitutions, one.row, predicted[0])
                fields = (one.residues, method, arm, preset, one.refresh, turbo.name, 1)
                found[index] = VariantScores(scores, *fields)
            counter.advance(1)
    device = turbo.model.device
    failed = {
        index: too_large(len(wild_types[index]), device, one) if is_out_of_memory(one) else str(one)
        for index, one in sorted(found.items())
        if isinstance(one, Exception)
    }
    scored = (found[index] for index in range(len(wild_types)))
    return ManyVariantScores(tuple(one if isinstance(one, VariantScores) else None for one in scored), failed)


class _Parsed(NamedTuple):
    """Variants of a protein.

    Attributes:
        residues: of the protein.
        names: of the variants.
        substitutions: of all variants.
        row: row of the predictions that each substitution reads, int64.
        refresh: residues around a position that run with it.
    """

    residues: str
    names: Sequence[str]
    substitutions: Substitutions
    row: npt.NDArray[np.int64]
    refresh: int


class _Proteins:
    """The proteins of a run, as rows that extend their contexts in place.

    Attributes:
        parsed: the variants of proteins whose rows were made.
    """

    def __init__(
        self,
        turbo: ContextModel,
        wild_types: Sequence[str],
        variants: Sequence[Sequence[str]] | None,
        method: MarginalMethod,
        refresh: int,
        found: dict[int, VariantScores | Exception],
    ) -> None:
        self.turbo, self.wild_types, self.variants = turbo, wild_types, variants
        self.method, self.refresh, self.found = method, refresh, found
        self.parsed: dict[int, _Parsed] = {}

    def jobs(self) -> Iterator[Rows]:
        """The rows of each protein; the errors of those that have none are found."""
        codes = self.turbo.codes
        for index, wild_type in enumerate(self.wild_types):
            try:
                inner = codes.encode(wild_type, "the wild type")
                if codes.mask in inner:
                    raise ValueError("the wild type holds a <mask>; give residues only")
                residues = codes.decode(inner)
                if self.variants is None:
                    names, parsed = all_substitutions(residues, 1), Substitutions.all(residues)
                else:
                    names = as_list(self.variants[index], "variant")
                    parsed = Substitutions.parse(names, residues, 1)
            except ValueError as error:
                self.found[index] = error
                continue
            refresh = min(self.refresh, len(residues) - 1)
            positions, row = np.unique(parsed.index, return_inverse=True)
            self.parsed[index] = _Parsed(residues, names, parsed, row, refresh)
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
