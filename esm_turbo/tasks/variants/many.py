"""Scores of variants of one protein or of many, in batches that do not end where a protein does (`row_engine`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import Contexts, as_list, items_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.checks import check_choice
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import resolve_arm
from esm_turbo.tasks.common.homologs import default_query_arm
from esm_turbo.tasks.common.options import Arm, VariantMethod
from esm_turbo.tasks.common.pieces import Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.same_model import call_on
from esm_turbo.tasks.common.scoring_task import ManyScores, ScoringTask, score_item, score_items
from esm_turbo.tasks.variants.score import ProteinRows, VariantScores, first_position_of, stored_protein
from esm_turbo.tasks.variants.substitutions import all_substitutions, split_variant

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


_CONTEXTS_PER_PART = 4


class WildType(NamedTuple):
    """A protein with its variants.

    Attributes:
        sequence: residues of the protein.
        first_position: position of the protein's first residue.
        variants: their notations; None for all single substitutions.
        contexts: of homologs, see `score_variants`.
        cache: holds the protein.
    """

    sequence: str
    first_position: int = 1
    variants: Sequence[str] | None = None
    contexts: Contexts | None = None
    cache: TurboKVCache | None = None

    @property
    def context_sizes(self) -> list[int]:
        """Lengths of several contexts of homologs; none for no homologs."""
        given = self.contexts if isinstance(self.contexts, list | tuple) else ()
        return [len(str(one)) for one in given]


class ManyVariantScores(ManyScores[VariantScores]):
    """Scores of variants of many proteins.

    Attributes:
        scores: one entry per protein, in their order; None for one that failed.
        failed: by index of the protein, why its variants could not be scored.
    """

    noun, scored_noun = "protein", "variant"


@dataclass(frozen=True)
class VariantsTask(ScoringTask[WildType, VariantScores]):
    """Scores variants of proteins.

    Attributes:
        method: `masked` or `wild_type` marginals, or `pseudo_perplexity`.
        freeze_query: see `score_variants`; the arm `full` always runs whole proteins.
    """

    method: VariantMethod = "masked"
    freeze_query: bool = False
    reads_on: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method", self.method, get_args(VariantMethod))
        if self.freeze_query and (self.method == "wild_type" or set(self.arms) == {"full"}):
            raise ValueError(
                "a frozen query is for masked residues after stored homologs: it needs another arm than full and"
                " another method than wild_type"
            )

    def rows(self, turbo: ContextModel, item: WildType, arm: Arm) -> ProteinRows:
        """See `ScoringTask.rows`."""
        protein = item.sequence if item.cache is None else item.cache
        given = item.variants, self.method, arm, self.refresh, item.first_position, item.contexts
        return ProteinRows(turbo, protein, *given, self.freeze_query and arm != "full")

    def tokens(self, item: WildType) -> int:
        """A context, and a row for every position."""
        whole = "full" in self.arms or bool(item.context_sizes and not self.freeze_query)
        return self._context_tokens(item) + self.units(item) * (len(item.sequence) if whole else self.refresh + 1)

    def _context_tokens(self, item: WildType) -> int:
        """Tokens of the contexts that the rows read."""
        if item.context_sizes:
            return sum(item.context_sizes)
        return self.units(item) if self.method == "pseudo_perplexity" else len(item.sequence)

    def units(self, item: WildType) -> int:
        """Number of distinct positions of the variants, after each context.

        By pseudo-perplexity, of residues in all of them, about.
        """
        times = max(1, len(item.context_sizes))
        if self.method == "pseudo_perplexity":
            names = all_substitutions(item.sequence) if item.variants is None else item.variants
            return times * len(item.sequence) * (1 + len(names))
        if item.variants is None:
            return times * len(item.sequence)
        return times * len({part[1:-1] for variant in item.variants for part in split_variant(variant)})

    def parts(self, item: WildType, limit: int) -> Iterator[tuple[WildType, Sequence[int] | None]]:
        """See `ScoringTask.parts`: some positions, or by pseudo-perplexity some variants.

        Parts that read one context are not divided further than to four times its tokens. Variants of several
        substitutions are not divided, as they would mask positions in many parts.
        """
        shared = 0 if self.method == "pseudo_perplexity" or self.arms == ("full",) else self._context_tokens(item)
        size, limit = self.tokens(item), max(limit, _CONTEXTS_PER_PART * shared)
        names = all_substitutions(item.sequence, item.first_position) if item.variants is None else item.variants
        whole = size <= limit or self.method == "wild_type"
        if whole or (self.method == "masked" and any(len(split_variant(name)) > 1 for name in names)):
            yield item, None
            return
        order: Sequence[int] = range(len(names))
        if self.method == "masked":
            first = {position: number for number, position in enumerate(dict.fromkeys(map(_position, names)))}
            order = sorted(order, key=lambda number: first[_position(names[number])])
        most = max(1, limit * len(names) // size)
        for begin in range(0, len(names), most):
            own = sorted(order[begin : begin + most])
            yield item._replace(variants=[names[number] for number in own]), own

    def scores_from_dict(self, item: WildType, values: Mapping[str, Any]) -> VariantScores:
        """See `ScoringTask.scores_from_dict`."""
        return VariantScores.from_dict(values, item.sequence, item.first_position)


def _as_read(turbo: ContextModel, sequence: str) -> str:
    """Residues as the model reads them; an invalid protein as it is, whose rows raise the error."""
    try:
        return turbo.codes.decode(turbo.codes.encode(sequence, "the wild type"))
    except ValueError:
        return sequence


def _position(variant: str) -> str:
    return split_variant(variant)[0][1:-1]


def score_variants(
    turbo: ContextModel,
    wild_type: str | ProteinRecord | TurboKVCache,
    variants: str | Sequence[str] | None = None,
    *,
    method: VariantMethod = "masked",
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    first_position: int | None = None,
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
    context: Contexts | None = None,
    freeze_query: bool = False,
) -> VariantScores:
    """Score variants of a protein.

    Args:
        wild_type: residues of the protein, or its record; or a cache of one row that holds it from `<cls>` on.
        variants: such as `H24C` or `p.His24Cys`, or `H24C:E26K` for several substitutions at once; None for all single
            ones. `H24H` scores 0. Insertions and deletions, such as `K2_G4del` or `p.Lys2_Gly3insGlnSer`, have a
            `pseudo_perplexity` alone.
        method: `masked` masks each position in turn; `wild_type` masks nothing, which is much cheaper and less
            accurate; `pseudo_perplexity` masks each residue of each variant in turn, which costs as much as all
            masked marginals for every variant. Residues of the protein that stand for several are left out of it.
        arm: `full` runs the whole protein for every position; `frozen` runs the position against the protein cached
            at full precision; `turbo` against the protein cached under the model's preset. A cache fixes its own arm;
            else the default is `turbo`, or `frozen` if the model has no calibration.
        refresh: for masked marginals, number of residues around the position, half on each side, that run again with
            the mask.
        first_position: position of the protein's first residue in the variants; None is that of a record's header, or
            else 1.
        toks_per_batch: tokens per batch, which bounds the memory; None chooses by arm and device.
        store: a `ContextStore`, whose contexts are used and to which missing ones are added.
        progress: called with stage `score` and positions, see `Progress`.
        context: of a family with exact contexts, such as E1, homologs of the protein, separated by commas; of several
            contexts, log-probabilities are averaged. Or a cache of them, one context in each row. None scores the
            protein alone. The homologs are what is cached: every row runs the whole protein after them, whatever
            `refresh` is, so that `frozen` equals `full`; without a context the arm is `full`.
        freeze_query: after a `context`, run the protein once and reuse its keys and values, so that a row runs only the
            masked position and `refresh` residues around it, as with ESM-2. This is faster and no longer exact.

    Raises:
        ValueError: the protein is empty or has a letter that is not a residue, a variant does not fit it, an option
            is invalid, the cache has several rows, belongs to another model or does not hold a whole protein, the
            family has no exact contexts, or a context is invalid or too large, see `ContextModel.prefill`.
        NotEnoughMemoryError: the protein needs more memory than is free; the message says how much.
    """
    cache = next((one for one in (wild_type, context) if isinstance(one, TurboKVCache)), None)
    if arm is None and context is None and cache is None:
        arm = default_query_arm(turbo)
    arm, _ = resolve_arm(turbo, arm, cache, reads_on=False)
    task = VariantsTask((arm,), refresh, toks_per_batch, store, method, freeze_query)
    names = None if variants is None else as_list(variants, "variant")
    position = first_position_of(wild_type, first_position)
    if isinstance(wild_type, TurboKVCache):
        around = {turbo.codes.cls, turbo.codes.eos}
        sequence = turbo.codes.decode(token for token in stored_protein(turbo, wild_type) if token not in around)
        item = WildType(sequence, position, names, context, copy.copy(wild_type))
    else:
        [sequence] = as_list([wild_type], "wild_type")
        item = WildType(sequence, position, names, context)
    warn_if_long([len(sequence)], turbo.model.family)
    with call_on(turbo, progress):
        return score_item(turbo, task, item, progress)


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

    `method`, `arm`, `refresh`, `toks_per_batch` and `store` are those of `score_variants`.

    Raises:
        ValueError: there are no proteins, not as many lists as proteins, or an option is invalid.
    """
    given = [wild_types] if isinstance(wild_types, str | ProteinRecord) else items_of(wild_types, "wild_type")
    sequences = as_list(given, "wild_type")
    lists: list[Sequence[str] | None] = [None] * len(given) if variants is None else items_of(variants, "variant")
    if isinstance(variants, str) or len(lists) != len(given):
        got = repr(variants) if isinstance(variants, str) else len(lists)
        raise ValueError(f"`variants` must be one list per protein ({len(given)}), got {got}")
    proteins = [
        WildType(_as_read(turbo, sequence), first_position_of(one), as_list(names, "variant") if names else names)
        for one, sequence, names in zip(given, sequences, lists, strict=True)
    ]
    arm, _ = resolve_arm(turbo, arm or default_query_arm(turbo), reads_on=False)
    task = VariantsTask((arm,), refresh, toks_per_batch, store, method)
    warn_if_long(map(len, sequences), turbo.model.family)
    runner: Runner | None = turbo.runner(devices)
    return ManyVariantScores.of(
        score_items(turbo, task, proteins, in_pieces=runner is not None, progress=progress, runner=runner)
    )
