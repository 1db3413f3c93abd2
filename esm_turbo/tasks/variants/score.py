"""Effects of substitutions: how much the model prefers the mutant to the wild type (Meier et al. 2021).

A substitution of residue i scores log p(mutant) - log p(wild type) at position i, where either i alone is masked
(masked marginals) or nothing is (wild-type marginals). The scores of several substitutions add up. A variant's
pseudo-perplexity masks each of its residues in turn, so that it has one with insertions and deletions, too; the score
is the logarithm of the wild type's, minus that of the variant.

Masked marginals take one run of the whole protein per position. Here the wild type is computed once and cached, and
each run extends it in place: the column of the position is hidden and a mask runs instead. The cached columns were
computed with the wild type's residue visible and still carry information about it. The residues around the position
carry most, so `WindowRows` refreshes them: it hides their columns too, and runs them with the mask.

Of a family with exact contexts, homologs are computed once and cached, and each run is the whole protein after them.
Log-probabilities are averaged over several contexts of homologs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.context_model import Contexts, as_list
from esm_turbo.files.tabular import counted, named
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import CHAIN_BREAK, PARTICULAR_RESIDUES, STANDARD_RESIDUES, ProteinRecord
from esm_turbo.tasks.common.forwards import arm_preset, single_row
from esm_turbo.tasks.common.homologs import QueryContext, query_contexts, query_ids, row_arm
from esm_turbo.tasks.common.options import METHOD_NAMES, Arm, VariantMethod
from esm_turbo.tasks.common.rankings import lowest_first
from esm_turbo.tasks.common.rows import ItemRows, RowBatch, RowGroup
from esm_turbo.tasks.common.scoring_task import ItemScores
from esm_turbo.tasks.variants.substitutions import (
    RESIDUE_COLUMNS,
    all_substitutions,
    mutated,
    parse_variants,
    parts_of,
)

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.proteins.tokens import TokenCodes


_FIELDS = ("model", "method", "arm", "preset", "refresh")


@dataclass(frozen=True)
class VariantScore:
    """The score of one variant.

    Attributes:
        variant: its notation, as given.
        score: log-probability of the mutant minus that of the wild type, summed over the substitutions, nats; by
            pseudo-perplexity, mean log-probability of the variant's residues but B, X and Z minus that of the wild
            type's, nats per residue. Higher means a more likely mutant.
    """

    variant: str
    score: float


@dataclass(frozen=True)
class VariantScores(ItemScores):
    """Scores of variants of one protein.

    Attributes:
        scores: in the order of the variants.
        wild_type: residues of the protein.
        method: `masked` or `wild_type` marginals, or `pseudo_perplexity`.
        arm: `full`, `frozen` or `turbo`.
        preset: storage format of the wild type; None for `full`.
        model: name of the model.
        refresh: number of residues around a position of the wild type that ran again with its mask; 0 for `full` and
            for wild-type marginals, and where whole proteins ran after homologs.
        first_position: position of the protein's first residue.
        contexts: number of contexts of homologs whose log-probabilities were averaged.
    """

    scores: tuple[VariantScore, ...]
    wild_type: str
    method: VariantMethod
    arm: Arm
    preset: str | None
    refresh: int
    model: str
    first_position: int = 1
    contexts: int = 0

    def __repr__(self) -> str:
        best = [f"best {self.scores[index].variant} {self.values[index]:.4g}" for index in self.ranking()[:1]]
        size = counted(len(self.wild_type), "residue")
        fields = {name: getattr(self, name) for name in _FIELDS} | {"contexts": self.contexts or None}
        return named(self, f"{counted(len(self.scores), 'variant')} of {size}", *best, **fields)

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["mutant", *RESIDUE_COLUMNS, "score"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per variant, in their order, its name, position, residues and score."""
        for one in self.scores:
            yield one.variant, *parts_of(one.variant), one.score

    def ranking(self) -> list[int]:
        """Indices of the variants, highest score first; equal ones keep their order, and NaN is last."""
        return lowest_first([-x for x in self.values])

    @property
    def method_name(self) -> str:
        """The method for readers, and after what."""
        after = f" after {counted(self.contexts, 'context')} of homologs" if self.contexts else ""
        return METHOD_NAMES[self.method] + after

    @property
    def values(self) -> list[float]:
        """The scores as numbers."""
        return [one.score for one in self.scores]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], wild_type: str, first_position: int = 1) -> Self:
        """Inverse of `to_dict`, for the protein that the scores are of.

        Raises:
            KeyError, TypeError: an entry is missing, or of another type.
        """
        scores = tuple(VariantScore(one["variant"], one["score"]) for one in values["variants"])
        fields = {name: values[name] for name in _FIELDS}
        return cls(scores, wild_type, first_position=first_position, contexts=values.get("contexts", 0), **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = {name: getattr(self, name) for name in (*_FIELDS, "contexts")}
        return fields | {"variants": [{"variant": one.variant, "score": one.score} for one in self.scores]}


@dataclass(frozen=True, kw_only=True)
class WholeRows(RowGroup):
    """Whole proteins: one for each position, which is masked in it; or a single one, in which nothing is.

    Attributes:
        codes: token ids of the model's tokenizer.
        ids: tokens of the protein, from `<cls>` on; homologs may stand before it.
        first: index of the token of its first residue.
        positions: indices of residues, from 0, int64 [k].
        method: `masked` or `wild_type` marginals, or `pseudo_perplexity`.
        places: positions of the tokens, int64 [width]; None for those after the context.
    """

    codes: TokenCodes
    ids: Sequence[int]
    first: int
    positions: Tensor
    method: VariantMethod
    places: Tensor | None = None

    @property
    def predictions(self) -> int:
        """See `RowGroup.predictions`."""
        return len(self.positions)

    def rows(self, numbers: Tensor) -> RowBatch:
        """See `RowGroup.rows`."""
        whole, at = torch.tensor([list(self.ids)]), self.first + self.positions
        if self.method == "wild_type":
            # Alone, a position is one prediction of its row, as elsewhere.
            return RowBatch(
                whole, at if len(at) == 1 else at[None], position_ids=None if self.places is None else self.places[None]
            )
        at = at[numbers]
        masked = whole.repeat(len(at), 1).scatter(1, at[:, None], self.codes.mask)
        return RowBatch(masked, at, position_ids=None if self.places is None else self.places.expand_as(masked))

    def reduce(self, numbers: Tensor, log_probs: Tensor) -> Tensor:
        """All of them, [n, vocab_size]; for a pseudo-perplexity those of the residues themselves, [n]."""
        if self.method == "pseudo_perplexity":
            own = torch.tensor(list(self.ids))[self.first + self.positions[numbers]]
            return log_probs.gather(1, own[:, None])[:, 0]
        return log_probs.flatten(0, -2)


@dataclass(frozen=True, kw_only=True)
class WindowRows(WholeRows):
    """Rows that extend a cached protein in place.

    `refresh + 1` residues around each position run against all others in the cache; near an end the window is shifted
    inwards.
    """

    def rows(self, numbers: Tensor) -> RowBatch:
        """See `RowGroup.rows`."""
        whole, positions = torch.tensor(list(self.ids)), self.positions[numbers]
        after = len(self.codes.after) if self.ids[-1] == self.codes.eos else 0
        residues = len(self.ids) - self.first - after
        start = (positions - (self.width - 1) // 2).clamp(0, residues - self.width)
        columns = self.first + start[:, None] + torch.arange(self.width)
        at = positions - start
        input_ids = whole[columns]
        if self.method != "wild_type":
            input_ids = input_ids.scatter(1, at[:, None], self.codes.mask)
        visible = torch.ones(len(positions), len(whole), dtype=torch.int64).scatter(1, columns, 0)
        return RowBatch(input_ids, at, visible, columns)


@dataclass(frozen=True, kw_only=True)
class FrozenQueryRows(WindowRows):
    """Such rows of a query, which was appended to its homologs and frozen."""

    def rows(self, numbers: Tensor) -> RowBatch:
        """See `RowGroup.rows`."""
        batch = super().rows(numbers)
        assert batch.visible is not None and batch.position_ids is not None
        # The homologs before it, with positions of the residues that contexts leave out.
        visible = torch.nn.functional.pad(batch.visible, (self.kept - len(self.ids), 0), value=1)
        return batch._replace(visible=visible, position_ids=len(self.context) + batch.position_ids)


class ProteinRows(ItemRows[VariantScores]):
    """A protein with variants.

    Args:
        turbo: the model.
        wild_type: residues of the protein; or a cache of one row that holds it from `<cls>` on: without `<eos>`, as of
            `prefill`, values are those of a protein without it.
        variants: their notations; None for all single substitutions.
        method: `masked` or `wild_type` marginals, or `pseudo_perplexity`.
        arm: `full`, `frozen` or `turbo`.
        refresh: number of residues around a position that run again with its mask, where one is masked.
        first_position: position of the protein's first residue.
        context: homologs, see `score_variants`.
        freeze_query: see `score_variants`.

    Attributes:
        groups: one, on the protein; by pseudo-perplexity, one on each variant besides. Of several contexts of homologs,
            as many of each.

    Raises:
        ValueError: the protein is invalid, a variant does not fit it, the cache has several rows or does not hold a
            whole protein, or the context is invalid.
    """

    groups: list[WholeRows]

    def __init__(
        self,
        turbo: ContextModel,
        wild_type: str | ProteinRecord | TurboKVCache,
        variants: str | Sequence[str] | None,
        method: VariantMethod,
        arm: Arm,
        refresh: int,
        first_position: int,
        context: Contexts | None = None,
        freeze_query: bool = False,
    ) -> None:
        self.turbo, self.method, self.arm, self.first_position = turbo, method, arm, first_position
        codes, cache = turbo.codes, wild_type if isinstance(wild_type, TurboKVCache) else None
        if isinstance(wild_type, TurboKVCache):
            ids = stored_protein(turbo, wild_type)
        else:
            ids = query_ids(turbo, wild_type, "the wild type")
            if codes.mask in ids:
                raise ValueError(f"the wild type holds a {codes.mask_symbol}; give residues only")
        self.wild_type = codes.decode(token for token in ids if token not in {*codes.before, *codes.after})
        self._contexts = query_contexts(turbo, context, arm)
        self.variants = None if variants is None else as_list(variants, "variant")
        if freeze_query and not self._contexts:
            raise ValueError("`freeze_query` reuses a protein after its homologs; give a `context`")
        self._freezes = freeze_query
        refreshes = method != "wild_type" and (freeze_query or row_arm(turbo, arm) != "full")
        self._window = refresh + 1 if refreshes else 1
        # Of the wild type, which has at most so many residues besides the masked one; a variant may have more.
        self.refresh = min(self._window, len(self.wild_type)) - 1
        if method == "pseudo_perplexity":
            if cache is not None:
                raise ValueError("a cache holds the wild type alone; for pseudo-perplexities give its residues")
            own = [mutated(name, self.wild_type, first_position) for name in self._names()]
            self._own, own_once = own, list(dict.fromkeys([self.wild_type, *own]))
            self._number_of = {one: number for number, one in enumerate(own_once)}
            self.groups = [
                group for one in own_once for group in self._groups(query_ids(turbo, one, "a variant"), _known(one))
            ]
            return
        if self.variants is None:
            positions = [index for index, letter in enumerate(self.wild_type) if letter != CHAIN_BREAK]
        else:
            self._parsed = parse_variants(self.variants, self.wild_type, first_position)
            positions = sorted({one.index for parts in self._parsed for one in parts})
        self._row = {index: row for row, index in enumerate(positions)}
        self.groups = self._groups(ids, positions, cache)

    def _groups(
        self, ids: Sequence[int], positions: Sequence[int], cache: TurboKVCache | None = None
    ) -> list[WholeRows]:
        """The groups of one sequence, one after each context of homologs."""
        codes = self.turbo.codes
        shared: dict[str, Any] = {
            "codes": codes,
            "first": len(codes.before),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "method": self.method,
        }
        if row_arm(self.turbo, self.arm) != "full":
            residues = len(ids) - 1 - (ids[-1] == codes.eos)
            shared |= {"count": len(positions), "width": min(self._window, residues), "hides": True}
            return [WindowRows(context=ids, kept=len(ids), ids=ids, cache=cache, **shared)]
        shared["count"] = 1 if self.method == "wild_type" else len(positions)
        return [self._after(one, ids, shared) for one in self._contexts or [QueryContext(())]]

    def _after(self, context: QueryContext, ids: Sequence[int], shared: dict[str, Any]) -> WholeRows:
        """Rows of whole proteins after homologs, which are their context, or which they compute again."""
        context.check_query(self.turbo, ids, "the wild type")
        if self.arm != "full":
            shared = shared | {"context": context.ids, "kept": len(context.ids), "cache": context.cache}
            if self._freezes:
                [present], _ = self.turbo.codes.present([context.ids])
                width = min(self._window, len(ids) - self.turbo.codes.around)
                shared |= {"query": ids, "hides": True, "kept": len(present) + len(ids), "width": width}
                return FrozenQueryRows(ids=ids, **shared)
            return WholeRows(ids=ids, width=len(ids), **shared)
        [present], positions = self.turbo.codes.present([[*context.ids, *ids]])
        row = [int(token) for token in present]
        shared = shared | {"first": shared["first"] + len(row) - len(ids)}
        return WholeRows(
            ids=row, width=len(row), places=None if positions is None else torch.tensor(positions[0]), **shared
        )

    def _names(self) -> list[str]:
        # All single ones are made only when needed: there are many, and a wave may hold many proteins.
        return all_substitutions(self.wild_type, self.first_position) if self.variants is None else self.variants

    def _all_effects(self, log_probs: npt.NDArray[np.float32]) -> list[float]:
        """Effects of all substitutions, in the order of `all_substitutions`."""
        residues = self.turbo.codes.residues
        standard = [residues[residue] for residue in STANDARD_RESIDUES]
        effects = []
        for index, residue in enumerate(self.wild_type):
            if residue != CHAIN_BREAK:
                row = log_probs[self._row[index]]
                each = zip(STANDARD_RESIDUES, (row[standard] - row[residues[residue]]).tolist(), strict=True)
                effects += [effect for mutant, effect in each if mutant != residue]
        return effects

    def _effects(self, log_probs: npt.NDArray[np.float32]) -> list[float]:
        """Effects of the variants that were given, summed over their substitutions."""
        residues, values = self.turbo.codes.residues, []
        for parts in self._parsed:
            rows = [(log_probs[self._row[one.index]], one) for one in parts]
            effects = (row[residues[one.mutant]] - row[residues[one.wild_type]] for row, one in rows)
            values.append(sum(map(float, effects)))
        return values

    def result(self, predicted: Sequence[Tensor]) -> VariantScores:
        """Scores from the log-probabilities at each position."""
        if self.method == "pseudo_perplexity":
            times = len(self._contexts) or 1
            own = [predicted[begin : begin + times] for begin in range(0, len(predicted), times)]
            means = [float(torch.stack(list(one)).double().mean()) for one in own]
            values = [means[self._number_of[one]] - means[0] for one in self._own]
        else:
            log_probs = torch.stack(list(predicted)).mean(dim=0).numpy()
            values = self._all_effects(log_probs) if self.variants is None else self._effects(log_probs)
        scores = tuple(map(VariantScore, self._names(), values))
        return VariantScores(
            scores,
            self.wild_type,
            self.method,
            self.arm,
            arm_preset(self.turbo, self.arm, (group.cache for group in self.groups)),
            self.refresh,
            self.turbo.name,
            self.first_position,
            len(self._contexts),
        )


def first_position_of(wild_type: str | ProteinRecord | TurboKVCache, given: int | None = None) -> int:
    """Position of a protein's first residue: the given one, or that of a record's header, or 1."""
    stated = wild_type.first_position if isinstance(wild_type, ProteinRecord) else None
    return next((one for one in (given, stated) if one is not None), 1)


def _known(sequence: str) -> list[int]:
    """Indices of residues that stand for one.

    Raises:
        ValueError: there are none.
    """
    known = [index for index, letter in enumerate(sequence) if letter in PARTICULAR_RESIDUES]
    if not known:
        raise ValueError("a variant has no residue that is known")
    return known


def stored_protein(turbo: ContextModel, cache: TurboKVCache) -> list[int]:
    """Token ids of the protein in a cache.

    Raises:
        ValueError: the cache has several rows, or does not hold a whole protein.
    """
    if turbo.model.base_model.exact_contexts is not None:
        raise ValueError("the wild type must be a sequence; a cache of homologs is a `context`")
    codes, ids = turbo.codes, single_row(cache, "a wild type")
    inner = ids[1:-1] if ids[-1:] == [codes.eos] else ids[1:]
    whole = ids[:1] == [codes.cls] and inner and not {codes.cls, codes.eos, codes.mask} & set(inner)
    if not whole or cache.positions is not None:
        raise ValueError("the cache does not hold a whole protein from <cls> on: see `turbo.prefill`")
    return ids
