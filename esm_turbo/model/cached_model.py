"""What the encoders of all families share: a cache is written, extended and decoded alike.

A family's class derives from `CachedModel` and from the library's class, whose computation stays the library's own. It
answers what differs between families (`FamilyEncoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esm_turbo.codecs import Packed, PackedContext
from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.config import Backend, TurboConfig
from esm_turbo.kv.tensors import OWN_TENSORS
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cache_owner import CacheOwner
from esm_turbo.model.graphs import StaticKVCache
from esm_turbo.model.growth import Growth, StepKind
from esm_turbo.model.inputs import (
    check_inputs,
    check_not_all_masked,
    check_positions,
    contexts_of_rows,
    count_tokens,
    count_tokens_with_past,
    in_order,
    positions_to_store,
    split_attention_mask,
    token_mask,
)
from esm_turbo.model.packed_encoder import DTYPES as PACKED_DTYPES
from esm_turbo.model.packed_encoder import (
    Attend,
    Packing,
    attention_of_rows,
    attention_to_cache,
    is_plain,
    is_unhooked,
    plain_addresses,
)
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.model.sessions import Extension, GrowingExtension, PooledExtension, Prefill
from esm_turbo.ops import decoded_attention, triton_attention

if TYPE_CHECKING:
    from transformers.modeling_outputs import ModelOutput

# Options of a forward that the packed encoder supports.
_PACKED_OPTIONS = {"return_dict", "use_cache", "output_hidden_states", "kv_session"}


class CachedModel(CacheOwner):
    """An encoder with a key/value cache; comes before the library's class among the bases.

    A forward with `use_cache=True` returns a `TurboKVCache` in `past_key_values`; one with `past_key_values` extends
    it. `set_turbo` sets how caches are stored.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        context_index: Sequence[int] | Tensor | None = None,
        use_cache: bool | None = None,
        token_counts: tuple[Tensor, Tensor] | None = None,
        append_mask: Tensor | None = None,
        row_lengths: Sequence[int] | None = None,
        chains: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Run the model as the library's class does, and optionally write or extend a cache.

        Args:
            input_ids: token ids, int64 or int32 [batch, n].
            attention_mask: without a past [batch, n], padded on the right if a cache is written; with a past of P
                columns (`past_key_values.get_seq_length()`) [batch, n] or [batch, P + n], where a zero in the past
                hides that token from that row.
            position_ids: [batch, n] or [1, n]; by default each row's next positions.
            inputs_embeds: replaces `input_ids`; only without a cache.
            past_key_values: the contexts: one for each row of the batch, one that all rows share, or any with a
                `context_index`.
            context_index: the context that each row reads, integers [batch], in any order and as often as you like;
                where it lies on a device, it is waited for. Rows cannot be appended to contexts that they name.
            use_cache: write a cache (False by default, whatever the configuration says). Without a past it holds the
                input; with one the new tokens are appended to the past.
            token_counts: number of tokens and of masks in the whole input that this one is a part of, int64 [batch]
                each, for token dropout; by default counted from this input, or from past and input together.
            append_mask: new tokens to append, bool [batch, n]; by default those that `attention_mask` shows. On a
                device, a mask that leaves out tokens before others requires `position_ids`: finding the gap would
                force a device sync.
            row_lengths: tokens per row (the sums of `attention_mask`), where the host knows them. Without gradients, a
                past or `position_ids`, a float16 or bfloat16 model on CUDA then runs packed rows with fused kernels
                (model/packed_encoder.py); in all other cases it has no effect.
            chains: number of each new token's chain, for the cache to store, integers [batch, n]; None for one chain.
            return_dict: as in the library's class.
            **kwargs: as in the library's class.

        Returns:
            Hugging Face's output, with `past_key_values` set if a cache was written.

        Raises:
            ValueError: the inputs contradict each other or the cache, or a cache is used while gradients are recorded.
        """
        past = past_key_values
        if past is not None and not isinstance(past, TurboKVCache):
            raise ValueError(f"`past_key_values` must be a TurboKVCache, got {type(past).__name__}")
        extends = past is not None and past.batch_size > 0
        if (extends or use_cache) and torch.is_grad_enabled():
            raise ValueError("a cache cannot be used while gradients are recorded: use torch.no_grad()")
        kwargs["return_dict"] = True
        if extends or use_cache:
            if input_ids is None or inputs_embeds is not None:
                raise ValueError("a forward with a cache needs `input_ids`")
            check_inputs(input_ids, attention_mask, position_ids, self.config.vocab_size)
        if context_index is not None and not extends:
            raise ValueError("`context_index` needs `past_key_values` with contexts")
        if extends:
            assert past is not None and input_ids is not None
            output = self._extend(
                past,
                context_index,
                input_ids,
                attention_mask,
                position_ids,
                bool(use_cache),
                append_mask,
                token_counts,
                chains,
                kwargs,
            )
            written = past if use_cache else None
        elif use_cache:
            assert input_ids is not None
            written = self.new_cache() if past is None else past
            output = self._prefill(
                written, input_ids, attention_mask, position_ids, append_mask, token_counts, chains, row_lengths, kwargs
            )
        else:
            written = None
            kwargs["use_cache"] = False
            if (input_ids is None) == (inputs_embeds is None):
                raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given")
            if token_counts is not None and input_ids is not None:
                inputs_embeds = self.embed(input_ids, token_mask(input_ids, attention_mask), token_counts)
            output = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, row_lengths, kwargs)
        if self.is_spread:
            for name in ("hidden_states", "attentions"):
                if (of_layers := output.get(name)) is not None:
                    output[name] = tuple(x.to(self.device) for x in of_layers)
        output.past_key_values = written
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _prefill(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        append_mask: Tensor | None,
        token_counts: tuple[Tensor, Tensor] | None,
        chains: Tensor | None,
        row_lengths: Sequence[int] | None,
        kwargs: dict[str, Any],
    ) -> ModelOutput:
        self._claim(cache)
        self._compile_ahead(cache.codec)
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"`attention_mask` must be [batch, n] = {list(input_ids.shape)}, got {list(attention_mask.shape)}"
            )
        mask = token_mask(input_ids, attention_mask)
        whole = row_lengths is not None and list(row_lengths) == [input_ids.shape[1]]
        if whole and position_ids is None and append_mask is None and not cache.columns:
            replayed = self._prefill_by_graph(cache, input_ids, mask, token_counts, kwargs)
            if replayed is not None:
                return replayed
        keep, stored_positions = mask, position_ids
        if append_mask is not None:
            computed = torch.arange(mask.shape[1], device=mask.device) if position_ids is None else position_ids
            keep, stored_positions = (
                append_mask,
                positions_to_store(append_mask, mask, position_ids, computed.expand_as(input_ids)),
            )
        append = cache.plan_append(input_ids, keep, stored_positions, self.special_ids, chains)
        kwargs = {"kv_session": Prefill(cache, append, self.kv_backend), **kwargs}
        if token_counts is None and self.token_dropout:
            check_not_all_masked(count_tokens(input_ids, mask, self.config.mask_token_id))
        embeddings = None if token_counts is None else self.embed(input_ids, mask, token_counts)
        output = self._encode(input_ids, attention_mask, position_ids, embeddings, row_lengths, kwargs)
        cache.commit(append)
        return output

    def fill(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor,
        packing: Packing,
        token_counts: tuple[Tensor, Tensor],
    ) -> ModelOutput:
        """Fill an empty cache of this model with packed rows; nothing is checked, and nothing waits for the device."""
        from esm_turbo.ops import triton_encoder

        mask = attention_mask != 0
        append = cache.plan_append(input_ids, mask, None, self.special_ids)
        attend = attention_of_rows(packing, triton_encoder, Prefill(cache, append, self.kv_backend))
        embeddings = packing.pack(self.embed(input_ids, mask, token_counts))
        output = self._run_packed(embeddings, packing.positions, attend, packing.unpack, {})
        cache.commit(append)
        return output

    def _encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        row_lengths: Sequence[int] | None,
        kwargs: dict[str, Any],
    ) -> ModelOutput:
        """Run a forward without a past, by the packed encoder where it supports it, else by Hugging Face's."""
        if row_lengths is not None:
            rows, width = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
            if len(row_lengths) != rows or not all(0 < length <= width for length in row_lengths):
                raise ValueError(f"`row_lengths` must be {rows} numbers of 1 to {width}, got {list(row_lengths)}")
        if row_lengths is None or position_ids is not None or not self._can_pack(kwargs):
            return self.library_forward(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        from esm_turbo.ops import triton_encoder

        self._compile_ahead(None)
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed(input_ids, token_mask(input_ids, attention_mask), None)
        packing = Packing.of(row_lengths, inputs_embeds.shape[1], inputs_embeds.device)
        attend = attention_of_rows(packing, triton_encoder, kwargs.get("kv_session"))
        return self._run_packed(packing.pack(inputs_embeds), packing.positions, attend, packing.unpack, kwargs)

    def _run_packed(
        self,
        embeddings: Tensor,
        positions: Tensor,
        attend: Attend,
        unpack: Callable[[Tensor], Tensor],
        kwargs: dict[str, Any],
    ) -> ModelOutput:
        """Run the packed encoder on embeddings [T, hidden_size] at positions [T]; `unpack` restores the batch."""
        from esm_turbo.ops import triton_encoder

        wants_states = bool(kwargs.get("output_hidden_states"))
        wanted = range(self.config.num_hidden_layers) if wants_states else ()
        last, states = self.run_packed(embeddings, positions, triton_encoder, attend, wanted)
        last = unpack(last)
        return self.output(last, (*map(unpack, states.values()), last) if wants_states else None)

    def _can_pack(self, kwargs: dict[str, Any]) -> bool:
        """Whether the packed encoder computes what Hugging Face's forward with these options would."""
        return (
            self.packs
            and self.device.type == "cuda"
            and self.dtype in PACKED_DTYPES
            and not (torch.is_grad_enabled() or self.training or torch.is_autocast_enabled("cuda"))
            and not torch.compiler.is_compiling()
            and not {name for name, value in kwargs.items() if value is not None} - _PACKED_OPTIONS
            and self.config._attn_implementation in ("sdpa", "flash_attention_2")
            and self.kv_backend.name is Backend.TRITON
            and all(is_plain(module, self.plain_modules) for module in self.parts)
        )

    def _plain_addresses(self) -> tuple[int, ...] | None:
        """Addresses of all weights if every module is the library's or this one's own; see `plain_addresses`."""
        parts = [plain_addresses(module, self.plain_modules) for module in self.parts]
        return None if None in parts else tuple(chain.from_iterable(parts))  # type: ignore[arg-type]

    def _capturable(self) -> tuple[int, ...] | None:
        """Addresses of all weights if a forward may be captured as a graph now, see `GraphPool`; else None."""
        if (
            not self.replays
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cuda")
            or torch.compiler.is_compiling()
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        return self._plain_addresses()

    @property
    def replays(self) -> bool:
        """Whether calls that recur are replayed as CUDA graphs, unless something of the call itself forbids it."""
        return (
            self.captures
            and not self.is_spread
            and self.device.type == "cuda"
            and not self.training
            and self.kv_backend.name is Backend.TRITON
        )

    @torch.no_grad()
    def decoded(self, cache: TurboKVCache) -> TurboKVCache:
        """Contexts at full precision, as read from the compressed ones: larger, and faster to read for many rows.

        Args:
            cache: of this model. It is returned as it is if it is stored at full precision.

        Raises:
            ValueError: the cache is empty, or another model's.
        """
        if isinstance(cache, PooledContexts):
            raise ValueError("contexts in a pool are read as they are stored: only a cache of its own can be decoded")
        self._claim(cache)
        if not cache.batch_size:
            raise ValueError("the cache is empty: prefill a context first")
        if cache.config.codec == "exact":
            return cache
        if cache.batch_size == 1 and cache.chains is None and (addresses := self._capturable()) is not None:
            made = self._graphs.decode(self, addresses, cache)
            if made is not None:
                return made
        return self.decode_eagerly(cache)

    def decode_eagerly(self, cache: TurboKVCache) -> TurboKVCache:
        """See `decoded`; nothing is checked, and nothing waits for a device."""
        codec = cache.codec
        assert codec is not None
        own = {name: tensor for name, tensor in cache.named_tensors() if name in OWN_TENSORS}
        tensors = {**own, "protected_columns": cache.protected_columns[:, :0]}
        for index, layer in enumerate(cache.layers):
            context = PackedContext(
                layer.packed,
                None,
                layer.protected,
                None,
                layer.rows,
                # A model may be spread over several devices.
                protected_columns=cache.protected_columns.to(next(iter(layer.packed.values())).device),
            )
            keys, values = decoded_attention.decode(codec, index, context, self.dtype)
            tensors |= {f"layers.{index}.packed.keys": keys, f"layers.{index}.packed.values": values}
        config = TurboConfig.from_preset("exact")
        return TurboKVCache.from_tensors(config, cache.geometry, cache.fingerprint, self.codec(config), tensors)

    def _extend_by_graph(
        self,
        cache: TurboKVCache,
        index: RowIndex | None,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> ModelOutput | None:
        """An extension by a captured graph; None where it has to run eagerly."""
        # Only kernels read an index that changes between replays, and slots are too many to be copied.
        assert cache.codec is not None
        if index is not None and (isinstance(cache, PooledContexts) or not triton_attention.can_run(cache.codec)):
            return None
        if isinstance(cache, StaticKVCache) or (addresses := self._capturable()) is None:
            return None
        if position_ids is None:
            steps = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = of_rows(cache.next_positions, index)[:, None] + steps
        states = self._graphs.extend(self, addresses, cache, input_ids, attention_mask, position_ids, index=index)
        return None if states is None else self.output(states, None)

    def _prefill_by_graph(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        mask: Tensor,
        token_counts: tuple[Tensor, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> ModelOutput | None:
        """A prefill of one row by a captured graph; None where it has to run eagerly."""
        if {n for n, x in kwargs.items() if x} - {"return_dict"}:
            return None
        if not self.packs or self.dtype not in PACKED_DTYPES:
            return None
        if (addresses := self._capturable()) is None:
            return None
        counts = count_tokens(input_ids, mask, self.config.mask_token_id) if token_counts is None else token_counts
        replayed = self._graphs.prefill(self, addresses, cache, input_ids, counts)
        if replayed is None:
            return None
        states, filled = replayed
        cache.take_over(filled)
        return self.output(states, None)

    def _extend(
        self,
        cache: TurboKVCache,
        context_index: Sequence[int] | Tensor | None,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        appends: bool,
        append_mask: Tensor | None,
        token_counts: tuple[Tensor, Tensor] | None,
        chains: Tensor | None,
        kwargs: dict[str, Any],
    ) -> ModelOutput:
        if kwargs.get("output_attentions"):
            raise ValueError("`output_attentions` is not available for an extension: its scores are never materialised")
        self._claim(cache)
        self._compile_ahead(cache.codec)
        batch_size, n = input_ids.shape
        index = contexts_of_rows(cache, context_index, batch_size)
        if appends and context_index is not None:
            raise ValueError("nothing can be appended to contexts that rows name: leave out `context_index`")
        if appends and cache.batch_size != batch_size:
            raise ValueError(
                f"cannot append {batch_size} rows to a cache of one: repeat it first, cache.batch_repeat_interleave"
            )
        plain = not {n for n, x in kwargs.items() if x} - {"return_dict"}
        if plain and not appends and token_counts is None:
            replayed = self._extend_by_graph(cache, index, input_ids, attention_mask, position_ids)
            if replayed is not None:
                return replayed
        past_mask, new_mask = split_attention_mask(cache, input_ids, attention_mask, index)
        if token_counts is None and self.token_dropout:
            token_counts = count_tokens_with_past(
                cache, past_mask, input_ids, new_mask, self.config.mask_token_id, index
            )
        embeddings = self.embed(input_ids, new_mask, token_counts)
        given = position_ids
        if position_ids is None:
            position_ids = of_rows(cache.next_positions, index)[:, None] + torch.arange(n, device=input_ids.device)
            check_positions(position_ids)
        append = None
        if appends:
            keep = new_mask if append_mask is None else append_mask
            stored_positions = positions_to_store(keep, new_mask, given, position_ids)
            append = cache.plan_append(input_ids, keep, stored_positions, self.special_ids, chains)
        seen = None if attention_mask is None else new_mask
        visible = None if attention_mask is None or attention_mask.shape[1] == n else past_mask
        positions = position_ids.expand(batch_size, n)
        order = None
        if index is not None:
            ranks = cache.ranks if isinstance(cache, PooledContexts) else None
            index, order = index.grouped(input_ids.device, ranks)
        if order is not None:
            input_ids, embeddings, positions = (x[order] for x in (input_ids, embeddings, positions))
            past_mask, seen, visible = (None if x is None else x[order] for x in (past_mask, seen, visible))
        if isinstance(cache, PooledContexts):
            assert index is not None
            session: Extension = PooledExtension(cache, self.kv_backend, past_mask, seen, visible, index)
        else:
            session = Extension(cache, self.kv_backend, past_mask, seen, append, visible, index)
        output = self._run_extension(session, input_ids, embeddings, positions, kwargs)
        if append is not None:
            cache.commit(append)
        return output if order is None else in_order(output, order.argsort())

    def _run_extension(
        self,
        session: Extension,
        input_ids: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        kwargs: dict[str, Any],
    ) -> ModelOutput:
        """Run the encoder on new tokens: their ids and embeddings, [batch, n, hidden_size], at positions [batch, n]."""
        shape = position_ids.shape
        if self._can_pack(kwargs):
            return self._run_packed(
                embeddings.flatten(0, 1),
                position_ids.flatten(),
                attention_to_cache(session, shape[0]),
                lambda x: x.unflatten(0, shape),
                kwargs,
            )
        return self.library_forward(input_ids, None, position_ids, embeddings, kv_session=session, **kwargs)

    def run_tail(
        self,
        cache: TurboKVCache,
        num_tokens: int,
        num_stored: int,
        store: Callable[[int, Packed], None],
        counts: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Run the last tokens of rows that grow, and a mask after them; nothing is checked, or waits for the device.

        Args:
            cache: of this model, with a column for every token and for the mask. Its `token_ids`, and `positions` if it
                has them, are known beyond its `lengths`.
            num_tokens: n, tokens that run: those from each row's length on, and the mask.
            num_stored: number of these, from the first on, whose keys and values are stored.
            store: stores them, see `GrowingExtension`.
            counts: number of tokens and of masks that each row has in the end, int64 [batch] each.

        Returns:
            The mask's last hidden states, [batch, hidden_size].
        """
        columns = cache.lengths[:, None] + torch.arange(num_tokens, device=cache.device)
        input_ids = cache.token_ids.gather(1, columns).long()
        input_ids[:, -1].fill_(self.config.mask_token_id)
        positions = columns if cache.positions is None else cache.positions.gather(1, columns).long()
        session = GrowingExtension(cache, self.kv_backend, num_stored, store)
        embeddings = self.embed(input_ids, torch.ones_like(input_ids, dtype=torch.bool), counts)
        output = self._run_extension(session, input_ids, embeddings, positions, {"return_dict": True})
        states: Tensor = output.last_hidden_state
        return states[:, -1]

    @contextmanager
    def growing(
        self, cache: TurboKVCache, kinds: Sequence[StepKind], columns: int, uses: int
    ) -> Iterator[Growth | None]:
        """Rows that grow by captured steps, for the caller alone, see `Growth`; None where they cannot be captured.

        Args:
            cache: of this model; how rows are stored. The caller loads them.
            kinds: of the steps to come.
            columns: of the longest row to come, and one for the mask after it.
            uses: number of calls that this one counts for, see `GraphPool`.
        """
        addresses = self._capturable() if is_unhooked(self) and cache.chains is None else None
        if addresses is None:
            yield None
            return
        self._claim(cache)
        self._compile_ahead(cache.codec)
        with self._graphs.growing(self, addresses, cache, kinds, columns, uses) as growth:
            yield growth
