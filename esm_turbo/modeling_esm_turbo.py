"""ESM-2 as in Hugging Face Transformers, with a key/value cache.

Without a cache every computation is Hugging Face's own code. With one, the self-attention rotates its queries and keys
(RoPE) and passes them and the values to a session (model/sessions.py), which encodes them (prefill) or attends to a
cache (extension). The rotations of stored keys are those of their codec (codecs/base.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import EsmConfig, EsmForMaskedLM, EsmModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm import modeling_esm
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
)

from esm_turbo.files.families import FAMILIES
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cached_model import CachedModel
from esm_turbo.model.checkpoints import CheckpointMixin, PicklableHooksMixin
from esm_turbo.model.heads import UntrainedHeadWarning, untrained
from esm_turbo.model.inputs import check_not_all_masked
from esm_turbo.model.masked_lm import CachedMaskedLM, TurboMaskedLMOutput
from esm_turbo.model.packed_encoder import packed_encoder
from esm_turbo.model.plain import check_attention, check_unhooked
from esm_turbo.model.plan import ForwardPlan, PackedTokens
from esm_turbo.model.rotary import Float32Frequencies
from esm_turbo.model.sessions import Extension, KVSession, attend_by
from esm_turbo.ops.float8 import Float8Linear

_INV_FREQ = "rotary_embeddings.inv_freq"
# transformers 5 saves one key for all layers, with an asterisk for the layer's number.
_PUBLISHED_INV_FREQ = r"encoder\.layer\.(?:\d+|\*)\.attention\.self\.rotary_embeddings\.inv_freq"
# Fraction of residues masked in ESM-2's training (Lin et al. 2023), for which token dropout corrects.
_TRAINED_MASK_RATIO = 0.15 * 0.8


class TurboEsmSelfAttention(PicklableHooksMixin, EsmSelfAttention):
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
        if kv_session.runs_library:
            check_attention(EsmSelfAttention)
        projected = (self.query(hidden_states), self.key(hidden_states), self.value(hidden_states))
        heads = (-1, self.attention_head_size)
        query, keys, values = (x.unflatten(-1, heads).transpose(1, 2) for x in projected)  # [batch, heads, n, head_dim]
        scale = self.attention_head_size**-0.5
        if isinstance(kv_session, Extension) and not kv_session.runs_library:
            query, keys = kv_session.rotate(query, keys, *position_embeddings, scale)
        else:
            query, keys = modeling_esm.apply_rotary_pos_emb(query * scale, keys, *position_embeddings)
        weights = None
        query, keys = query.to(values.dtype), keys.to(values.dtype)
        output = attend_by(kv_session, self.layer_idx, query, keys, values)
        if output is not None:
            output = output.transpose(1, 2)
        else:
            attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, modeling_esm.eager_attention_forward
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


class TurboEsmLayer(PicklableHooksMixin, EsmLayer):
    """Transformer layer that lets a session compute the activation."""

    def forward(self, hidden_states: Tensor, *args: Any, kv_session: KVSession | None = None, **kwargs: Any) -> Tensor:
        output: Tensor
        # Another library's may be there since before the first call.
        if kv_session is None or kv_session.runs_library or type(self.intermediate) is not EsmIntermediate:
            output = super().forward(hidden_states, *args, kv_session=kv_session, **kwargs)
            return output
        hidden_states = self.attention(hidden_states, *args, kv_session=kv_session, **kwargs)
        activated = kv_session.gelu(self.intermediate.dense(self.LayerNorm(hidden_states)))
        output = self.output(activated, hidden_states)
        return output


class TurboEsmRotaryEmbedding(Float32Frequencies, EsmRotaryEmbedding):
    """Rotary embedding whose frequencies stay in float32 whatever the model is cast to."""


class _AttentionWeights(KVSession):
    """Records the attention weights of every layer, under any attention implementation."""

    def __init__(self, attention_mask: Tensor) -> None:
        self.hidden = attention_mask[:, None, None, :] == 0
        self.weights: list[Tensor] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        # The layers of a model may lie on several devices.
        scores = (query @ keys.transpose(2, 3)).to(self.hidden.device)
        scores = scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min)
        self.weights.append(scores.softmax(dim=-1))


class _Esm2Checkpoints(CheckpointMixin):
    """Fields and checks of ESM-2's checkpoints."""

    family = FAMILIES["esm"]
    deciding_fields: ClassVar[dict[str, tuple[type, ...]]] = {
        "token_dropout": (bool,),
        "emb_layer_norm_before": (bool,),
        "layer_norm_eps": (float,),
        "mask_token_id": (int,),
        "pad_token_id": (int,),
        "vocab_size": (int,),
        "hidden_size": (int,),
        "num_hidden_layers": (int,),
        "num_attention_heads": (int,),
        "intermediate_size": (int,),
    }
    key_mapping: ClassVar[dict[str, str]] = {_PUBLISHED_INV_FREQ: _INV_FREQ}

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any], source: object) -> None:
        """See `CheckpointMixin.check_fields`."""
        positions = fields.get("position_embedding_type", "absolute")
        if positions != "rotary":
            raise ValueError(f"{source}: not ESM-2 but an ESM model with {positions} positions (ESM-1?)")

    @classmethod
    def check_config(cls, config: EsmConfig) -> None:
        """See `CheckpointMixin.check_config`."""
        super().check_config(config)
        if config.position_embedding_type != "rotary" or config.is_decoder is not False or config.is_folding_model:
            raise ValueError("TurboEsm needs an ESM-2 encoder: rotary positions, no decoder, no folding trunk")

    def state_to_save(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the rotary frequencies, in float32, under the published keys."""
        for name in [name for name in state if name.endswith(_INV_FREQ)]:
            prefix, inv_freq = name.removesuffix(_INV_FREQ), state.pop(name)
            for index in range(self.config.num_hidden_layers):
                state[f"{prefix}encoder.layer.{index}.attention.self.{_INV_FREQ}"] = inv_freq.clone()
        return state


class TurboEsmModel(_Esm2Checkpoints, CachedModel, EsmModel):
    """`EsmModel` with a key/value cache, see `CachedModel`."""

    _keep_in_fp32_modules_strict = ("rotary_embeddings",)
    _no_split_modules = ("TurboEsmLayer", "EsmEmbeddings")
    packed_operations = frozenset({"add_layer_norm", "gelu_", "linear", "rotate_"})
    activates_by_session = True
    plain_modules = frozenset(
        {
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
            Float8Linear,
            nn.Linear,
            nn.LayerNorm,
            nn.ModuleList,
            nn.Dropout,
        }
    )

    def __init__(self, config: EsmConfig, add_pooling_layer: bool = True) -> None:
        self.check_config(config)
        super().__init__(config, add_pooling_layer)
        for index, layer in enumerate(self.encoder.layer):
            # Only the class changes: the parameters and their initialisation stay Hugging Face's.
            layer.__class__ = TurboEsmLayer
            layer.attention.self.__class__ = TurboEsmSelfAttention
            layer.attention.self.layer_idx = index
        self.rotary_embeddings.__class__ = TurboEsmRotaryEmbedding
        self.prepare_turbo()

    @classmethod
    def options_of(cls, model: EsmModel) -> dict[str, Any]:
        """See `CheckpointMixin.options_of`."""
        return {"add_pooling_layer": model.pooler is not None}

    @property
    def special_ids(self) -> tuple[int, int]:
        """Ids of `<cls>` and `<eos>`; ESM-2's configurations do not name `<cls>`, which is its vocabulary's first."""
        return (0, 2 if self.config.eos_token_id is None else self.config.eos_token_id)

    @property
    def packs(self) -> bool:
        """See `FamilyEncoder.packs`."""
        return True

    @property
    def token_dropout(self) -> bool:
        """See `FamilyEncoder.token_dropout`."""
        return bool(self.embeddings.token_dropout)

    @property
    def mask_token_id(self) -> int:
        """See `FamilyEncoder.mask_token_id`; the library reads the configuration once."""
        token: int = self.embeddings.mask_token_id
        return token

    @property
    def rotary_frequencies(self) -> Tensor:
        """See `FamilyEncoder.rotary_frequencies`."""
        frequencies: Tensor = self.rotary_embeddings.inv_freq
        return frequencies

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """See `FamilyEncoder.parts`."""
        return self.embeddings, self.encoder, self.rotary_embeddings

    @property
    def products(self) -> list[dict[str, tuple[nn.Module, ...]]]:
        """See `FamilyEncoder.products`."""
        return [
            {
                "qkv": (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value),
                "attention_out": (layer.attention.output.dense,),
                "mlp_in": (layer.intermediate.dense,),
                "mlp_out": (layer.output.dense,),
            }
            for layer in self.encoder.layer
        ]

    def embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
        """Embeddings as in Hugging Face, with token dropout scaled by the counts of the whole input."""
        embeddings: Tensor
        if counts is None:
            embeddings = self.embeddings(input_ids=input_ids, attention_mask=mask)
            return embeddings
        # Not the parts of what PEFT's `modules_to_save` puts there, which are not what it calls.
        if not isinstance(self.embeddings, EsmEmbeddings):
            raise ValueError(
                f"the embeddings are a {type(self.embeddings).__name__}, and new tokens are embedded by the parts of"
                " EsmEmbeddings: merge the adapter (`merge_and_unload`)"
            )
        if self.embeddings.position_embedding_type == "absolute":
            raise ValueError("the embeddings have absolute positions, which contexts do not: use rotary ones alone")
        check_unhooked(self.embeddings, "new tokens are embedded by its parts")
        embeddings = self.embeddings.word_embeddings(input_ids)
        if self.token_dropout:
            check_not_all_masked(counts)
            tokens, masks = (count.to(input_ids.device) for count in counts)
            scale = (1 - _TRAINED_MASK_RATIO) / (1 - masks.float() / tokens)
            embeddings = embeddings.masked_fill((input_ids == self.mask_token_id)[..., None], 0.0)
            embeddings = (embeddings * scale[:, None, None]).to(embeddings.dtype)
        if self.embeddings.layer_norm is not None:
            embeddings = self.embeddings.layer_norm(embeddings)
        return embeddings * mask[..., None].to(embeddings.dtype)

    def library_forward(self, plan: ForwardPlan) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """See `FamilyEncoder.library_forward`."""
        input_ids = plan.input_ids if plan.embeddings is None else None
        output: BaseModelOutputWithPoolingAndCrossAttentions = EsmModel.forward(
            self, input_ids, plan.attention_mask, plan.positions, plan.embeddings, **plan.library_options
        )
        return output

    def output(self, last: Tensor, states: tuple[Tensor, ...] | None) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """See `FamilyEncoder.output`."""
        pooled = None if self.pooler is None else self.pooler(last)
        return BaseModelOutputWithPoolingAndCrossAttentions(last, pooled, hidden_states=states)

    def run_packed(self, tokens: PackedTokens, ops: ModuleType) -> tuple[Tensor, dict[int, Tensor]]:
        """See `FamilyEncoder.run_packed`."""
        return packed_encoder(self.encoder, tokens, ops)

    @property
    def capturable(self) -> bool:
        """See `FamilyEncoder.capturable`."""
        return self.pooler is None

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Predict contacts as `EsmModel` does, under any attention implementation.

        Warns with `UntrainedHeadWarning` if the head was never trained.

        Raises:
            ValueError: the model's attention was changed, see `Executor.check_attention`, or as of `check_unhooked`.
        """
        if problem := untrained(self, "contact_head"):
            warnings.warn(problem, UntrainedHeadWarning, stacklevel=2)
        self.executor.check_attention()
        check_unhooked(self, "contacts call its layers and its contact head")
        session = _AttentionWeights(attention_mask)
        EsmModel.forward(self, tokens, attention_mask, return_dict=True, kv_session=session)
        attentions = torch.stack(session.weights, dim=1)
        attentions = attentions * attention_mask[:, None, None, None, :] * attention_mask[:, None, None, :, None]
        contacts: Tensor = self.contact_head(tokens, attentions)
        return contacts


class TurboEsmForMaskedLM(_Esm2Checkpoints, CachedMaskedLM, EsmForMaskedLM):
    """`EsmForMaskedLM` with a key/value cache; see `TurboEsmModel`."""

    _keep_in_fp32_modules_strict = ("rotary_embeddings",)

    def __init__(self, config: EsmConfig) -> None:
        self.check_config(config)
        # Skips EsmForMaskedLM's own, which would build an EsmModel.
        super(EsmForMaskedLM, self).__init__(config)
        self.esm = TurboEsmModel(config, add_pooling_layer=False)
        self.lm_head = EsmLMHead(config)
        self.post_init()

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
        return self.forward_with_head(
            EsmForMaskedLM.forward,
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            labels=labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=return_dict,
            **kwargs,
        )
