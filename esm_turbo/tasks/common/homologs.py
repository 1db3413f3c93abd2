"""Queries and the homologs that they read, of families with exact contexts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from esm_turbo.config import TurboConfig
from esm_turbo.context_model import Contexts, as_list, items_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.plan import FrozenQuery
from esm_turbo.proteins.alignments import HomologContext
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.homologs import encode_homologs
from esm_turbo.proteins.tokens import TokenCodes, TokenIds
from esm_turbo.tasks.common.context_sources import ContextSource
from esm_turbo.tasks.common.forwards import prefill_rows
from esm_turbo.tasks.common.options import Arm

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@dataclass(frozen=True)
class QueryContext:
    """A context of a query.

    Attributes:
        ids: token ids of whole homologs, with the residues that contexts leave out; none for no homologs.
        cache: one row, where they need not be computed.
        name: for errors.
    """

    ids: tuple[int, ...]
    cache: TurboKVCache | None = None
    name: str = "no context"

    def check_query(self, turbo: ContextModel, ids: TokenIds, name: str) -> None:
        """Check that a model can read a query after this context.

        Args:
            turbo: the model.
            ids: tokens of the query.
            name: of the query, for errors.

        Raises:
            ValueError: the query is too long, or context and query are too large together.
        """
        limits, codes = turbo.model.base_model.exact_contexts, turbo.codes
        if limits is not None:
            limits.check_length(name, len(ids) - codes.around)
            limits.check(f"{name} and {self.name}", self.ids.count(codes.cls) + 1, len(self.ids) + len(ids))

    @torch.no_grad()
    def prefilled(self, turbo: ContextModel, config: TurboConfig, store: ContextSource | None = None) -> TurboKVCache:
        """A cache of it alone: the given one, or one that is computed and stored under these options."""
        if self.cache is not None:
            return self.cache
        if store is None:
            return prefill_rows(turbo, [self.ids], config)
        return store.get_or_compute(turbo, self.ids, config, lambda: prefill_rows(turbo, [self.ids], config))


def query_ids(turbo: ContextModel, sequence: str | ProteinRecord, name: str) -> list[int]:
    """Token ids of a whole protein whose residues are predicted.

    Raises:
        ValueError: it is invalid, or has a residue that the model leaves out.
    """
    residues = turbo.codes.encode(sequence, name)
    check_known(turbo, residues, name)
    return turbo.codes.whole(residues)


@torch.no_grad()
def freeze_query(turbo: ContextModel, cache: TurboKVCache, ids: TokenIds) -> tuple[TurboKVCache, FrozenQuery]:
    """Run a query after its homologs once, for rows that run parts of it.

    Args:
        turbo: the model.
        cache: the homologs, one row; it is not changed.
        ids: tokens of the whole query.

    Returns:
        A cache of homologs and query, and what caches do not store of the query.
    """
    cache, frozen = cache.select(0), FrozenQuery()
    encoder = turbo.model.base_model
    encoder(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, frozen_query=frozen)
    return cache, frozen


def check_known(turbo: ContextModel, residues: list[int], name: str) -> None:
    """Check that a query has no residue that the model leaves out.

    Raises:
        ValueError: it has.
    """
    unknown = turbo.codes.unknown
    if unknown in residues:
        position = residues.index(unknown) + 1
        family = turbo.model.family.name
        raise ValueError(f"{name} has X at position {position}, which {family} leaves out; give the residue")


def query_contexts(turbo: ContextModel, context: Contexts | None, arm: Arm) -> list[QueryContext]:
    """The contexts of a query.

    Args:
        turbo: the model.
        context: homologs, several such contexts, or a cache of them; None for none.
        arm: in which the query runs.

    Raises:
        TypeError: a context is not a string.
        ValueError: the family has no exact contexts, a context is invalid, or the arm stores homologs and there are
            none.
    """
    limits = turbo.model.base_model.exact_contexts
    if limits is None:
        if context is None:
            return []
        raise ValueError(
            f"{turbo.model.family.name} reads one protein at a time and no homologs; `context` is for families with"
            " exact contexts, such as E1"
        )
    if context is None:
        if arm != "full":
            raise ValueError(f"arm {arm!r} stores homologs, and there are none: give a `context`, or leave the arm out")
        return []
    if isinstance(context, TurboKVCache):
        return _stored_homologs(turbo, context)
    drawn = [context] if isinstance(context, str | ProteinRecord | HomologContext) else items_of(context, "context")
    texts = as_list([one.sequence if isinstance(one, HomologContext) else one for one in drawn], "context")
    named = [(one, f"context {number}") for number, one in enumerate(texts, start=1)]
    return [QueryContext(tuple(encode_homologs(turbo.codes, *one, limits)), name=one[1]) for one in named]


def _stored_homologs(turbo: ContextModel, cache: TurboKVCache) -> list[QueryContext]:
    """The contexts in a cache, one in each row, as they are now: the caller may go on to use the cache.

    Raises:
        ValueError: it is another model's, has no rows, or one does not hold whole homologs.
    """
    turbo.model.bind_cache(cache)
    contexts = []
    if not cache.batch_size:
        raise ValueError("the cache is empty: prefill a context first")
    for row in range(cache.batch_size):
        ids = stored_ids(turbo.codes, cache, row)
        own = cache.select(row) if cache.batch_size > 1 else copy.copy(cache)
        contexts.append(QueryContext(tuple(ids), own, f"row {row} of the cache"))
    return contexts


def stored_ids(codes: TokenCodes, cache: TurboKVCache, row: int = 0) -> list[int]:
    """Token ids of the homologs in a row of a cache, with the residues that contexts leave out.

    Raises:
        ValueError: it does not hold whole homologs.
    """
    length, positions = int(cache.lengths[row]), int(cache.next_positions[row])
    stored = cache.token_ids[row, :length].tolist()
    if stored[:1] != [codes.cls] or stored[-1:] != [codes.eos]:
        raise ValueError(f"row {row} of the cache does not hold whole homologs: see `turbo.prefill`")
    # Residues that contexts leave out are told by the gaps of the positions.
    ids = [codes.pad if codes.unknown is None else codes.unknown] * positions
    places = range(length) if cache.positions is None else cache.positions[row, :length].tolist()
    for place, token in zip(places, stored, strict=True):
        ids[place] = token
    return ids


def default_query_arm(turbo: ContextModel) -> Arm | None:
    """The arm of queries that read no homologs: `full` if nothing else is ever stored; None where their own K/V are."""
    return None if turbo.model.base_model.exact_contexts is None else "full"


def row_arm(turbo: ContextModel, arm: Arm) -> Arm:
    """The arm whose rows are as long as those of an arm: queries are whole proteins, also after homologs."""
    return default_query_arm(turbo) or arm
