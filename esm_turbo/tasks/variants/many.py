"""Variants of many proteins, in batches that do not end where a protein does (`tasks.common.row_engine`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import as_list
from esm_turbo.files.tabular import counted, named
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.checks import check_choice
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import resolve_arm
from esm_turbo.tasks.common.homologs import default_query_arm
from esm_turbo.tasks.common.options import Arm, VariantMethod
from esm_turbo.tasks.common.pieces import Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.scoring_task import ManyScores, ScoringTask, score_items
from esm_turbo.tasks.variants.score import ProteinRows, VariantScores, first_position_of
from esm_turbo.tasks.variants.substitutions import RESIDUE_COLUMNS, all_substitutions, split_variant

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class WildType(NamedTuple):
    """A protein with its variants.

    Attributes:
        sequence: residues of the protein.
        first_position: position of the protein's first residue.
        variants: their notations; None for all single substitutions.
        contexts: of homologs, see `score_variants`.
    """

    sequence: str
    first_position: int = 1
    variants: Sequence[str] | None = None
    contexts: Sequence[str] = ()


class ManyVariantScores(ManyScores[VariantScores]):
    """Scores of variants of many proteins.

    Attributes:
        scores: one entry per protein, in their order; None for one that failed.
        failed: by index of the protein, why its variants could not be scored.
    """

    noun = "protein"

    def __repr__(self) -> str:
        variants = sum(len(one.scores) for one in self.scores if one is not None)
        sizes = counted(len(self.scores), "protein"), counted(variants, "variant")
        return named(self, *sizes, f"{len(self.failed):,} failed")

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["protein", "mutant", *RESIDUE_COLUMNS, "score"]


@dataclass(frozen=True)
class VariantsTask(ScoringTask[WildType, VariantScores]):
    """Scores variants of proteins.

    Attributes:
        method: `masked` or `wild_type` marginals, or `pseudo_perplexity`.
    """

    method: VariantMethod
    reads_on: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method", self.method, get_args(VariantMethod))

    def rows(self, turbo: ContextModel, item: WildType, arm: Arm) -> ProteinRows:
        """See `ScoringTask.rows`."""
        given = item.sequence, item.variants, self.method, arm, self.refresh, item.first_position
        return ProteinRows(turbo, *given, item.contexts or None)

    def tokens(self, item: WildType) -> int:
        """A context, and a row for every position."""
        length, units = len(item.sequence), self.units(item)
        if item.contexts:
            return sum(map(len, item.contexts)) + units * length
        contexts = units if self.method == "pseudo_perplexity" else length
        return contexts + units * (length if "full" in self.arms else self.refresh + 1)

    def units(self, item: WildType) -> int:
        """Number of distinct positions of the variants, after each context.

        By pseudo-perplexity, of residues in all of them, about.
        """
        times = max(1, len(item.contexts))
        if self.method == "pseudo_perplexity":
            names = all_substitutions(item.sequence) if item.variants is None else item.variants
            return times * len(item.sequence) * (1 + len(names))
        if item.variants is None:
            return times * len(item.sequence)
        return times * len({part[1:-1] for variant in item.variants for part in split_variant(variant)})

    def parts(self, item: WildType, limit: int) -> list[WildType]:
        """The protein; by pseudo-perplexity with as many variants in each part as have so many tokens, at least one."""
        if self.method != "pseudo_perplexity":
            return [item]
        names = all_substitutions(item.sequence, item.first_position) if item.variants is None else item.variants
        most = max(1, limit * len(names) // max(1, self.tokens(item)))
        return [item._replace(variants=names[begin : begin + most]) for begin in range(0, len(names), most)]

    def options(self) -> list[Any]:
        """See `ScoringTask.options`."""
        return [self.method, self.refresh, self.toks_per_batch]

    def scores_from_dict(self, item: WildType, values: Mapping[str, Any]) -> VariantScores:
        """See `ScoringTask.scores_from_dict`."""
        return VariantScores.from_dict(values, item.sequence, item.first_position)


def score_many_variants(
    turbo: ContextModel,
    wild_types: Sequence[str | ProteinRecord],
    variants: Sequence[Sequence[str]] | None = None,
    *,
    method: VariantMethod = "masked",
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
    devices: str | Sequence[str] | Runner | None = None,
) -> ManyVariantScores:
    """Score variants of many proteins: as `score_variants` on each, up to rounding, in batches filled across proteins.

    Args:
        wild_types: residues of each, or its record, whose header may state the position of its first residue. One
            that is invalid, does not have the residues that its variants name, or does not fit into memory fails, and
            the others are scored.
        variants: those of each protein, as many lists as there are proteins; None for all single substitutions.
        progress: called with stage `score` and positions of all proteins, see `Progress`.
        devices: where copies of the model share the work, in processes of their own: "all" CUDA devices, a list of
            names such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`, or `Workers` that run already. Scripts then
            need `if __name__ == "__main__":`. None is this process.

    `method`, `arm`, `refresh`, `toks_per_batch` and `store` are those of `score.score_variants`.

    Raises:
        ValueError: there are no proteins, not as many lists as proteins, or an option is invalid.
    """
    given, lists = _checked_proteins(wild_types, variants)
    own = repeat(None, len(given)) if lists is None else lists
    proteins = [
        WildType(sequence, first_position_of(one), as_list(names, "variant") if names else names)
        for one, sequence, names in zip(given, as_list(given, "wild_type"), own, strict=True)
    ]
    arm, _ = resolve_arm(turbo, arm or default_query_arm(turbo), reads_on=False)
    task = VariantsTask((arm,), refresh, toks_per_batch, store, method)
    warn_if_long((len(one.sequence) for one in proteins), turbo.model.family)
    runner: Runner | None = turbo.runner(devices)
    return ManyVariantScores.of(score_items(turbo, task, proteins, progress=progress, runner=runner))


def _checked_proteins(
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
