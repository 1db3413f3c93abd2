"""ESM-C as in Hugging Face Transformers, with a key/value cache.

Without a cache every computation is Hugging Face's own code. With one, the self-attention projects, normalises and
rotates its queries and keys (RoPE) and passes them and the values to a session (model/sessions.py), which encodes them
(prefill) or attends to a cache (extension).

Unlike ESM-2, ESM-C has no token dropout and no contact head; its vocabulary has a chain break, and `sequence_id` keeps
chains from attending to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from esm_turbo.files.families import FAMILIES
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cached_model import CachedModel
from esm_turbo.model.chains import check_chains, mask_of_chains, mask_of_extension
from esm_turbo.model.checkpoints import CheckpointMixin, PicklableHooksMixin
from esm_turbo.model.inputs import contexts_of_rows
from esm_turbo.model.masked_lm import CachedMaskedLM, TurboMaskedLMOutput
from esm_turbo.model.plain import check_attention
from esm_turbo.model.plan import ForwardPlan, PackedTokens
from esm_turbo.model.projections import stacked_weight
from esm_turbo.model.rotary import Float32Frequencies
from esm_turbo.model.sessions import Extension, KVSession, attend_by
from esm_turbo.model.spread import to_weight_device
from esm_turbo.ops.float8 import Float8Linear, Quantized

try:
    from transformers import EsmcConfig, EsmcForMaskedLM, EsmcModel
    from transformers.models.esmc import modeling_esmc
    from transformers.models.esmc.modeling_esmc import (
        EsmcAttention,
        EsmcLayer,
        EsmcLayerNorm,
        EsmcMaskedLMHead,
        EsmcMLP,
        EsmcRotaryEmbedding,
    )
except ImportError as error:
    raise ImportError(str(FAMILIES["esmc"].too_old())) from error


class TurboEsmcAttention(PicklableHooksMixin, EsmcAttention):
    """Self-attention that passes queries, keys and values to a session where there is one."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        kv_session: KVSession | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `EsmcAttention` does; with a session, to what it says."""
        if kv_session is None:
            plain: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, position_embeddings, **kwargs
            )
            return plain
        assert position_embeddings is not None
        if kv_session.runs_library:
            check_attention(EsmcAttention)
        heads = (-1, self.head_dim)
        # The norms are over all heads together.
        projected = (
            self.q_norm(self.q_proj(hidden_states)).to(hidden_states.dtype),
            self.k_norm(self.k_proj(hidden_states)).to(hidden_states.dtype),
            self.v_proj(hidden_states),
        )
        query, keys, values = (x.unflatten(-1, heads).transpose(1, 2) for x in projected)  # [batch, heads, n, head_dim]
        weights = None
        if isinstance(kv_session, Extension) and not kv_session.runs_library:
            query, keys = kv_session.rotate(query, keys, *position_embeddings, self.scaling)
            output = attend_by(kv_session, self.layer_idx, query, keys, values)
        else:
            query, keys = modeling_esmc.apply_rotary_pos_emb(query, keys, *position_embeddings)
            output = attend_by(kv_session, self.layer_idx, query * self.scaling, keys, values)
        if output is not None:
            output = output.transpose(1, 2)
        else:
            attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, modeling_esmc.eager_attention_forward
            )
            dropout = self.attention_dropout if self.training else 0.0
            output, weights = attend(
                self, query, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(output), weights


class TurboEsmcLayer(PicklableHooksMixin, EsmcLayer):
    """Transformer layer that can be pickled after a forward which recorded hidden states."""

    # The library keeps the forward that its class had when this one was made.
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        return output


class TurboEsmcRotaryEmbedding(Float32Frequencies, EsmcRotaryEmbedding):
    """Rotary embedding whose frequencies stay in float32 whatever the model is cast to."""


def _add_norm(
    ops: ModuleType, x: Tensor, added: tuple[Tensor, float] | None, norm: EsmcLayerNorm, *, quantizes: bool = False
) -> tuple[Tensor, Any]:
    """The residual sum of x and what is added to it, if anything, with its factor; and the norm of the sum."""
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    delta, factor = (None, 1.0) if added is None else added
    result: tuple[Tensor, Any] = ops.add_layer_norm(
        x, delta, norm.weight, bias, norm.eps, factor=factor, quantizes=quantizes
    )
    return result


def _product(ops: ModuleType, x: Tensor | Quantized, owner: nn.Module, linears: Sequence[nn.Module]) -> Tensor:
    """The product of x with weights of one module, stacked."""
    weight = stacked_weight(owner, linears)
    if isinstance(x, Tensor):
        return functional.linear(x, weight)
    product: Tensor = ops.linear(x, weight, None, stacked_weight(owner, linears, "scales"))
    return product


def _add_product(
    ops: ModuleType, hidden: Tensor, x: Tensor | Quantized, linear: nn.Module, factor: float
) -> tuple[Tensor, tuple[Tensor, float] | None]:
    """The residual sum of hidden states and a product with a factor; of an eight-bit product, what is to be added."""
    if isinstance(linear, Float8Linear):
        return hidden, (ops.linear_parts(x, linear.weight, None, linear.scales), factor)
    assert isinstance(x, Tensor) and isinstance(linear, nn.Linear)
    return torch.addmm(hidden, x, linear.weight.t(), alpha=factor), None


class _EsmcCheckpoints(CheckpointMixin):
    """Fields and checks of ESM-C's checkpoints."""

    family = FAMILIES["esmc"]
    deciding_fields: ClassVar[dict[str, tuple[type, ...]]] = {
        "mask_token_id": (int,),
        "vocab_size": (int,),
        "hidden_size": (int,),
        "num_hidden_layers": (int,),
        "num_attention_heads": (int,),
        "intermediate_size": (int,),
    }

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any], source: object) -> None:
        """See `CheckpointMixin.check_fields`."""
        heads, shared = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
        if shared not in (None, heads):
            raise ValueError(f"{source}: {heads} heads share {shared} of keys and values; ESM-C has as many of each")

    @classmethod
    def check_config(cls, config: EsmcConfig) -> None:
        """See `CheckpointMixin.check_config`."""
        super().check_config(config)
        head_dim = config.hidden_size // config.num_attention_heads
        if config.head_dim != head_dim:
            raise ValueError(
                f"`head_dim` must be hidden_size / num_attention_heads = {head_dim}, got {config.head_dim}"
            )
        if config.rope_parameters["rope_type"] != "default":
            raise ValueError(f"rope_type must be 'default', got {config.rope_parameters['rope_type']!r}")


class TurboEsmcModel(_EsmcCheckpoints, CachedModel, EsmcModel):
    """`EsmcModel` with a key/value cache, see `CachedModel`."""

    _keep_in_fp32_modules_strict = ("rotary_emb",)
    _no_split_modules = ("TurboEsmcLayer",)
    packed_operations = frozenset({"add_layer_norm", "norm_rotate_", "swiglu"})
    peptide_notice = (
        "ESM-C was trained on single chains: it never saw a peptide after a target, with a chain break `|` between them"
        " or without one"
    )
    plain_modules = frozenset(
        {
            nn.Embedding,
            TurboEsmcRotaryEmbedding,
            TurboEsmcLayer,
            TurboEsmcAttention,
            EsmcMLP,
            EsmcLayerNorm,
            Float8Linear,
            nn.Linear,
            nn.ModuleList,
            SiLUActivation,
        }
    )

    def __init__(self, config: EsmcConfig) -> None:
        self.check_config(config)
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            # Only the class changes: the parameters and their initialisation stay Hugging Face's.
            layer.__class__ = TurboEsmcLayer
            layer.self_attn.__class__ = TurboEsmcAttention
            layer.self_attn.layer_idx = index
        self.rotary_emb.__class__ = TurboEsmcRotaryEmbedding
        self.prepare_turbo()

    @property
    def special_ids(self) -> tuple[int, int]:
        """See `FamilyEncoder.special_ids`."""
        return self.config.bos_token_id, self.config.eos_token_id

    @property
    def rotary_frequencies(self) -> Tensor:
        """See `FamilyEncoder.rotary_frequencies`."""
        frequencies: Tensor = self.rotary_emb.inv_freq
        return frequencies

    @property
    def parts(self) -> Sequence[nn.Module]:
        """See `FamilyEncoder.parts`."""
        return self.embed_tokens, self.layers, self.norm, self.rotary_emb

    @property
    def products(self) -> list[dict[str, tuple[nn.Module, ...]]]:
        """See `FamilyEncoder.products`."""
        return [
            {
                "qkv": (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                "attention_out": (layer.self_attn.o_proj,),
                "mlp_in": (layer.mlp.gate_proj, layer.mlp.up_proj),
                "mlp_out": (layer.mlp.down_proj,),
            }
            for layer in self.layers
        ]

    def embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
        """See `FamilyEncoder.embed`."""
        embeddings: Tensor = self.embed_tokens(input_ids)
        return embeddings

    def library_forward(self, plan: ForwardPlan) -> BaseModelOutputWithPast:
        """See `FamilyEncoder.library_forward`."""
        # The library's forward embeds the tokens itself.
        output = EsmcModel.forward(self, plan.input_ids, plan.attention_mask, plan.positions, **plan.library_options)
        return BaseModelOutputWithPast(**output)

    @property
    def packs(self) -> bool:
        """See `CachedModel`; not with biases, which no published checkpoint has."""
        return not (self.config.attention_bias or self.config.mlp_bias) and self.config.hidden_act == "silu"

    def run_packed(self, tokens: PackedTokens, ops: ModuleType) -> tuple[Tensor, dict[int, Tensor]]:
        """See `FamilyEncoder.run_packed`.

        Residuals are scaled and added by the matrix products that make them, or by the norm that follows these.
        """
        hidden, added = tokens.embeddings, None
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            attention, mlp, scale = layer.self_attn, layer.mlp, 1 / layer.scaling_factor
            # Layers may lie on several devices.
            (hidden,) = to_weight_device(layer.input_layernorm.weight, hidden)
            quantizes = isinstance(attention.q_proj, Float8Linear)
            hidden, normed = _add_norm(ops, hidden, added, layer.input_layernorm, quantizes=quantizes)
            if index in tokens.layers:
                states[index] = hidden
            qkv = _product(ops, normed, attention, (attention.q_proj, attention.k_proj, attention.v_proj))
            qkv = qkv.view(len(hidden), 3, -1, attention.head_dim)
            norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
            ops.norm_rotate_(qkv, *norms, *tokens.rotary.at(index, qkv.device), attention.scaling)
            hidden, added = _add_product(ops, hidden, tokens.attend(index, qkv), attention.o_proj, scale)
            quantizes = isinstance(mlp.gate_proj, Float8Linear)
            hidden, normed = _add_norm(ops, hidden, added, layer.post_attention_layernorm, quantizes=quantizes)
            gate_up = _product(ops, normed, mlp, (mlp.gate_proj, mlp.up_proj))
            quantizes = isinstance(mlp.down_proj, Float8Linear)
            activated = ops.quantize(gate_up, "swiglu") if quantizes else ops.swiglu(gate_up)
            hidden, added = _add_product(ops, hidden, activated, mlp.down_proj, scale)
        (hidden,) = to_weight_device(self.norm.weight, hidden)
        return _add_norm(ops, hidden, added, self.norm)[1], states

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sequence_id: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Run the model as `EsmcModel` does, and optionally write or extend a cache.

        Args:
            input_ids: token ids, int64 or int32 [batch, n].
            attention_mask: see `CachedModel.forward`.
            position_ids: see `CachedModel.forward`. Positions run on across chains.
            sequence_id: number of each token's chain, integers [batch, n], -1 for padding; tokens of different chains
                do not see each other. A cache keeps it. An extension is of one chain per row, given for the new tokens
                or with the past, [batch, past + n]; a context that was written without is chain 0. Without it, new
                tokens see all chains.
            past_key_values: see `CachedModel.forward`.
            use_cache: see `CachedModel.forward`.
            **kwargs: of `CachedModel.forward`.

        Raises:
            ValueError: `sequence_id` contradicts the mask or the cache, or there are `inputs_embeds`, which ESM-C does
                not take; see also `CachedModel.forward`.
        """
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("ESM-C embeds its tokens itself: give `input_ids`, not `inputs_embeds`")
        cached: dict[str, Any] = {"past_key_values": past_key_values, "use_cache": use_cache}
        if sequence_id is not None and input_ids is not None:
            shape = (input_ids.shape[0], input_ids.shape[1])
            if isinstance(past_key_values, TurboKVCache) and past_key_values.batch_size:
                past = past_key_values.get_seq_length()
                check_chains(sequence_id, [shape, (shape[0], past + shape[1])])
                index = contexts_of_rows(past_key_values, kwargs.get("context_index"), shape[0])
                attention_mask, new = mask_of_extension(past_key_values, sequence_id, attention_mask, shape[1], index)
                cached["chains"] = new
            else:
                check_chains(sequence_id, [shape])
                # Packed rows and captured prefills see all of their row.
                kwargs |= {"sequence_id": self._here(sequence_id), "row_lengths": None}
                if use_cache:
                    attention_mask = mask_of_chains(sequence_id, attention_mask)
                    cached["chains"] = sequence_id
        output: BaseModelOutputWithPast | tuple[Any, ...] = super().forward(
            input_ids, attention_mask, position_ids, **cached, **kwargs
        )
        return output


class TurboEsmcForMaskedLM(_EsmcCheckpoints, CachedMaskedLM, EsmcForMaskedLM):
    """`EsmcForMaskedLM` with a key/value cache; see `TurboEsmcModel`."""

    _keep_in_fp32_modules_strict = ("rotary_emb",)

    def __init__(self, config: EsmcConfig) -> None:
        self.check_config(config)
        # Skips EsmcForMaskedLM's own, which would build an EsmcModel.
        super(EsmcForMaskedLM, self).__init__(config)
        self.esmc = TurboEsmcModel(config)
        self.lm_head = EsmcMaskedLMHead(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sequence_id: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TurboMaskedLMOutput | tuple[Any, ...]:
        """Run the model as `EsmcForMaskedLM` does, and optionally with a cache: see `TurboEsmcModel.forward`."""
        return self.forward_with_head(
            EsmcForMaskedLM.forward,
            input_ids,
            attention_mask,
            position_ids,
            sequence_id,
            labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=return_dict,
            **kwargs,
        )
