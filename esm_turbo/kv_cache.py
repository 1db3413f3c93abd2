"""The cache: compressed keys and values of contexts.

A cache holds a batch of contexts of any lengths, padded on the right to a common number of columns. Each layer has
what the codec packs and, apart from it, the protected tokens; the cache has the lengths, one byte per token for its id
(masks are counted from it, for token dropout), and positions unless they are 0, 1, 2, ...
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec, Packed, codec_class
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.fingerprint import codec_fingerprint, same_codec
from esm_turbo.files.identity import ModelIdentity
from esm_turbo.files.tabular import counted, named
from esm_turbo.kv.append import NO_GAPS, Append, NewTokens
from esm_turbo.kv.layer import TurboCacheLayer
from esm_turbo.kv.storage import CacheStorage
from esm_turbo.kv.tensors import (
    OWN_DTYPES,
    OWN_TENSORS,
    Axis,
    axis_of,
    cat_rows,
    dim_of,
    entry_bytes,
    layer_tensor,
    layer_tensors,
    no_tokens,
)
from esm_turbo.ops.copies import Cutter
from esm_turbo.ops.torch_ops import take_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from esm_turbo.ops.backends import KVBackend

__all__ = ["FORMAT_VERSION", "Append", "TurboCacheLayer", "TurboKVCache"]

FORMAT_VERSION = 4

# A protein has one <cls> and at most one <eos>: on a device caches have as many slots, of which graphs know the shape.
# Where there may be more, they are counted, which waits for it.
PROTECTED_SLOTS = 2
# Positions are stored as int32. More than the tokens of any row.
MAX_POSITION = 2**31 - 1
_UNCLAIMED = "the cache belongs to no model yet: call model.bind_cache(cache) first"


class TurboKVCache(CacheStorage):
    """Keys and values of a batch of contexts, compressed.

    Several threads may read one, but not while one of them changes it: give each a copy. Its tensors are its own: what
    is written into them changes the context.

    Args:
        config: options under which the contents are stored.
        geometry: of the model.
        identity: of the model.
        codec: reads and writes the contents; None until a model claims the cache and checks that it is the one.
        device: of the tensors.

    Attributes:
        lengths: tokens stored per row, int64 [batch].
        token_ids: uint8 [batch, columns]; undefined beyond a row's length, as everything else stored per column.
        positions: int32 [batch, columns], or None while they are 0, 1, 2, ...
        chains: int32 [batch, columns], or None while every row is one chain, number 0.
        protected_columns: columns of the protected tokens, -1 for none, int32 [batch, slots].
        batch_size: number of rows.
        columns: number of columns, at least the longest row's length.
        device: of the tensors.
    """

    def __init__(
        self,
        config: TurboConfig,
        geometry: Geometry,
        identity: ModelIdentity,
        codec: KVCodec | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(geometry.num_layers, device)
        self.config = config
        self.geometry = geometry
        self.identity = identity
        self.codec = codec
        self.codec_fingerprint = codec_fingerprint({}) if codec is None else codec.fingerprint
        # Whether a row may have no tokens, on a device, where counting them would force a sync.
        self._maybe_empty = False

    @classmethod
    def from_tensors(
        cls,
        config: TurboConfig,
        geometry: Geometry,
        identity: ModelIdentity,
        codec: KVCodec,
        tensors: Mapping[str, Tensor],
    ) -> Self:
        """A cache of these tensors, named as by `named_tensors`; they are neither copied nor written into.

        Raises:
            KeyError: `lengths`, `token_ids` or `protected_columns` is missing.
        """
        cache = cls(config, geometry, identity, codec)
        cache._set_tensors(tensors)
        cache._changed()
        return cache

    def __repr__(self) -> str:
        rows = f"{counted(self.batch_size, 'row')} of up to {counted(self.get_seq_length(), 'token')}"
        return named(self, self.config.name, self.geometry, rows, f"{self.nbytes:,} bytes", self.device)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled cache comes without its codec, which is as large as a model: as a saved one, it must be claimed."""
        return super().__getstate__() | {"codec": None}

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Length of the longest row. On a device the first call after a change forces a sync."""
        if self._seq_length is None:
            self._seq_length = int(self.lengths.max()) if self.batch_size else 0
        return self._seq_length

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens: codes, scales, signs, protected tokens and what is kept per token and row.

        Padding of short rows and the calibration, which all caches share, are not counted.
        """
        entries = {
            Axis.ROW: self.batch_size,
            Axis.COLUMN: int(self.lengths.sum()),
            Axis.SLOT: int((self.protected_columns >= 0).sum()),
        }
        return sum(entries[axis_of(name)] * entry_bytes(name, tensor) for name, tensor in self.named_tensors())

    @property
    def bits_per_element(self) -> float:
        """8 nbytes over the number of key and value components stored; NaN for an empty cache."""
        elements = self.geometry.elements_per_token * int(self.lengths.sum())
        return 8 * self.nbytes / elements if elements else float("nan")

    @property
    def next_positions(self) -> Tensor:
        """The position after each row's last, int64 [batch]."""
        if self.positions is None:
            return self.lengths.clone()
        after = torch.where(self.valid(), self.positions.long() + 1, 0)
        return after.amax(dim=1) if self.columns else self.lengths.clone()

    @property
    def next_chains(self) -> Tensor:
        """The number after that of each row's last chain, int64 [batch]."""
        if self.chains is None:
            return (self.lengths > 0).long()
        after = torch.where(self.valid(), self.chains.long() + 1, 0)
        return after.amax(dim=1) if self.columns else torch.zeros_like(self.lengths)

    def valid(self) -> Tensor:
        """Which columns hold a token of the row, bool [batch, columns]."""
        return torch.arange(self.columns, device=self.device) < self.lengths[:, None]

    def plan_append(
        self,
        input_ids: Tensor,
        keep: Tensor,
        position_ids: Tensor | None,
        protected_ids: Sequence[int],
        chains: Tensor | None = None,
        known: NewTokens = NO_GAPS,
    ) -> Append:
        """Starts an append: which tokens are stored, in which order, and which of them are protected.

        Args:
            input_ids: the new tokens, [batch, n].
            keep: which of them are stored, bool [batch, n].
            position_ids: their positions, [batch, n]; None for each row's next ones.
            protected_ids: tokens that are protected if the options say so; none for a model that has none.
            chains: number of each token's chain, integers [batch, n]; None for 0.
            known: what the host knows of the tokens; their special ones are counted if it does not.

        Raises:
            ValueError: the cache has several chains, and those of the new tokens are not given.
        """
        if chains is None and self.chains is not None:
            raise ValueError("the context has several chains: say by `sequence_id` which one appended tokens belong to")
        order = torch.argsort((~keep).to(torch.int32), dim=1, stable=True)
        token_ids = input_ids.gather(1, order)
        counts = keep.sum(1)
        stored = torch.arange(order.shape[1], device=order.device) < counts[:, None]
        protected = torch.zeros(len(input_ids), 0, dtype=torch.int64, device=order.device)
        protects = self.config.protect_special_tokens and len(protected_ids) > 0
        most = 0
        if protects:
            # One comparison per token: a tensor of them would be copied from the host, which forces a sync.
            special = stored & functools.reduce(torch.logical_or, [token_ids == one for one in protected_ids])
            most = int(special.sum(1).max()) if known.specials is None else known.specials
            slots = most if self._on_cpu else max(most, min(PROTECTED_SLOTS, special.shape[1]))
            found, where = torch.sort(special.to(torch.int32), dim=1, descending=True, stable=True)
            protected = torch.where(found[:, :slots] > 0, where[:, :slots], -1)
        positions = None if position_ids is None else position_ids.expand_as(order).gather(1, order).to(torch.int32)
        if positions is not None and self.positions is None and self._on_cpu:
            # Positions that are the next ones anyway need no storage.
            start = self.lengths[:, None] if self.batch_size else 0
            if bool((~stored | (positions == start + torch.arange(order.shape[1]))).all()):
                positions = None
        if chains is not None:
            chains = chains.gather(1, order).to(torch.int32)
            if self.chains is None and self._on_cpu and not bool((stored & (chains != 0)).any()):
                chains = None
        token_ids = token_ids.to(torch.uint8)
        empty = known.maybe_empty
        return Append(self.lengths, order, counts, token_ids, positions, protected, chains, protects, most, empty)

    def stage(self, append: Append, layer_idx: int, keys: Tensor, values: Tensor, backend: KVBackend) -> None:
        """Encodes one layer's keys and values of the new tokens.

        Args:
            append: the new tokens.
            layer_idx: which layer.
            keys: after RoPE, [batch, heads, n, head_dim].
            values: of the same tokens, [batch, heads, n, head_dim].
            backend: encodes.

        Raises:
            ValueError: layers run in another order than their numbers, by which contexts are read.
        """
        assert self.codec is not None
        if layer_idx != len(append.layers):
            raise _out_of_order(len(append.layers))
        device = keys.device
        if append.counters is None or append.counters.device != device:
            append.counters = backend.new_counters(len(self.layers), keys.shape[0], keys.shape[1], device)
        packed, protected, rows = backend.encode(
            self.codec,
            layer_idx,
            keys,
            values,
            order=append.order.to(device),
            start=self.lengths.to(device) if self.batch_size else None,
            columns=self.columns + keys.shape[2],
            counts=append.counts.to(device),
            protected=append.protected.to(device) if append.protects else None,
            summarize=self._has_empty_rows(),
            counters=None if append.counters is None else append.counters[layer_idx],
        )
        append.layers.append(TurboCacheLayer(packed, protected, self._with_first(layer_idx, rows)))

    def _has_empty_rows(self) -> bool:
        """True if rows may be empty: what is stored per row is made from the first tokens that are appended to it."""
        if not self.columns:
            return True
        return bool((self.lengths == 0).any()) if self._on_cpu else self._maybe_empty

    def _with_first(self, layer_idx: int, new: Packed) -> Packed:
        """The per-row tensors of a layer: `new` for rows that were empty, the old for the others."""
        old = self.layers[layer_idx].rows
        if not self.columns or not new:
            return new or old
        empty = (self.lengths == 0)[:, None, None, None]
        return {name: torch.where(empty.to(x.device), new[name], x) for name, x in old.items()}

    def commit(self, append: Append) -> None:
        """Stores the encoded tokens, each row's after those that it has.

        Raises:
            ValueError: some layer did not run.
            RuntimeError: another thread has changed the cache since the append was started.
        """
        self.check_unchanged(append.lengths)
        if len(append.layers) < len(self.layers):
            raise _out_of_order(len(append.layers))
        if not self.batch_size:
            self._set_tensors(no_tokens(len(append.counts), append.counts.device))
            self._maybe_empty = append.maybe_empty
        if append.positions is not None and self.positions is None:
            self.positions, self._capacity = self._default_positions(self.columns), 0
        if append.chains is not None and self.chains is None:
            self.chains, self._capacity = torch.zeros_like(self.token_ids, dtype=torch.int32), 0
        new = {"token_ids": append.token_ids}
        if append.chains is not None:
            new["chains"] = append.chains
        if append.positions is not None:
            new["positions"] = append.positions
        elif self.positions is not None:
            steps = torch.arange(append.order.shape[1], device=self.device)
            new["positions"] = (self.next_positions[:, None] + steps).to(torch.int32)
        protected = torch.where(append.protected >= 0, append.protected + self.lengths[:, None], -1)
        new["protected_columns"] = protected.to(torch.int32)
        slots = self.protected_columns.shape[1] + append.specials
        stored = {name for name, _ in self.named_tensors()}
        first = not self.layers[0].packed
        for name, tensor in layer_tensors(append.layers):
            # Refinements that have been dropped stay dropped.
            if first or name in stored or axis_of(name) is not Axis.COLUMN:
                new[name] = tensor
        # Autocast refuses to concatenate tensors of the other half precision.
        with torch.autocast(self.device.type, enabled=False):
            self._write(new, append.counts)
        self._changed(slots=slots)

    def check_unchanged(self, lengths: Tensor) -> None:
        """Check that the cache is as it was when its `lengths` were these.

        Raises:
            RuntimeError: it was changed.
        """
        if self.lengths is not lengths:
            raise RuntimeError("the cache was changed during this call, by another thread: give each a copy")

    def _default_positions(self, columns: int) -> Tensor:
        """0, 1, 2, ... for every row, int32 [batch, columns]."""
        return torch.arange(columns, dtype=torch.int32, device=self.device).repeat(self.batch_size, 1)

    def _changed(self, at_most: int | None = None, slots: int | None = None) -> None:
        """Drops columns and slots that no row uses; to be called whenever lengths change.

        On a device exact numbers would force a sync, so that upper bounds are used, unless more than two slots may be
        in use. One column stays, which kernels may read.

        Args:
            at_most: another upper bound of the lengths.
            slots: another upper bound of the slots in use.
        """
        self._seq_length = None
        columns = self.columns if at_most is None else min(self.columns, at_most)
        if self._on_cpu:
            columns = self.get_seq_length()
        least = 0 if self._on_cpu else PROTECTED_SLOTS
        slots = self.protected_columns.shape[1] if slots is None else slots
        if slots > least:
            slots = int((self.protected_columns >= 0).sum(1).max()) if self.batch_size else 0
        slots = max(slots, least)
        self._trim(columns)
        if self.batch_size and not columns and not self._on_cpu:
            self._map_tensors(lambda x, dim: x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :]), Axis.COLUMN)
            columns = 1
        if (slots := min(slots, columns)) < self.protected_columns.shape[1]:
            self._keep_slots(slots)

    def _keep_slots(self, slots: int) -> None:
        """Keeps the first `slots` slots in use of each row. Tokens of the others are read from their codes."""
        empty = (self.protected_columns < 0).to(torch.int32)
        chosen = torch.argsort(empty, dim=1, stable=True)[:, :slots]

        def choose(tensor: Tensor, dim: int) -> Tensor:
            index = chosen.to(tensor.device)
            return tensor.gather(1, index) if dim == 1 else take_tokens(tensor, index)

        self._map_tensors(choose, Axis.SLOT)

    def crop(self, tokens: int | Tensor) -> None:
        """Shortens every row.

        Args:
            tokens: n >= 0 keeps the first min(n, length) tokens of each row, n < 0 removes the last -n. The meaning is
                the same with every version of transformers, whose own has changed. An integer tensor [batch] has an n
                for each row, one without dimensions the same for all.

        Raises:
            ValueError: `tokens` is not an integer, or a tensor of another shape.
        """
        at_most = None
        if isinstance(tokens, Tensor):
            if tokens.shape not in ((), self.lengths.shape) or tokens.is_floating_point() or tokens.dtype == torch.bool:
                raise ValueError(
                    f"`tokens` must be integers [batch] = {list(self.lengths.shape)}, got {tokens.dtype}"
                    f" {list(tokens.shape)}"
                )
            tokens = tokens.to(self.lengths)
            lengths = torch.where(tokens >= 0, torch.minimum(self.lengths, tokens), self.lengths + tokens).clamp_min(0)
        elif isinstance(tokens, float | bool):
            raise ValueError(f"`tokens` must be an integer, got {tokens}")
        else:
            tokens = max(min(tokens, MAX_POSITION), -MAX_POSITION)
            lengths = self.lengths.clamp_max(tokens) if tokens >= 0 else (self.lengths + tokens).clamp_min(0)
            at_most = tokens if tokens >= 0 else max(self.columns + tokens, 0)
        self._maybe_empty |= isinstance(tokens, Tensor) or tokens <= 0
        protected = torch.where(self.protected_columns < lengths[:, None], self.protected_columns, -1).to(torch.int32)
        # At once, as an interrupt may come between two lines.
        self.__dict__.update(lengths=lengths, protected_columns=protected, _seq_length=None)
        self._changed(at_most)

    def drop_front(self, tokens: int) -> None:
        """Drops the first tokens of every row; of a shorter row, all.

        A codec with blocks stores keys relative to their block of columns. There whole blocks have to go, and every
        position falls by `tokens`. Any other codec stores keys at their positions, which stay. New tokens continue at
        `next_positions` in either case.

        Args:
            tokens: number of tokens; for a codec with blocks a multiple of its `block_size` (`front_step`).

        Raises:
            ValueError: `tokens` is negative or no such multiple, special tokens that stay need a codec and no model has
                claimed the cache, or on the CPU a position would fall below 0.
        """
        step = self.front_step
        if tokens < 0 or tokens % step:
            raise ValueError(f"`tokens` must be a multiple of {step}, and not negative, got {tokens}")
        if tokens == 0 or not self.batch_size:
            return
        stays = self.protected_columns >= tokens
        blocks = codec_class(self.config).block_size is not None
        if blocks and self.positions is not None and self._on_cpu:
            first = torch.where(self.valid(), self.positions, tokens)[:, tokens:]
            if bool((first < tokens).any()):
                raise ValueError(f"positions begin again behind the first {tokens} tokens, and cannot fall by as many")
        new = dict(self.named_tensors())
        if blocks and self.protected_columns.shape[1] and not (self._on_cpu and not bool(stays.any())):
            new |= self._moved_protected(tokens)
        if not blocks and self.positions is None:
            new["positions"] = self._default_positions(self.columns)
        if blocks and self.positions is not None:
            new["positions"] = self.positions - tokens
        start, columns = min(tokens, self.columns), max(self.columns - tokens, 0)
        for name, tensor in new.items():
            if axis_of(name) is Axis.COLUMN:
                new[name] = tensor.narrow(dim_of(name), start, columns).contiguous()
        new["lengths"] = (self.lengths - tokens).clamp_min(0)
        new["protected_columns"] = torch.where(stays, self.protected_columns - tokens, -1).to(torch.int32)
        self._capacity, self._maybe_empty = 0, True
        self._set_tensors(new)
        self._changed()

    @property
    def front_step(self) -> int:
        """`drop_front` takes multiples of this."""
        return codec_class(self.config).block_size or 1

    def _moved_protected(self, columns: int) -> dict[str, Tensor]:
        """Protected keys by name, which are relative to the first block, rotated to one that begins `columns` later."""
        if self.codec is None:
            raise ValueError(_UNCLAIMED)
        new = {}
        for index, layer in enumerate(self.layers):
            keys, values = layer.protected["keys"], layer.protected["values"]
            here = torch.zeros(len(keys), keys.shape[2], dtype=torch.int64, device=keys.device)
            # Values come back the same, up to rounding: the old ones are kept.
            moved = self.codec.inverse_transform(index, keys, values, here)
            keys, _ = self.codec.transform(index, *moved, here + columns)
            new[f"layers.{index}.protected.keys"] = keys.to(torch.bfloat16)
        return new

    def take_over(self, other: TurboKVCache) -> None:
        """Becomes another cache of the same model and options, which must not be used any more."""
        self._set_tensors(dict(other.named_tensors()))
        self._capacity, self._maybe_empty, self._seq_length = 0, other._maybe_empty, other._seq_length

    def reset(self) -> None:
        """Drops all rows."""
        self._set_tensors(no_tokens(0, self.device))
        self._capacity, self._maybe_empty = 0, False
        self._changed()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, in their order; integers [rows], or bool [batch].

        Raises:
            IndexError: there is no such row.
            ValueError: `indices` are of another kind or shape.
        """
        indices = torch.as_tensor(indices).to(self.device)
        if indices.dim() != 1 or indices.is_floating_point():
            raise ValueError(f"rows are integers [rows] or bool [batch], got {indices.dtype} {list(indices.shape)}")
        if indices.dtype != torch.bool:
            # As indices, uint8 would be a mask.
            indices = indices.to(torch.int64)
        self._map_tensors(lambda tensor, dim: tensor[indices.to(tensor.device)])
        self._changed()

    def select(self, rows: int | Sequence[int] | Tensor) -> Self:
        """Some rows as a cache of their own, without columns that none of them uses; this one stays as it is.

        Raises:
            IndexError: there is no such row.
            ValueError: `rows` are of another kind, see `batch_select_indices`.
        """
        rows = torch.as_tensor(rows)
        rows = rows.reshape(1) if rows.dim() == 0 and rows.dtype != torch.bool else rows
        rows = rows.to(torch.int64) if rows.numel() == 0 else rows
        selected = copy.copy(self)
        selected.batch_select_indices(rows)
        length = selected.get_seq_length()
        selected._changed(length)
        selected._seq_length = length
        return selected

    def cut(self, lengths: Sequence[int]) -> list[Self]:
        """Every row as a cache of its own, as by `select`; one launch, one allocation per row, and no device sync.

        The tensors of their layers are views that are made when they are first used.

        Args:
            lengths: tokens per row: those of the cache, which the caller knows; a device is not asked for them.

        Raises:
            ValueError: no model has claimed the cache, it has fewer rows or columns, or on the CPU other lengths.
        """
        if self.codec is None:
            raise ValueError(_UNCLAIMED)
        known = self.lengths[: len(lengths)].tolist() if self._on_cpu else lengths
        # The device would copy what lies beyond.
        if len(lengths) > self.batch_size or max(lengths, default=0) > self.columns or list(lengths) != list(known):
            raise ValueError(f"{lengths} are not the tokens of {self.batch_size} rows of at most {self.columns}")
        # One for each device, where the layers of a model lie on several.
        cut = [(names, cutter(lengths)) for names, cutter in self._cutters()]
        own_at = [(rows, name, index) for names, rows in cut for index, name in enumerate(names) if name in OWN_TENSORS]
        caches = []
        for row, length in enumerate(lengths):
            own = {name: rows[row].tensor(index) for rows, name, index in own_at}
            parts = [(names, rows[row].tensors) for names, rows in cut]
            cache = self._with_layers_later(own, parts)
            cache._maybe_empty = not length
            cache._changed()
            cache._seq_length = length
            caches.append(cache)
        return caches

    def _cutters(self) -> list[tuple[list[str], Cutter]]:
        """The plan that cuts rows out of a device's tensors, and their names; made once while they stay the same."""
        named = list(self.named_tensors())

        def make() -> tuple[list[tuple[list[str], Cutter]], bool]:
            groups: dict[torch.device, list[tuple[str, Tensor]]] = {}
            for name, tensor in named:
                groups.setdefault(tensor.device, []).append((name, tensor))
            made = []
            for group in groups.values():
                dims = [dim_of(name) if axis_of(name) is Axis.COLUMN else None for name, _ in group]
                made.append(([name for name, _ in group], Cutter([tensor for _, tensor in group], dims)))
            return made, any(cutter.copied for _, cutter in made)

        return self.described("cutters", [tensor for _, tensor in named], make)

    def _refinements(self) -> set[str]:
        """Names of the planes that `drop_refinements` drops, among those of `named_tensors`."""
        assert self.codec is not None
        return {f"layers.{i}.packed.{name}" for i in range(len(self.layers)) for name in self.codec.refinements(i)}

    def drop_refinements(self) -> None:
        """Drops the planes of the codes, their lowest bits: fewer bytes, read less exactly.

        What is appended later loses them too, as long as the cache has rows. A second call changes nothing.

        Raises:
            ValueError: the codec has no planes that can be dropped, or no model has claimed the cache.
        """
        if self.codec is None:
            raise ValueError(_UNCLAIMED)
        gone = self._refinements()
        if not gone:
            raise ValueError(f"caches of preset {self.config.name!r} have no planes that can be dropped")
        before = dict(self.named_tensors())
        self._set_tensors({name: tensor for name, tensor in before.items() if name not in gone})
        self._let_go(tensor for name, tensor in before.items() if name in gone)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, copies side by side. One row serves any batch without this.

        Raises:
            ValueError: `repeats` is not positive.
        """
        if repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, got {repeats}")
        self._map_tensors(lambda tensor, dim: tensor.repeat_interleave(repeats, dim=0))
        self._changed()

    def to(self, device: torch.device | str) -> Self:
        """Moves the cache to a device, in place, and returns it."""
        self._map_tensors(lambda tensor, dim: tensor.to(device))
        self._changed()
        return self

    def place(self, device: torch.device, layers: Sequence[torch.device]) -> None:
        """Moves the tensors of each layer to a device of its own, and what all layers share to another, in place.

        Args:
            device: of what is stored per token and row, and by which the cache is known.
            layers: device of each layer.
        """
        wanted = {name: layers[layer_tensor(name)[0]] for name, _ in layer_tensors(self.layers)}
        tensors = dict(self.named_tensors())
        if all(tensor.device == wanted.get(name, device) for name, tensor in tensors.items()):
            return
        self._capacity = 0
        self._set_tensors({name: tensor.to(wanted.get(name, device)) for name, tensor in tensors.items()})
        self._changed()

    def check_alike(self, other: TurboKVCache, row: int) -> None:
        """Makes sure that another cache can be in one batch with this one, of which it is row `row`.

        Raises:
            ValueError: they differ in options, geometry, model or calibration.
        """
        differs = f"row {row} differs from row 0"
        if other.config != self.config:
            names = f"{self.config.name} and {other.config.name}"
            raise ValueError(f"cannot concatenate caches of presets {names}: {differs}")
        if other.geometry != self.geometry or other.identity.difference(self.identity):
            raise ValueError(f"cannot concatenate caches of different models: {differs}")
        if not same_codec(other.codec_fingerprint, self.codec_fingerprint):
            raise ValueError(f"cannot concatenate caches written with different calibrations: {differs}")

    def tensors_to_join(self) -> dict[str, Tensor]:
        """The tensors that `cat` concatenates, by name."""
        return dict(self.named_tensors())

    @classmethod
    def cat(cls, caches: Sequence[TurboKVCache]) -> Self:
        """The rows of several caches in one.

        Raises:
            ValueError: there is none, or they differ in options, geometry, model or calibration, or in whether their
                refinements have been dropped.
        """
        if not caches:
            raise ValueError("cat needs at least one cache")
        first, row = caches[0], caches[0].batch_size
        for other in caches[1:]:
            first.check_alike(other, row)
            row += other.batch_size
        caches = [cache for cache in caches if cache.batch_size]
        whole = cls(first.config, first.geometry, first.identity, first.codec, first.device)
        whole.codec_fingerprint = first.codec_fingerprint
        if not caches:
            return whole
        named = [cache.tensors_to_join() for cache in caches]
        if any(cache.positions is not None for cache in caches):
            columns = max(cache.columns for cache in caches)
            for cache, tensors in zip(caches, named, strict=True):
                tensors.setdefault("positions", cache._default_positions(columns))
        if any(cache.chains is not None for cache in caches):
            for tensors in named:
                tensors.setdefault("chains", torch.zeros_like(tensors["token_ids"], dtype=torch.int32))
        packed = [{name for name in tensors if axis_of(name) is Axis.COLUMN} for tensors in named]
        if any(names != packed[0] for names in packed):
            raise ValueError(
                "refinements were dropped from some of the caches only: call drop_refinements on the others"
            )
        with torch.autocast(whole.device.type, enabled=False):
            whole._set_tensors({name: cat_rows(name, [tensors[name] for tensors in named]) for name in named[0]})
        whole._maybe_empty = any(cache._maybe_empty for cache in caches)
        whole._changed()
        return whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, whole or not at all.

        Raises:
            ValueError: the model that computed the cache drops values at random, runs unknown code, or has changed.
        """
        self.identity.check_unchanged()
        codec = {"codec_fingerprint": torch.from_numpy(self.codec_fingerprint)}
        metadata = {
            "geometry": self.geometry.to_dict(),
            "config": self.config.to_dict(),
            "model": self.identity.to_dict(),
        }
        write_artifact(path, "cache", FORMAT_VERSION, codec | dict(self.named_tensors()), metadata)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str | None = None,
        model: PreTrainedModel | None = None,
    ) -> Self:
        """Reads a cache.

        Args:
            path: a file written by `save`.
            device: of the cache; None for the model's device, or the CPU.
            model: a model of this package that the cache must belong to. Without one, that is checked when the cache
                is first used.

        Raises:
            ValueError: the file is missing, damaged, of another format version, or another model's.
        """
        tensors, metadata = read_artifact(path, "cache", FORMAT_VERSION)
        try:
            geometry, identity = Geometry(**metadata["geometry"]), ModelIdentity.from_dict(metadata["model"])
            # A number of layers costs nothing that the file does not hold.
            if geometry.num_layers > len(tensors):
                raise ValueError(f"{len(tensors)} tensors are not those of {geometry.num_layers} layers")
            cache = cls(TurboConfig.from_dict(metadata["config"]), geometry, identity)
            cache.codec_fingerprint = tensors.pop("codec_fingerprint").numpy()
            cache._set_tensors(tensors)
            fits = cache._fits()
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error
        if not fits:
            raise ArtifactError(f"{path}: its tensors do not fit together")
        cache._maybe_empty = True
        cache._changed()
        if model is not None:
            model.bind_cache(cache)
            if device is None and model.base_model.is_spread:
                # Each layer is where the model's is.
                return cache
            device = model.device if device is None else device
        return cache.to(device or "cpu")

    def check_layout(self, codec: KVCodec) -> None:
        """Makes sure that a codec finds the tensors that it reads; refinements may have been dropped.

        Raises:
            ValueError: a tensor is missing, unknown to the codec, or of another size.
        """
        for index, layer in enumerate(self.layers):
            slabs = [slab for kind in ("key", "value") for slab in codec.field_slabs(index, kind)]
            sizes = {slab.name: len(slab.components) * slab.bits // 8 for slab in slabs}
            found = {name: tensor.shape[-1] for name, tensor in layer.packed.items()}
            needed = sizes.keys() - codec.refinements(index)
            if sizes and found and not (needed <= found.keys() and found.items() <= sizes.items()):
                raise ValueError(f"layer {index} of the cache holds {found}, its codec reads {sizes}")

    def _fits(self) -> bool:
        """True if the tensors that were read from a file fit together."""
        batch_size, columns, slots = self.batch_size, self.columns, self.protected_columns.shape[-1]
        sizes = {Axis.ROW: 1, Axis.COLUMN: columns, Axis.SLOT: slots}
        good = bool(((self.lengths >= 0) & (self.lengths <= columns)).all())
        for name, tensor in self.named_tensors():
            size = sizes[axis_of(name)]
            if name in OWN_TENSORS:
                good &= tensor.shape == ((batch_size,) if name == "lengths" else (batch_size, size))
                good &= tensor.dtype == OWN_DTYPES[name]
            else:
                good &= tensor.shape[:3] == (batch_size, self.geometry.num_heads, size)
        good = good and bool((self.protected_columns < columns).all())
        first = self.layers[0]
        for layer in self.layers:
            good &= bool(layer.packed) == bool(first.packed) and layer.protected.keys() == first.protected.keys()
            good &= not codec_class(self.config).layers_alike or layer.packed.keys() == first.packed.keys()
            good &= layer.rows.keys() == first.rows.keys()
        return good and bool(first.packed or not batch_size) and bool(first.protected or not slots)


def _out_of_order(place: int) -> ValueError:
    return ValueError(
        f"layer {place} did not run in its place: layers were exchanged, left out or run twice, and contexts are read"
        " by their numbers; use the model without contexts, such as by the arm 'full'"
    )
