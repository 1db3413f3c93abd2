"""ESM-2 as in Hugging Face Transformers, with a key/value cache.

Without a cache every computation is Hugging Face's own code. With one, the self-attention rotates its queries and keys
(RoPE) and passes them and the values to a session (model/sessions.py), which encodes them (prefill) or attends to a
cache (extension). The rotations of stored keys are those of their codec (codecs/base.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import EsmConfig, EsmForMaskedLM, EsmModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm.modeling_esm import (
    EsmAttention,
    EsmEmbeddings,
    EsmEncoder,
    EsmIntermediate,
    EsmLayer,
    EsmLMHead,
    EsmOutput,
    EsmRotaryEmbedding,
    EsmSelfAttention,
    EsmSelfOutput,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from esm_turbo.calibration import Calibration
from esm_turbo.codecs import KVCodec, Packed, PackedContext, codec_class, codec_without_calibration
from esm_turbo.config import DEFAULT_PRESET, Backend, Geometry, TurboConfig
from esm_turbo.files.fingerprint import Fingerprint, model_fingerprint, same_codec, same_model
from esm_turbo.kv.tensors import OWN_TENSORS
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.checkpoints import CheckpointMixin, WithoutRecorders, check_config
from esm_turbo.model.graph_pool import GraphPool
from esm_turbo.model.graphs import StaticKVCache
from esm_turbo.model.growth import Growth, StepKind
from esm_turbo.model.heads import UntrainedHeadWarning, untrained
from esm_turbo.model.inputs import (
    check_inputs,
    check_not_all_masked,
    check_positions,
    count_tokens,
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
    is_unhooked,
    packed_encoder,
    plain_addresses,
)
from esm_turbo.model.projections import QKVProjections
from esm_turbo.model.sessions import Extension, GrowingExtension, KVSession, Prefill
from esm_turbo.ops import decoded_attention
from esm_turbo.ops.backends import KVBackend, resolve_backend
from esm_turbo.ops.warmup import Sizes

# Options of a forward that the packed encoder supports.
_PACKED_OPTIONS = {"return_dict", "use_cache", "output_hidden_states", "kv_session"}
# Fraction of residues masked in ESM-2's training (Lin et al. 2023), for which token dropout corrects.
_TRAINED_MASK_RATIO = 0.15 * 0.8


@dataclass
class TurboMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the cache, where one was written."""

    past_key_values: TurboKVCache | None = None


class TurboEsmSelfAttention(WithoutRecorders, QKVProjections, EsmSelfAttention):
    """Self-attention that passes queries, keys and values to a session where there is one."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        kv_session: KVSession | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `EsmSelfAttention` does; with a session, its outputs [batch, n, hidden_size] are returned."""
        if kv_session is None:
            plain: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                position_embeddings,
                **kwargs,
            )
            return plain
        assert position_embeddings is not None
        # Prefill computes exactly what Hugging Face does: projections are fused in extensions only.
        projected = self.project(hidden_states, allow_fused=isinstance(kv_session, Extension))
        heads = (-1, self.attention_head_size)
        query, keys, values = (x.unflatten(-1, heads).transpose(1, 2) for x in projected)  # [batch, heads, n, head_dim]
        scale = self.attention_head_size**-0.5
        if isinstance(kv_session, Extension):
            query, keys = kv_session.rotate(query, keys, *position_embeddings, scale)
        else:
            query, keys = apply_rotary_pos_emb(query * scale, keys, *position_embeddings)
        weights = None
        # Under autocast, rotations return another dtype than linear layers.
        query, keys = query.to(values.dtype), keys.to(values.dtype)
        device_type = hidden_states.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                output = kv_session.attend(self.layer_idx, query, keys, values)
        else:
            output = kv_session.attend(self.layer_idx, query, keys, values)
        if output is not None:
            output = output.transpose(1, 2)
        else:
            attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            output, weights = attend(
                self,
                query,
                keys,
                values,
                attention_mask,
                dropout=self.dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
        return output.reshape(*hidden_states.shape[:-1], -1).contiguous(), weights


class TurboEsmLayer(WithoutRecorders, EsmLayer):
    """Transformer layer that lets a session compute the activation."""

    def forward(self, hidden_states: Tensor, *args: Any, kv_session: KVSession | None = None, **kwargs: Any) -> Tensor:
        output: Tensor
        if not isinstance(kv_session, Extension):
            output = super().forward(hidden_states, *args, kv_session=kv_session, **kwargs)
            return output
        hidden_states = self.attention(hidden_states, *args, kv_session=kv_session, **kwargs)
        activated = kv_session.gelu(self.intermediate.dense(self.LayerNorm(hidden_states)))
        output = self.output(activated, hidden_states)
        return output


class TurboEsmRotaryEmbedding(EsmRotaryEmbedding):
    """Rotary embedding whose frequencies stay in float32 whatever the model is cast to."""

    inv_freq: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != before.dtype:
            self.inv_freq = before.to(self.inv_freq.device)
        return self


class _AttentionWeights(KVSession):
    """Records the attention weights of every layer, under any attention implementation."""

    def __init__(self, attention_mask: Tensor) -> None:
        self.hidden = attention_mask[:, None, None, :] == 0
        self.weights: list[Tensor] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        scores = query @ keys.transpose(2, 3)
        scores = scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min)
        self.weights.append(scores.softmax(dim=-1))


# Modules whose forward the packed encoder and captured graphs replace.
_PLAIN_MODULES = {
    EsmEmbeddings,
    nn.Embedding,
    TurboEsmRotaryEmbedding,
    EsmEncoder,
    TurboEsmLayer,
    EsmAttention,
    TurboEsmSelfAttention,
    EsmSelfOutput,
    EsmIntermediate,
    EsmOutput,
    nn.Linear,
    nn.LayerNorm,
    nn.ModuleList,
    nn.Dropout,
}


class TurboEsmModel(CheckpointMixin, EsmModel):
    """`EsmModel` with a key/value cache.

    A forward with `use_cache=True` returns a `TurboKVCache` in `past_key_values`; one with `past_key_values` extends
    it. `set_turbo` sets how caches are stored.

    Attributes:
        captures: whether calls that recur are captured as CUDA graphs (model/graph_pool.py), which take device memory,
            and a fraction of a second to capture. Set it to False for eager calls only.
    """

    _keep_in_fp32_modules_strict = ("rotary_embeddings",)
    _no_split_modules = ("TurboEsmLayer", "EsmEmbeddings")

    def __init__(self, config: EsmConfig, add_pooling_layer: bool = True) -> None:
        check_config(config)
        super().__init__(config, add_pooling_layer)
        for index, layer in enumerate(self.encoder.layer):
            # Only the class changes: the parameters and their initialisation stay Hugging Face's.
            layer.__class__ = TurboEsmLayer
            layer.attention.self.__class__ = TurboEsmSelfAttention
            layer.attention.self.layer_idx = index
        self.rotary_embeddings.__class__ = TurboEsmRotaryEmbedding
        self.calibration: Calibration | None = None
        # Fingerprint of the weights for which the calibration has been checked.
        self._calibrated: Fingerprint | None = None
        self.turbo_config = TurboConfig.from_preset(DEFAULT_PRESET)
        self.backend: str | Backend = Backend.AUTO
        self.captures = True
        self._graphs = GraphPool()

    def set_turbo(
        self,
        *,
        calibration: str | os.PathLike[str] | Calibration | None = None,
        preset: str | TurboConfig = DEFAULT_PRESET,
        backend: str | Backend = Backend.AUTO,
    ) -> None:
        """Set how new caches are stored and how caches are read.

        Args:
            calibration: a `Calibration` of this model or its path.
            preset: a preset's name or options.
            backend: implementation of encoding and packed attention, see `Backend`.

        Raises:
            ValueError: the calibration is unreadable or another model's, or an option is wrong.
        """
        config = TurboConfig.from_preset(preset)
        codec_class(config)
        resolve_backend(backend, self.device)
        if isinstance(calibration, str | os.PathLike):
            calibration = Calibration.load(calibration)
        if calibration is not None:
            if not isinstance(calibration, Calibration):
                raise ValueError(f"`calibration` must be a Calibration or its path, got {calibration!r}")
            calibration.check_model(self)
            self._calibrated = model_fingerprint(self)
        self.calibration, self.turbo_config, self.backend = calibration, config, backend
        self._graphs.clear()

    @property
    def kv_backend(self) -> KVBackend:
        """The backend that `backend` names on the model's device.

        Raises:
            ValueError: it cannot run there.
        """
        return resolve_backend(self.backend, self.device)

    def codec(self, config: TurboConfig) -> KVCodec:
        """The codec for these options.

        Raises:
            ValueError: the options need a calibration and the model has none, or another model's.
        """
        return self._codec(config, model_fingerprint(self))

    def _codec(self, config: TurboConfig, fingerprint: Fingerprint) -> KVCodec:
        """See `codec`; the fingerprint is the model's."""
        if self.calibration is not None:
            if self._calibrated is not fingerprint:
                self.calibration.check_model(self)
                self._calibrated = fingerprint
            return self.calibration.codec(config)
        codec = codec_without_calibration(config, Geometry.of(self.config))
        if codec is not None:
            return codec
        raise ValueError(
            f"preset {config.name!r} needs a calibration of this model: make one with `esm-turbo calibrate"
            " PROTEINS.fasta --model MODEL --out calibration.safetensors` and pass calibration=,"
            " or use preset='exact'"
        )

    def warmup(self) -> int:
        """Compile the GPU kernels that this model needs for caches of its preset, side by side; once on a machine.

        They are compiled at the latest when a call first needs them. They are few, whatever the lengths and the numbers
        of sequences, and other ones for each dtype and preset.

        Returns:
            Number of kernels; 0 where there are none, as on a CPU.

        Raises:
            ValueError: the preset needs a calibration and the model has none.
            KernelError: (a RuntimeError) a kernel does not compile.
            KernelCacheError: (an OSError) the folder of compiled kernels cannot be used.
        """
        return self._compile_ahead(self.codec(self.turbo_config))

    def _compile_ahead(self, codec: KVCodec | None) -> int:
        if torch.compiler.is_compiling():
            return 0
        geometry = Geometry.of(self.config)
        sizes = Sizes(geometry.num_heads, geometry.head_dim, self.config.intermediate_size)
        return self.kv_backend.compile_ahead(sizes, codec, self.dtype, self.device)

    def new_cache(self) -> TurboKVCache:
        """An empty cache of this model."""
        fingerprint = model_fingerprint(self)
        codec = self._codec(self.turbo_config, fingerprint)
        return TurboKVCache(self.turbo_config, Geometry.of(self.config), fingerprint, codec, self.device)

    def notice_changes(self) -> None:
        """Notice changes of the weights that a forward on a device does not, see `model_fingerprint`.

        Waits for the device. Caches that were written with other weights are refused afterwards.
        """
        model_fingerprint(self, sampled=True)

    def claim_cache(self, cache: TurboKVCache) -> None:
        """Check that a cache is this model's, and set the codec that reads it. Waits for the device.

        Raises:
            ValueError: the cache is another model's, or this model has no calibration or another one.
        """
        self.notice_changes()
        self._claim(cache)

    def _claim(self, cache: TurboKVCache) -> None:
        fingerprint, codec = model_fingerprint(self), cache.codec
        if codec is not None and cache.fingerprint is fingerprint and codec is self._codec(cache.config, fingerprint):
            return
        geometry = Geometry.of(self.config)
        if cache.geometry != geometry:
            raise ValueError(f"the cache is for {cache.geometry}, the model has {geometry}")
        if not same_model(cache.fingerprint, fingerprint):
            raise ValueError("the cache belongs to another model: the weights differ")
        codec = self._codec(cache.config, fingerprint)
        if not same_codec(cache.codec_fingerprint, codec.fingerprint):
            raise ValueError("the cache was written with another calibration: this one cannot read its codes")
        cache.check_layout(codec)
        # The same array, so that the next check is one of identity.
        cache.codec, cache.fingerprint = codec, fingerprint

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        use_cache: bool | None = None,
        token_counts: tuple[Tensor, Tensor] | None = None,
        append_mask: Tensor | None = None,
        row_lengths: Sequence[int] | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | tuple[Any, ...]:
        """Run the model as `EsmModel` does, and optionally write or extend a cache.

        Args:
            input_ids: token ids, int64 or int32 [batch, n].
            attention_mask: without a past [batch, n], padded on the right if a cache is written; with a past of P
                columns (`past_key_values.get_seq_length()`) [batch, n] or [batch, P + n], where a zero in the past
                hides that token from that row.
            position_ids: [batch, n] or [1, n]; by default each row's next positions.
            inputs_embeds: replaces `input_ids`; only without a cache.
            past_key_values: the context. A context of a single row is shared by all rows of the batch.
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
            return_dict: as in `EsmModel`.
            **kwargs: as in `EsmModel`.

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
        if extends:
            assert past is not None and input_ids is not None
            output = self._extend(
                past, input_ids, attention_mask, position_ids, bool(use_cache), append_mask, token_counts, kwargs
            )
            written = past if use_cache else None
        elif use_cache:
            assert input_ids is not None
            written = self.new_cache() if past is None else past
            output = self._prefill(
                written, input_ids, attention_mask, position_ids, append_mask, token_counts, row_lengths, kwargs
            )
        else:
            written = None
            kwargs["use_cache"] = False
            if token_counts is not None and input_ids is not None:
                inputs_embeds = self._embed(input_ids, token_mask(input_ids, attention_mask), token_counts)
                input_ids = None
            output = self._encode(input_ids, attention_mask, position_ids, inputs_embeds, row_lengths, kwargs)
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
        row_lengths: Sequence[int] | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
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
        append = cache.plan_append(input_ids, keep, stored_positions, self.special_ids)
        kwargs = {"kv_session": Prefill(cache, append, self.kv_backend), **kwargs}
        if token_counts is None:
            check_not_all_masked(count_tokens(input_ids, mask, self.config.mask_token_id))
            output = self._encode(input_ids, attention_mask, position_ids, None, row_lengths, kwargs)
        else:
            embeddings = self._embed(input_ids, mask, token_counts)
            output = self._encode(None, attention_mask, position_ids, embeddings, row_lengths, kwargs)
        cache.commit(append)
        return output

    def fill(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor,
        packing: Packing,
        token_counts: tuple[Tensor, Tensor],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Fill an empty cache of this model with packed rows; nothing is checked, and nothing waits for the device."""
        from esm_turbo.ops import triton_encoder

        mask = attention_mask != 0
        append = cache.plan_append(input_ids, mask, None, self.special_ids)
        attend = attention_of_rows(packing, triton_encoder, Prefill(cache, append, self.kv_backend))
        embeddings = packing.pack(self._embed(input_ids, mask, token_counts))
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
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Run a forward without a past, by the packed encoder where it supports it, else by Hugging Face's."""
        if row_lengths is not None:
            rows, width = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
            if len(row_lengths) != rows or not all(0 < length <= width for length in row_lengths):
                raise ValueError(f"`row_lengths` must be {rows} numbers of 1 to {width}, got {list(row_lengths)}")
        if row_lengths is None or position_ids is not None or not self._can_pack(kwargs):
            output: BaseModelOutputWithPoolingAndCrossAttentions = super().forward(
                input_ids, attention_mask, position_ids, inputs_embeds, **kwargs
            )
            return output
        from esm_turbo.ops import triton_encoder

        self._compile_ahead(None)
        if inputs_embeds is None:
            inputs_embeds = self.embeddings(input_ids=input_ids, attention_mask=attention_mask)
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
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Run the packed encoder on embeddings [T, hidden_size] at positions [T]; `unpack` restores the batch."""
        from esm_turbo.ops import triton_encoder

        wants_states = bool(kwargs.get("output_hidden_states"))
        last, states = packed_encoder(
            self.encoder,
            self.rotary_embeddings.inv_freq,
            embeddings,
            positions,
            triton_encoder,
            attend,
            range(self.config.num_hidden_layers) if wants_states else (),
        )
        last = unpack(last)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=last,
            pooler_output=None if self.pooler is None else self.pooler(last),
            hidden_states=(*map(unpack, states.values()), last) if wants_states else None,
        )

    def _can_pack(self, kwargs: dict[str, Any]) -> bool:
        """Whether the packed encoder computes what Hugging Face's forward with these options would."""
        return (
            self.device.type == "cuda"
            and self.dtype in PACKED_DTYPES
            and not (torch.is_grad_enabled() or self.training or torch.is_autocast_enabled("cuda"))
            and not torch.compiler.is_compiling()
            and not {name for name, value in kwargs.items() if value is not None} - _PACKED_OPTIONS
            and self.config._attn_implementation in ("sdpa", "flash_attention_2")
            and self.kv_backend.name is Backend.TRITON
            and self._plain_addresses() is not None
        )

    def _plain_addresses(self) -> tuple[int, ...] | None:
        """Addresses of all weights if every module is the library's or this one's own; see `plain_addresses`."""
        parts = [
            plain_addresses(module, _PLAIN_MODULES)
            for module in (self.embeddings, self.encoder, self.rotary_embeddings)
        ]
        return None if None in parts else tuple(chain.from_iterable(parts))  # type: ignore[arg-type]

    def _capturable(self) -> tuple[int, ...] | None:
        """Addresses of all weights if a forward may be captured as a graph now, see `GraphPool`; else None."""
        if (
            not self.captures
            or self.device.type != "cuda"
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cuda")
            or torch.compiler.is_compiling()
            or torch.cuda.is_current_stream_capturing()
            or self.training
            or self.pooler is not None
            or self.kv_backend.name is not Backend.TRITON
        ):
            return None
        return self._plain_addresses()

    @torch.no_grad()
    def decoded(self, cache: TurboKVCache) -> TurboKVCache:
        """Contexts at full precision, as read from the compressed ones: larger, and faster to read for many rows.

        Args:
            cache: of this model. It is returned as it is if it is stored at full precision.

        Raises:
            ValueError: the cache is empty, or another model's.
        """
        self._claim(cache)
        if not cache.batch_size:
            raise ValueError("the cache is empty: prefill a context first")
        if cache.config.codec == "exact":
            return cache
        if cache.batch_size == 1 and (addresses := self._capturable()) is not None:
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
        self, cache: TurboKVCache, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | None:
        """An extension by a captured graph; None where it has to run eagerly."""
        if isinstance(cache, StaticKVCache) or (addresses := self._capturable()) is None:
            return None
        if position_ids is None:
            position_ids = cache.next_positions[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self._graphs.extend(self, addresses, cache, input_ids, attention_mask, position_ids)
        return None if states is None else BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=states)

    def _prefill_by_graph(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        mask: Tensor,
        token_counts: tuple[Tensor, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | None:
        """A prefill of one row by a captured graph; None where it has to run eagerly."""
        if {n for n, x in kwargs.items() if x} - {"return_dict"} or self.dtype not in PACKED_DTYPES:
            return None
        if (addresses := self._capturable()) is None:
            return None
        counts = count_tokens(input_ids, mask, self.config.mask_token_id) if token_counts is None else token_counts
        replayed = self._graphs.prefill(self, addresses, cache, input_ids, counts)
        if replayed is None:
            return None
        states, filled = replayed
        cache.take_over(filled)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=states)

    def _extend(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        appends: bool,
        append_mask: Tensor | None,
        token_counts: tuple[Tensor, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        if kwargs.get("output_attentions"):
            raise ValueError("`output_attentions` is not available for an extension: its scores are never materialised")
        self._claim(cache)
        self._compile_ahead(cache.codec)
        batch_size, n = input_ids.shape
        if cache.batch_size not in (1, batch_size):
            raise ValueError(f"the cache has {cache.batch_size} rows, the extension {batch_size}; only 1 row is shared")
        if appends and cache.batch_size != batch_size:
            raise ValueError(
                f"cannot append {batch_size} rows to a cache of one: repeat it first, cache.batch_repeat_interleave"
            )
        if not appends and token_counts is None and not {n for n, x in kwargs.items() if x} - {"return_dict"}:
            replayed = self._extend_by_graph(cache, input_ids, attention_mask, position_ids)
            if replayed is not None:
                return replayed
        past_mask, new_mask = split_attention_mask(cache, input_ids, attention_mask)
        if token_counts is None:
            token_counts = self._counts_with_past(cache, past_mask, input_ids, new_mask)
        embeddings = self._embed(input_ids, new_mask, token_counts)
        given = position_ids
        if position_ids is None:
            position_ids = cache.next_positions[:, None] + torch.arange(n, device=input_ids.device)
            check_positions(position_ids)
        append = None
        if appends:
            keep = new_mask if append_mask is None else append_mask
            append = cache.plan_append(
                input_ids, keep, positions_to_store(keep, new_mask, given, position_ids), self.special_ids
            )
        session = Extension(
            cache,
            self.kv_backend,
            past_mask,
            None if attention_mask is None else new_mask,
            append,
            None if attention_mask is None or attention_mask.shape[1] == n else past_mask,
        )
        output = self._run_extension(session, embeddings, position_ids.expand(batch_size, n), kwargs)
        if append is not None:
            cache.commit(append)
        return output

    def _run_extension(
        self, session: Extension, embeddings: Tensor, position_ids: Tensor, kwargs: dict[str, Any]
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Run the encoder on new tokens: embeddings [batch, n, hidden_size] at positions [batch, n]."""
        shape = position_ids.shape
        if self._can_pack(kwargs):
            return self._run_packed(
                embeddings.flatten(0, 1),
                position_ids.flatten(),
                attention_to_cache(session, shape[0]),
                lambda x: x.unflatten(0, shape),
                kwargs,
            )
        output: BaseModelOutputWithPoolingAndCrossAttentions = super().forward(
            None, None, position_ids, inputs_embeds=embeddings, kv_session=session, **kwargs
        )
        return output

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
        embeddings = self._embed(input_ids, torch.ones_like(input_ids, dtype=torch.bool), counts)
        states: Tensor = self._run_extension(session, embeddings, positions, {"return_dict": True}).last_hidden_state
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
        addresses = self._capturable() if is_unhooked(self) else None
        if addresses is None:
            yield None
            return
        self._claim(cache)
        with self._graphs.growing(self, addresses, cache, kinds, columns, uses) as growth:
            yield growth

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of `<cls>` and `<eos>`; ESM-2's configurations do not name `<cls>`, which is its vocabulary's first."""
        return (0, 2 if self.config.eos_token_id is None else self.config.eos_token_id)

    def _counts_with_past(
        self, cache: TurboKVCache, past_mask: Tensor | None, input_ids: Tensor, new_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Number of tokens and of masks that each row sees, past and new together."""
        seen = cache.valid() if past_mask is None else past_mask
        tokens, masks = count_tokens(input_ids, new_mask, self.config.mask_token_id)
        masked = seen & (cache.token_ids == self.config.mask_token_id)
        return tokens + seen.sum(1), masks + masked.sum(1)

    def _embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor]) -> Tensor:
        """Embeddings as in Hugging Face, with token dropout scaled by the counts of the whole input."""
        embeddings: Tensor = self.embeddings.word_embeddings(input_ids)
        if self.embeddings.token_dropout:
            check_not_all_masked(counts)
            tokens, masks = (count.to(input_ids.device) for count in counts)
            scale = (1 - _TRAINED_MASK_RATIO) / (1 - masks.float() / tokens)
            embeddings = embeddings.masked_fill((input_ids == self.config.mask_token_id)[..., None], 0.0)
            embeddings = (embeddings * scale[:, None, None]).to(embeddings.dtype)
        if self.embeddings.layer_norm is not None:
            embeddings = self.embeddings.layer_norm(embeddings)
        return embeddings * mask[..., None].to(embeddings.dtype)

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Predict contacts as `EsmModel` does, under any attention implementation.

        Warns with `UntrainedHeadWarning` if the head was never trained.
        """
        if problem := untrained(self, "contact_head"):
            warnings.warn(problem, UntrainedHeadWarning, stacklevel=2)
        session = _AttentionWeights(attention_mask)
        super().forward(tokens, attention_mask, return_dict=True, kv_session=session)
        attentions = torch.stack(session.weights, dim=1)
        attentions = attentions * attention_mask[:, None, None, None, :] * attention_mask[:, None, None, :, None]
        contacts: Tensor = self.contact_head(tokens, attentions)
        return contacts


class TurboEsmForMaskedLM(CheckpointMixin, EsmForMaskedLM):
    """`EsmForMaskedLM` with a key/value cache; see `TurboEsmModel`."""

    _keep_in_fp32_modules_strict = ("rotary_embeddings",)

    def __init__(self, config: EsmConfig) -> None:
        check_config(config)
        # Skips EsmForMaskedLM's own, which would build an EsmModel.
        super(EsmForMaskedLM, self).__init__(config)
        self.esm = TurboEsmModel(config, add_pooling_layer=False)
        self.lm_head = EsmLMHead(config)
        self.post_init()

    def set_turbo(self, **turbo: Any) -> None:
        """See `TurboEsmModel.set_turbo`."""
        self.esm.set_turbo(**turbo)

    @property
    def kv_backend(self) -> KVBackend:
        """See `TurboEsmModel.kv_backend`."""
        return self.esm.kv_backend

    def notice_changes(self) -> None:
        """See `TurboEsmModel.notice_changes`."""
        self.esm.notice_changes()

    def claim_cache(self, cache: TurboKVCache) -> None:
        """See `TurboEsmModel.claim_cache`."""
        self.esm.claim_cache(cache)

    def new_cache(self) -> TurboKVCache:
        """See `TurboEsmModel.new_cache`."""
        return self.esm.new_cache()

    @contextmanager
    def growing(
        self, cache: TurboKVCache, kinds: Sequence[StepKind], columns: int, uses: int
    ) -> Iterator[Growth | None]:
        """See `TurboEsmModel.growing`."""
        if not is_unhooked(self):
            yield None
            return
        with self.esm.growing(cache, kinds, columns, uses) as growth:
            yield growth

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TurboMaskedLMOutput | tuple[Any, ...]:
        """Run the model as `EsmForMaskedLM` does, and optionally with a cache: see `TurboEsmModel.forward`."""
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        output = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            labels=labels,
            past_key_values=past_key_values,
            use_cache=bool(use_cache),
            return_dict=True,
            **kwargs,
        )
        result = TurboMaskedLMOutput(**output, past_key_values=past_key_values if use_cache else None)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()
