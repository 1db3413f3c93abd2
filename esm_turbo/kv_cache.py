"""The cache: packed keys and values of contexts, and what is done with them besides attention.

A cache holds a batch of contexts of any lengths, padded on the right to a common number of columns. Per layer it
keeps what the codec packs, and the protected tokens apart; for all layers together it keeps the lengths, one byte a
token for its id (from which masks are counted for token dropout), and positions where they are not 0, 1, 2, ...
Tensors are replaced, never written into, so that copies may share them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from esm_turbo.codecs import KVCodec, Packed, codec_class
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.fingerprint import codec_fingerprint, same_codec, same_model
from esm_turbo.ops.torch_ops import take_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from esm_turbo.ops.backends import KVBackend

FORMAT_VERSION = 1

_DEVICE_SLOTS = 2
# More than any row has, and small enough for any integer type.
_MOST_TOKENS = 2**31 - 1


class TurboCacheLayer(CacheLayerMixin):
    """One layer's share of a cache.

    Attributes:
        packed: what the codec stores, tensors [batch, heads, columns, ...].
        protected: transformed keys and values of protected tokens, bfloat16 [batch, heads, slots, head_dim].
        rows: what the codec stores once a row, tensors [batch, heads, 1, ...].
    """

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.packed: Packed = {}
        self.protected: Packed = {}
        self.rows: Packed = {}

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by what `function` makes of it."""
        self.packed = {name: function(tensor) for name, tensor in self.packed.items()}
        self.protected = {name: function(tensor) for name, tensor in self.protected.items()}
        self.rows = {name: function(tensor) for name, tensor in self.rows.items()}

    @property
    def columns(self) -> int:
        return next(iter(self.packed.values())).shape[2] if self.packed else 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError(_WRITTEN_BY)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(_WRITTEN_BY)


_UNCLAIMED = "the cache belongs to no model yet: call model.claim_cache(cache) first"
_WRITTEN_BY = "a TurboKVCache is written by a forward of a TurboEsm model with use_cache=True"


@dataclass
class Append:
    """Tokens on their way into a cache: staged layer by layer, added all at once by `TurboKVCache.commit`.

    Attributes:
        order: for every row the new tokens that are kept, in order, then others as padding, [batch, n].
        counts: how many of them are kept, [batch].
        token_ids: of the new tokens as ordered, [batch, n].
        positions: likewise, or None for the next ones.
        protected: for every slot which of the ordered tokens it protects, -1 for none, [batch, slots].
        layers: per layer what the codec made of the tokens, the protected ones, and what is stored once a row.
        counters: scratch of the backend, see `KVBackend.new_counters`; made when first needed.
    """

    order: Tensor
    counts: Tensor
    token_ids: Tensor
    positions: Tensor | None
    protected: Tensor
    layers: list[tuple[Packed, Packed, Packed]] = field(default_factory=list)
    counters: Tensor | None = None


class TurboKVCache(Cache):
    """Keys and values of a batch of contexts, compressed.

    Args:
        config: the options under which the contents are stored.
        geometry: of the model.
        fingerprint: of the model, see `model_fingerprint`.
        codec: reads and writes the contents; None until a model claims the cache, which checks that it is the one.
        device: where the cache lives.

    Attributes:
        lengths: tokens stored per row, int64 [batch].
        token_ids: uint8 [batch, columns]; beyond a row's length undefined.
        positions: int32 [batch, columns], or None while they are 0, 1, 2, ...
        protected_columns: the columns of protected tokens, -1 for none, int32 [batch, slots].
    """

    def __init__(
        self,
        config: TurboConfig,
        geometry: Geometry,
        fingerprint: npt.NDArray[np.float32],
        codec: KVCodec | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layers=[TurboCacheLayer() for _ in range(geometry.num_layers)])
        self.config = config
        self.geometry = geometry
        self.fingerprint = fingerprint
        self.codec = codec
        self.codec_fingerprint = codec_fingerprint({}) if codec is None else codec.fingerprint
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.positions: Tensor | None = None
        self._seq_length: int | None = None
        self._longest = 0
        # Of a cache on a device, where looking would be waiting.
        self._maybe_empty = False
        self.reset()

    def __repr__(self) -> str:
        return (
            f"TurboKVCache({self.config.name}, {self.geometry}, batch_size={self.batch_size}, "
            f"columns={self.columns}, device={self.device})"
        )

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def _on_cpu(self) -> bool:
        """Whether numbers can be looked at without waiting for a device."""
        return self.device.type == "cpu"

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def columns(self) -> int:
        """Columns of storage: at least the longest row."""
        return self.token_ids.shape[1]

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """The longest row's length. On a device the first call after a change waits for it."""
        if self._seq_length is None:
            self._seq_length = int(self.lengths.max()) if self.batch_size else 0
        return self._seq_length

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored for the tokens: codes, scales, signs, protected tokens and per-token flags.

        Padding of short rows and the calibration, which all caches share, are not counted.
        """
        tokens = int(self.lengths.sum())
        protected = int((self.protected_columns >= 0).sum())
        per_token = self.token_ids.element_size()
        if self.positions is not None:
            per_token += self.positions.element_size()
        total = tokens * per_token + self.lengths.nbytes + protected * self.protected_columns.element_size()
        for layer in self.layers:
            total += tokens * sum(_bytes_per_token(tensor) for tensor in layer.packed.values())
            total += protected * sum(_bytes_per_token(tensor) for tensor in layer.protected.values())
            total += sum(tensor.nbytes for tensor in layer.rows.values())
        return total

    @property
    def bits_per_element(self) -> float:
        """8 nbytes over the number of key and value components stored; NaN for an empty cache."""
        elements = self.geometry.elements_per_token * int(self.lengths.sum())
        return 8 * self.nbytes / elements if elements else float("nan")

    @property
    def next_positions(self) -> Tensor:
        """The position after each row's last, int64 [batch]."""
        if self.positions is None:
            return self.lengths
        after = torch.where(self.valid(), self.positions.long() + 1, 0)
        return after.amax(dim=1) if self.columns else self.lengths

    def valid(self) -> Tensor:
        """Which columns hold a token of the row, bool [batch, columns]."""
        return torch.arange(self.columns, device=self.device) < self.lengths[:, None]

    # ------------------------------------------------------------------ writing

    def plan_append(
        self, input_ids: Tensor, keep: Tensor, position_ids: Tensor | None, special_ids: Sequence[int]
    ) -> Append:
        """Begins to add tokens: says which, in which order, and which of them are protected.

        Args:
            input_ids: the new tokens, [batch, n].
            keep: which of them are stored, bool [batch, n].
            position_ids: their positions [batch, n]; None for each row's next ones.
            special_ids: tokens that are protected where the options say so.
        """
        order = torch.argsort((~keep).to(torch.int32), dim=1, stable=True)
        token_ids = input_ids.gather(1, order)
        counts = keep.sum(1)
        stored = torch.arange(order.shape[1], device=order.device) < counts[:, None]
        protected = torch.zeros(len(input_ids), 0, dtype=torch.int64, device=order.device)
        if self.config.protect_special_tokens:
            # Compared one by one: a tensor of them would have to come from the host, which waits for the device.
            special = stored & functools.reduce(torch.logical_or, [token_ids == known for known in special_ids])
            # A context has one <cls> and at most one <eos>; on a device that is taken for granted, to not wait for it.
            slots = int(special.sum(1).max()) if self._on_cpu else min(_DEVICE_SLOTS, special.shape[1])
            found, where = torch.sort(special.to(torch.int32), dim=1, descending=True, stable=True)
            protected = torch.where(found[:, :slots] > 0, where[:, :slots], -1)
        positions = None if position_ids is None else position_ids.expand_as(order).gather(1, order).to(torch.int32)
        if positions is not None and self.positions is None and self._on_cpu:
            # Positions that are the next ones anyway need no storage.
            start = self.lengths[:, None] if self.batch_size else 0
            if bool((~stored | (positions == start + torch.arange(order.shape[1]))).all()):
                positions = None
        return Append(order, counts, token_ids.to(torch.uint8), positions, protected)

    def stage(self, append: Append, layer_idx: int, keys: Tensor, values: Tensor, backend: KVBackend) -> None:
        """Encodes one layer's keys and values of the new tokens.

        Args:
            append: the tokens.
            layer_idx: which layer.
            keys: after RoPE, [batch, heads, n, head_dim].
            values: likewise.
            backend: encodes.
        """
        assert self.codec is not None
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
            protected=append.protected.to(device) if self.config.protect_special_tokens else None,
            summarize=self._begins(),
            counters=None if append.counters is None else append.counters[layer_idx],
        )
        append.layers.append((packed, protected, self._with_begun(layer_idx, rows)))

    def _begins(self) -> bool:
        """Whether there may be rows without tokens: what is stored once a row is made of the first that are written."""
        if not self.columns:
            return True
        return bool((self.lengths == 0).any()) if self._on_cpu else self._maybe_empty

    def _with_begun(self, layer_idx: int, new: Packed) -> Packed:
        """What is stored once a row: new for rows that begin."""
        old = self.layers[layer_idx].rows
        if not self.columns or not new:
            return new or old
        empty = (self.lengths == 0)[:, None, None, None]
        return {name: torch.where(empty.to(x.device), new[name], x) for name, x in old.items()}

    def commit(self, append: Append) -> None:
        """Adds the staged tokens to every row."""
        if self.batch_size == 0:
            self.reset()
            batch_size, device = append.counts.shape[0], append.counts.device
            self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
            self.token_ids = torch.zeros(batch_size, 0, dtype=torch.uint8, device=device)
            self.protected_columns = torch.zeros(batch_size, 0, dtype=torch.int32, device=device)
        if append.positions is not None and self.positions is None:
            default = torch.arange(self.columns, dtype=torch.int32, device=self.device)
            self.positions = default.repeat(self.batch_size, 1)
        if self.positions is not None:
            new = append.positions
            if new is None:
                steps = torch.arange(append.order.shape[1], device=self.device)
                new = (self.next_positions[:, None] + steps).to(torch.int32)
            self.positions = self._put(self.positions[:, None], new[:, None])[:, 0]
        for layer, (packed, protected, rows) in zip(self.layers, append.layers, strict=True):
            layer.packed = {
                name: self._put(layer.packed.get(name), tensor)
                for name, tensor in packed.items()
                # Not what `drop_refinements` has dropped.
                if name in layer.packed or not layer.packed
            }
            layer.protected = {
                name: torch.cat([layer.protected[name], tensor], dim=2) if layer.protected else tensor
                for name, tensor in protected.items()
            }
            layer.rows = rows
        columns = torch.where(append.protected >= 0, append.protected + self.lengths[:, None], -1)
        self.protected_columns = torch.cat([self.protected_columns, columns.to(torch.int32)], dim=1)
        self.token_ids = self._put(self.token_ids[:, None], append.token_ids[:, None])[:, 0]
        self.lengths = self.lengths + append.counts
        self._longest += append.order.shape[1]
        self._changed()

    def _put(self, old: Tensor | None, new: Tensor) -> Tensor:
        """Writes new [batch, heads, n, ...] after each row's tokens of old [batch, heads, columns, ...]."""
        if old is None or old.shape[2] == 0:
            return new
        grown = torch.cat([old, torch.zeros_like(new)], dim=2)
        column = self.lengths.to(new.device)[:, None] + torch.arange(new.shape[2], device=new.device)
        index = column.view(column.shape[0], 1, -1, *[1] * (new.dim() - 3)).expand_as(new)
        return grown.scatter_(2, index, new)

    def _changed(self) -> None:
        """To be called when lengths have changed: drops columns and slots that no row uses.

        On a device, where to know these numbers would be to wait, their upper bounds do: `_longest`, which is kept
        without looking at the lengths, and two slots, since a protein has one `<cls>` and at most one `<eos>`.
        """
        self._seq_length = None
        slots = _DEVICE_SLOTS
        if self._on_cpu:
            self._longest = self.get_seq_length()
            slots = int((self.protected_columns >= 0).sum(1).max()) if self.batch_size else 0
        if self._longest < self.columns:
            self._trim(self._longest)
        if slots < self.protected_columns.shape[1]:
            self._keep_slots(slots)

    def _keep_slots(self, slots: int) -> None:
        """Keeps each row's first slots in use, that many of them. Tokens beyond are read from their codes."""
        empty = (self.protected_columns < 0).to(torch.int32)
        chosen = torch.argsort(empty, dim=1, stable=True)[:, :slots]
        self.protected_columns = self.protected_columns.gather(1, chosen)
        for layer in self.layers:
            layer.protected = {
                name: take_tokens(tensor, chosen.to(tensor.device)) for name, tensor in layer.protected.items()
            }

    def _trim(self, columns: int) -> None:
        for layer in self.layers:
            layer.packed = {name: tensor[:, :, :columns].contiguous() for name, tensor in layer.packed.items()}
        self.token_ids = self.token_ids[:, :columns]
        if self.positions is not None:
            self.positions = self.positions[:, :columns]

    # ------------------------------------------------------------------ reshaping

    def crop(self, tokens: int | Tensor) -> None:
        """Shortens every row.

        Args:
            tokens: n >= 0 keeps the first min(n, length) tokens of each row, n < 0 removes the last -n. The same on
                every version of transformers, whose own meaning has changed. An integer tensor [batch] has an n for
                each row, one without dimensions the same for all.

        Raises:
            ValueError: it is no integer, or a tensor of another shape.
        """
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
            tokens = max(min(tokens, _MOST_TOKENS), -_MOST_TOKENS)
            lengths = self.lengths.clamp_max(tokens) if tokens >= 0 else (self.lengths + tokens).clamp_min(0)
            self._longest = min(self._longest, tokens) if tokens >= 0 else max(self._longest + tokens, 0)
        self._maybe_empty |= isinstance(tokens, Tensor) or tokens <= 0
        self.lengths = lengths
        self.protected_columns = torch.where(self.protected_columns < lengths[:, None], self.protected_columns, -1).to(
            torch.int32
        )
        self._changed()

    def drop_front(self, tokens: int) -> None:
        """Forgets the first tokens of every row; of a shorter row, all.

        What the others' keys are relative to moves with them: a codec with blocks keeps keys relative to their block
        of columns, so that whole blocks have to go, and every position falls by `tokens`. Any other codec keeps keys
        at their positions, which stay. New tokens go on at `next_positions` in either case.

        Args:
            tokens: how many; for a codec with blocks, a multiple of its `block_size` (`front_step`).

        Raises:
            ValueError: `tokens` is negative or no such multiple, or special tokens that stay need a codec and no model
                has claimed the cache.
        """
        step = self.front_step
        if tokens < 0 or tokens % step:
            raise ValueError(f"`tokens` must be a multiple of {step}, and not negative, got {tokens}")
        if tokens == 0 or not self.batch_size:
            return
        stays = self.protected_columns >= tokens
        blocks = codec_class(self.config).block_size is not None
        if blocks and self.protected_columns.shape[1] and not (self._on_cpu and not bool(stays.any())):
            self._move_protected(tokens)
        if self.positions is not None or not blocks:
            positions = self.positions
            if positions is None:
                positions = torch.arange(self.columns, dtype=torch.int32, device=self.device)
                positions = positions.expand(self.batch_size, -1)
            self.positions = (positions - tokens if blocks else positions)[:, tokens:].contiguous()
        for layer in self.layers:
            layer.packed = {name: tensor[:, :, tokens:].contiguous() for name, tensor in layer.packed.items()}
        self.token_ids = self.token_ids[:, tokens:].contiguous()
        self.lengths = (self.lengths - tokens).clamp_min(0)
        self.protected_columns = torch.where(stays, self.protected_columns - tokens, -1).to(torch.int32)
        self._longest = max(self._longest - tokens, 0)
        self._maybe_empty = True
        self._changed()

    @property
    def front_step(self) -> int:
        """What `drop_front` drops multiples of."""
        return codec_class(self.config).block_size or 1

    def _move_protected(self, columns: int) -> None:
        """Turns protected keys, which are relative to the first block, to one that begins so many columns later."""
        if self.codec is None:
            raise ValueError(_UNCLAIMED)
        for index, layer in enumerate(self.layers):
            keys, values = layer.protected["keys"], layer.protected["values"]
            here = torch.zeros(len(keys), keys.shape[2], dtype=torch.int64, device=keys.device)
            # Values come back as they were, up to rounding: theirs are kept.
            moved = self.codec.inverse_transform(index, keys, values, here)
            keys, _ = self.codec.transform(index, *moved, here + columns)
            layer.protected = {"keys": keys.to(torch.bfloat16), "values": values}

    def reset(self) -> None:
        """Forgets all rows."""
        device = self.lengths.device
        for layer in self.layers:
            layer.packed, layer.protected, layer.rows = {}, {}, {}
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.token_ids = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        self.positions = None
        self.protected_columns = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._longest = 0
        # Of a cache on a device, where looking would be waiting.
        self._maybe_empty = False
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
        self._apply_to_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def select(self, rows: int | Sequence[int] | Tensor) -> Self:
        """Some rows as a cache of their own, without columns that none of them uses; this one stays as it is.

        Raises:
            IndexError: there is no such row.
            ValueError: `rows` are of another kind, see `batch_select_indices`.
        """
        rows = torch.as_tensor(rows)
        rows = rows.reshape(1) if rows.dim() == 0 and rows.dtype != torch.bool else rows
        rows = rows.to(torch.int64) if rows.numel() == 0 else rows
        selected = type(self)(self.config, self.geometry, self.fingerprint, self.codec, self.device)
        selected.codec_fingerprint = self.codec_fingerprint
        for mine, theirs in zip(selected.layers, self.layers, strict=True):
            mine.packed, mine.protected, mine.rows = theirs.packed, theirs.protected, theirs.rows
        selected.lengths, selected.token_ids = self.lengths, self.token_ids
        selected.positions, selected.protected_columns = self.positions, self.protected_columns
        selected._longest, selected._maybe_empty = self._longest, self._maybe_empty
        selected.batch_select_indices(rows)
        selected._trim(selected.get_seq_length())
        return selected

    def drop_refinements(self) -> None:
        """Drops the planes of what is stored, the lowest bits of codes: fewer bytes, read less exactly.

        What is appended later loses them too, as long as the cache has rows. A second call changes nothing.

        Raises:
            ValueError: the codec has nothing that can be dropped, or no model has claimed the cache.
        """
        if self.codec is None:
            raise ValueError(_UNCLAIMED)
        names = [self.codec.refinements(i) for i in range(len(self.layers))]
        if not any(names):
            raise ValueError(f"caches of preset {self.config.name!r} have no planes that can be dropped")
        for layer, dropped in zip(self.layers, names, strict=True):
            layer.packed = {name: tensor for name, tensor in layer.packed.items() if name not in dropped}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, copies side by side. One row serves any batch without this.

        Raises:
            ValueError: `repeats` is not positive.
        """
        if repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, got {repeats}")
        self._apply_to_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> Self:
        """Moves the cache to a device, in place, and returns it."""
        self._apply_to_rows(lambda tensor: tensor.to(device))
        return self

    def _apply_to_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.apply(function)
        self.lengths = function(self.lengths)
        self.token_ids = function(self.token_ids)
        self.protected_columns = function(self.protected_columns)
        if self.positions is not None:
            self.positions = function(self.positions)
        self._changed()

    @classmethod
    def cat(cls, caches: Sequence[TurboKVCache]) -> Self:
        """The rows of several caches in one.

        Raises:
            ValueError: there is none, or they differ in options, geometry, model or calibration, or in whether their
                refinements have been dropped.
        """
        if not caches:
            raise ValueError("cat needs at least one cache")
        first = caches[0]
        for other in caches[1:]:
            if other.config != first.config:
                raise ValueError(f"cannot join caches of presets {first.config.name} and {other.config.name}")
            if other.geometry != first.geometry or not same_model(other.fingerprint, first.fingerprint):
                raise ValueError("cannot join caches of different models")
            if not same_codec(other.codec_fingerprint, first.codec_fingerprint):
                raise ValueError("cannot join caches written with different calibrations")
        caches = [cache for cache in caches if cache.batch_size]
        joined = cls(first.config, first.geometry, first.fingerprint, first.codec, first.device)
        joined.codec_fingerprint = first.codec_fingerprint
        if not caches:
            return joined
        stored = [[layer.packed.keys() for layer in cache.layers] for cache in caches]
        if any(names != stored[0] for names in stored):
            raise ValueError("some of the caches have lost their refinements: call drop_refinements on the others")
        columns = max(cache.columns for cache in caches)
        slots = max(cache.protected_columns.shape[1] for cache in caches)
        for layer, parts in zip(joined.layers, zip(*(cache.layers for cache in caches), strict=True), strict=True):
            layer.packed = _cat_padded([part.packed for part in parts], columns)
            layer.protected = _cat_padded([part.protected for part in parts], slots)
            layer.rows = _cat_padded([part.rows for part in parts], 1)
        joined.lengths = torch.cat([cache.lengths for cache in caches])
        joined.token_ids = torch.cat([_pad(cache.token_ids, 1, columns) for cache in caches])
        joined.protected_columns = torch.cat([_pad(cache.protected_columns, 1, slots, -1) for cache in caches])
        if any(cache.positions is not None for cache in caches):
            default = torch.arange(columns, dtype=torch.int32, device=joined.device)
            joined.positions = torch.cat(
                [
                    default.expand(cache.batch_size, -1)
                    if cache.positions is None
                    else _pad(cache.positions, 1, columns)
                    for cache in caches
                ]
            )
        joined._longest = max(cache._longest for cache in caches)
        joined._maybe_empty = any(cache._maybe_empty for cache in caches)
        joined._changed()
        return joined

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, whole or not at all."""
        tensors = {
            "fingerprint": torch.from_numpy(self.fingerprint),
            "codec_fingerprint": torch.from_numpy(self.codec_fingerprint),
            "lengths": self.lengths,
            "token_ids": self.token_ids,
            "protected_columns": self.protected_columns,
        }
        if self.positions is not None:
            tensors["positions"] = self.positions
        for index, layer in enumerate(self.layers):
            tensors |= {f"layers.{index}.packed.{name}": tensor for name, tensor in layer.packed.items()}
            tensors |= {f"layers.{index}.protected.{name}": tensor for name, tensor in layer.protected.items()}
            tensors |= {f"layers.{index}.rows.{name}": tensor for name, tensor in layer.rows.items()}
        metadata = {"geometry": asdict(self.geometry), "config": self.config.to_dict()}
        write_artifact(path, "cache", FORMAT_VERSION, tensors, metadata)

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
            device: where the cache shall live; None is the model's device, or the CPU.
            model: a `TurboEsmModel` or `TurboEsmForMaskedLM` that the cache must belong to. Without one, that is
                checked when the cache is first used.

        Raises:
            ValueError: the file is missing, damaged, of another format version, or another model's.
        """
        tensors, metadata = read_artifact(path, "cache", FORMAT_VERSION)
        try:
            geometry = Geometry(**metadata["geometry"])
            cache = cls(TurboConfig.from_dict(metadata["config"]), geometry, tensors["fingerprint"].numpy())
            cache.codec_fingerprint = tensors["codec_fingerprint"].numpy()
            for index, layer in enumerate(cache.layers):
                layer.packed = _with_prefix(tensors, f"layers.{index}.packed.")
                layer.protected = _with_prefix(tensors, f"layers.{index}.protected.")
                layer.rows = _with_prefix(tensors, f"layers.{index}.rows.")
            cache.lengths = tensors["lengths"]
            cache.token_ids = tensors["token_ids"]
            cache.protected_columns = tensors["protected_columns"]
            cache.positions = tensors.get("positions", None)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error
        cache._check_shapes(path)
        cache._longest, cache._maybe_empty = cache.columns, True
        cache._changed()
        if model is not None:
            model.claim_cache(cache)
            device = model.device if device is None else device
        return cache.to(device or "cpu")

    def check_layout(self, codec: KVCodec) -> None:
        """Makes sure that a codec finds what it reads; planes may have been dropped.

        Raises:
            ValueError: a tensor is missing, or there is one that the codec does not know, or of another size.
        """
        for index, layer in enumerate(self.layers):
            slabs = [slab for kind in ("key", "value") for slab in codec.field_slabs(index, kind)]
            sizes = {slab.name: len(slab.components) * slab.bits // 8 for slab in slabs}
            found = {name: tensor.shape[-1] for name, tensor in layer.packed.items()}
            needed = sizes.keys() - codec.refinements(index)
            if sizes and found and not (needed <= found.keys() and found.items() <= sizes.items()):
                raise ValueError(f"layer {index} of the cache holds {found}, its codec reads {sizes}")

    def _check_shapes(self, path: str | os.PathLike[str]) -> None:
        batch_size, columns, heads = self.batch_size, self.columns, self.geometry.num_heads
        slots = self.protected_columns.shape[-1]
        good = bool(((self.lengths >= 0) & (self.lengths <= columns)).all())
        good &= self.token_ids.shape == (batch_size, columns)
        good &= self.positions is None or self.positions.shape == (batch_size, columns)
        good &= self.protected_columns.shape == (batch_size, slots) and bool((self.protected_columns < columns).all())
        first = self.layers[0]
        for layer in self.layers:
            good &= bool(layer.packed) == bool(first.packed) and layer.protected.keys() == first.protected.keys()
            good &= not codec_class(self.config).layers_alike or layer.packed.keys() == first.packed.keys()
            good &= layer.rows.keys() == first.rows.keys()
            good &= all(tensor.shape[:3] == (batch_size, heads, columns) for tensor in layer.packed.values())
            good &= all(tensor.shape[:3] == (batch_size, heads, slots) for tensor in layer.protected.values())
            good &= all(tensor.shape[:3] == (batch_size, heads, 1) for tensor in layer.rows.values())
        if not good or (batch_size and not first.packed) or (slots and not first.protected):
            raise ArtifactError(f"{path}: its tensors do not fit together")


def _bytes_per_token(tensor: Tensor) -> int:
    """Bytes of one token over all heads in a tensor [batch, heads, tokens, ...]."""
    return tensor.shape[1] * tensor[0, 0, 0].numel() * tensor.element_size() if tensor.numel() else 0


def _pad(tensor: Tensor, dim: int, size: int, value: int = 0) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)


def _cat_padded(parts: Sequence[Packed], size: int) -> Packed:
    return {name: _cat_rows([_pad(part[name], 2, size) for part in parts]) for name in parts[0]}


def _cat_rows(tensors: list[Tensor]) -> Tensor:
    # What is stored once a row may be longer for a longer row.
    for dim in range(3, tensors[0].dim()):
        size = max(tensor.shape[dim] for tensor in tensors)
        tensors = [_pad(tensor, dim, size) for tensor in tensors]
    return torch.cat(tensors)


def _with_prefix(tensors: Packed, prefix: str) -> Packed:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
