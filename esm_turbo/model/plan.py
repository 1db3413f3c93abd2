"""The plan of a forward: what runs, where it stands, and what each layer sees and stores.

A plan is made once per forward (`Executor.plan`) and then run eagerly, on packed tokens or as a captured graph. Masks
and rotary positions are decided per layer, by its `LayerKind`; nothing here depends on the model family.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.kv.append import NO_GAPS, Append, NewTokens
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.packing import Attend, Packing
from esm_turbo.model.sequences import SequenceBounds
from esm_turbo.model.sessions import KVSession, attend_by


class Scope(enum.Enum):
    """The tokens that a token of a layer sees, and from where positions count.

    Attributes:
        ROW: all tokens of its row and its context; positions count over both.
        SEQUENCE: those of its own sequence, never a context; positions count from 0 in each sequence.
        PREFIX: those of its own sequence and of all before it, the context included (block-causal); positions count
            over all sequences.
    """

    ROW = "row"
    SEQUENCE = "sequence"
    PREFIX = "prefix"


@dataclass(frozen=True)
class LayerKind:
    """The attention of a layer.

    Attributes:
        scope: what its tokens see.
        rotary: which of the family's rotary tables it uses, see `FamilyEncoder.frequencies`.
        stored: whether caches keep its keys and values. A layer that is not stored reads no context.
    """

    scope: Scope = Scope.ROW
    rotary: int = 0
    stored: bool = True


@dataclass(frozen=True)
class ForwardInputs:
    """The arguments of `CachedModel.forward`, where they are explained.

    Attributes:
        known: what the host knows of the tokens that a cache is to store.
        options: the library's further arguments.
    """

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    context_index: Sequence[int] | Tensor | RowIndex | None = None
    use_cache: bool = False
    token_counts: tuple[Tensor, Tensor] | None = None
    append_mask: Tensor | None = None
    row_lengths: Sequence[int] | None = None
    chains: Tensor | None = None
    known: NewTokens = NO_GAPS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """`input_ids`, which a forward with a cache always has."""
        assert self.input_ids is not None
        return self.input_ids

    def in_order(self, order: Tensor) -> ForwardInputs:
        """The inputs with their rows in another order, int64 [batch]; positions are given."""
        assert self.position_ids is not None
        ids, mask = self.ids[order], self.attention_mask
        positions = self.position_ids.expand(len(order), -1)[order]
        return replace(
            self, input_ids=ids, position_ids=positions, attention_mask=None if mask is None else mask[order]
        )

    @property
    def is_plain(self) -> bool:
        """True if the library's options ask for nothing but the last hidden states."""
        asked = {name for name, value in self.options.items() if value is not None and value is not False}
        return asked <= {"return_dict"}


class FrozenQuery:
    """A query after exact contexts, whose keys and values are reused by rows that run a part of it.

    Forwards take it as `frozen_query`. The one that appends the query to a cache of its homologs fills it with what the
    cache does not store, and rows that read both see the query as those of ESM-2 see a cached protein.

    Attributes:
        first: position of its first token, int64 [].
        keys: of each layer that is not stored, after RoPE, [1, heads, n, head_dim].
        values: of the same layers, [1, heads, n, head_dim].
    """

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def begin(self, positions: Tensor) -> Tensor:
        """Position of the query's first token, from its own positions [batch, n] if it is the query that runs."""
        if self.first is None:
            self.first = positions[0, 0].clone()
        return self.first

    def attend(
        self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None
    ) -> Tensor | None:
        """Attention of rows to the query and themselves; None while the query itself runs, which fills this.

        Args:
            layer_idx: a layer that is not stored.
            query: scaled and after RoPE, [batch, heads, m, head_dim].
            keys: after RoPE, [batch, heads, m, head_dim].
            values: [batch, heads, m, head_dim].
            visible: tokens of context and query that each row sees, bool [batch, columns]; None for all.
        """
        if layer_idx not in self.keys:
            self.keys[layer_idx], self.values[layer_idx] = keys, values
            return None
        rows, own = len(keys), self.keys[layer_idx].shape[2]
        keys, values = (
            torch.cat([kept[layer_idx].expand(rows, -1, -1, -1), new], dim=2)
            for kept, new in ((self.keys, keys), (self.values, values))
        )
        mask = None
        if visible is not None:
            # Layers may lie on several devices.
            seen = visible[:, -own:].to(keys.device)
            mask = torch.nn.functional.pad(seen, (0, keys.shape[2] - own), value=True)[:, None, None]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)


class Rotary:
    """Cosines and sines of the angles of tokens, computed once for all layers of a kind.

    Args:
        kinds: of all layers.
        frequencies: inverse frequencies of a kind, float32 [head_dim / 2].
        positions: of the tokens in a scope, integers [...].
        halves: how often angles are repeated, 2 for operations that take them for both halves of a head.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        frequencies: Callable[[LayerKind], Tensor],
        positions: Callable[[Scope], Tensor],
        halves: int = 1,
    ) -> None:
        self._kinds = kinds
        self._frequencies = frequencies
        self._positions = positions
        self._halves = halves
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def at(self, layer_idx: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines for a layer on a device, float32 [..., halves * head_dim / 2] each."""
        kind = self._kinds[layer_idx]
        key = kind.scope, kind.rotary
        if key not in self._tables:
            angle = self._positions(kind.scope)[..., None] * self._frequencies(kind)
            if self._halves > 1:
                angle = torch.cat([angle] * self._halves, dim=-1)
            self._tables[key] = angle.cos(), angle.sin()
        cos, sin = self._tables[key]
        if cos.device != device:
            # Layers may lie on several devices.
            cos, sin = self._tables[key] = cos.to(device), sin.to(device)
        return cos, sin


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of all rows along one dimension, T in all, and how layers attend.

    Attributes:
        embeddings: [T, hidden_size].
        rotary: of their positions.
        attend: computes attention.
        layers: whose input is asked for as well, 0 for the embeddings.
    """

    embeddings: Tensor
    rotary: Rotary
    attend: Attend
    layers: Collection[int] = ()


@dataclass
class ForwardPlan:
    """One forward of an encoder.

    Attributes:
        kinds: of all layers.
        frequencies: inverse frequencies of a kind, float32 [head_dim / 2].
        input_ids: [batch, n]; None where the caller gave embeddings.
        embeddings: [batch, n, hidden_size]; None where the forward embeds the tokens.
        attention_mask: of the real tokens, [batch, n]; None for all, and in an extension, see `seen`.
        seen: real tokens of an extension, bool [batch, n]; None for all.
        positions: [batch, n] or [1, n]; None for 0, 1, 2, ...
        chains: number of each token's sequence in its row, [batch, n], -1 for padding; None for one sequence per row,
            as in every extension.
        session: receives queries, keys and values of the stored layers; None without a cache.
        cache: to be written; None for none.
        append: what is written into it.
        reads_context: whether the session lets tokens see contexts.
        visible: tokens of its context that each row sees, bool [batch, columns]; None for all.
        frozen_query: see `FrozenQuery`; None where rows are whole sequences.
        packing: of rows whose lengths the host knows; None where rows run padded.
        order: of the rows, where it differs from the caller's, int64 [batch].
        options: the library's further arguments.
    """

    kinds: Sequence[LayerKind]
    frequencies: Callable[[LayerKind], Tensor]
    input_ids: Tensor | None = None
    embeddings: Tensor | None = None
    attention_mask: Tensor | None = None
    seen: Tensor | None = None
    positions: Tensor | None = None
    chains: Tensor | None = None
    session: KVSession | None = None
    cache: TurboKVCache | None = None
    append: Append | None = None
    reads_context: bool = False
    visible: Tensor | None = None
    frozen_query: FrozenQuery | None = None
    packing: Packing | None = None
    order: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def library_options(self) -> dict[str, Any]:
        """Keyword arguments of the library's forward, with the session where there is one."""
        return self.options if self.session is None else {**self.options, "kv_session": self.session}

    def session_at(self, layer_idx: int) -> KVSession | None:
        """The session of a layer; None for a layer that is not stored."""
        return self.session if self.kinds[layer_idx].stored else None

    def sees_whole_rows(self, layer_idx: int) -> bool:
        """True if a layer's tokens see all sequences of their row."""
        return self.kinds[layer_idx].scope is Scope.ROW

    def sees_earlier(self, layer_idx: int) -> bool:
        """True if a layer's tokens see the sequences before their own, and none after it."""
        return self.kinds[layer_idx].scope is Scope.PREFIX

    def stored_index(self, layer_idx: int) -> int:
        """The number of a layer among those that are stored, by which sessions and caches know it."""
        return self._stored_indices[layer_idx]

    @cached_property
    def _stored_indices(self) -> list[int]:
        return list(accumulate((int(kind.stored) for kind in self.kinds), initial=0))

    def positions_at(self, scope: Scope) -> Tensor:
        """Positions of the tokens as layers of a scope count them, integers [batch, n] or [1, n]."""
        tokens = self.input_ids if self.input_ids is not None else self.embeddings
        assert tokens is not None
        positions = self.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if scope is not Scope.SEQUENCE:
            return positions
        if self.chains is None:
            return positions - (positions[:, :1] if self.frozen_query is None else self.frozen_query.begin(positions))
        begins = torch.ones_like(self.chains, dtype=torch.bool)
        begins[:, 1:] = self.chains[:, 1:] != self.chains[:, :-1]
        columns = torch.arange(begins.shape[1], device=begins.device)
        first = torch.where(begins, columns, 0).cummax(dim=1).values
        positions = positions.expand_as(self.chains)
        return positions - positions.gather(1, first)

    @cached_property
    def rotary(self) -> Rotary:
        """Cosines and sines of the tokens in every layer, as `KVBackend.rotate` takes them."""
        return Rotary(self.kinds, self.frequencies, self.positions_at, halves=2)

    @cached_property
    def mask(self) -> Tensor | None:
        """The real tokens, bool [batch, 1, 1, n]; None for all."""
        real = self.seen if self.attention_mask is None else self.attention_mask != 0
        return None if real is None else real[:, None, None, :]

    @cached_property
    def bounds(self) -> SequenceBounds | None:
        """Where sequences begin and end; None for one sequence per row."""
        return None if self.chains is None else SequenceBounds.of(self.chains)

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a layer to what its kind lets it see; keys and values are stored where the plan stores them.

        Args:
            layer_idx: which layer.
            query: scaled and after RoPE, [batch, heads, n, head_dim].
            keys: after RoPE, [batch, heads, n, head_dim].
            values: [batch, heads, n, head_dim].

        Returns:
            [batch, heads, n, head_dim]; undefined for padding.
        """
        session = self.session_at(layer_idx)
        if session is not None:
            output = attend_by(session, self.stored_index(layer_idx), query, keys, values)
            if output is not None:
                return output
        elif self.frozen_query is not None:
            output = self.frozen_query.attend(layer_idx, query, keys, values, self.visible)
            if output is not None:
                return output
        if self.bounds is not None and not self.sees_whole_rows(layer_idx):
            return self.bounds.attend(query, keys, values, to_earlier=self.sees_earlier(layer_idx))
        # Layers may lie on several devices.
        mask = None if self.mask is None else self.mask.to(query.device)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
