"""E1 (Profluent 2025), with a key/value cache whose contexts are exact.

E1 reads several sequences, homologs and then a query: a sequence sees itself and those before it, never those after.
Every few layers are global, with positions over all sequences; the others attend within a sequence. Only the global
layers read homologs, so that caches hold their keys and values alone, and a query after a cached context gives what the
whole would.

transformers does not have E1: `model/e1_layers.py` has its architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, MaskedLMOutput

from esm_turbo.files.families import FAMILIES
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cached_model import CachedModel
from esm_turbo.model.chains import check_chains
from esm_turbo.model.checkpoints import CheckpointMixin
from esm_turbo.model.e1_layers import (
    GLOBAL,
    E1Attention,
    E1AttentionBlock,
    E1GatedMLP,
    E1Layer,
    E1RotaryEmbedding,
    TurboE1Config,
    run_packed,
)
from esm_turbo.model.inputs import check_inputs, on_host
from esm_turbo.model.masked_lm import CachedMaskedLM, TurboMaskedLMOutput
from esm_turbo.model.plan import ForwardPlan, LayerKind, PackedTokens
from esm_turbo.model.sequences import number_sequences
from esm_turbo.model.spread import to_weight_device
from esm_turbo.proteins.homologs import ContextLimits


class _E1Checkpoints(CheckpointMixin):
    """Fields and checks of E1's checkpoints."""

    family = FAMILIES["E1"]
    config_class = TurboE1Config
    base_model_prefix = "model"
    # Without it transformers would say "eager", for which nothing is packed.
    _supports_sdpa = True
    deciding_fields: ClassVar[dict[str, tuple[type, ...]]] = {
        "vocab_size": (int,),
        "hidden_size": (int,),
        "num_hidden_layers": (int,),
        "num_attention_heads": (int,),
        "intermediate_size": (int,),
        "global_attention_every_n_layers": (int,),
        "clip_qkv": (int, float),
        "rope_theta_within_seq": (int, float),
        "rope_theta_global": (int, float),
        "rms_norm_eps": (float,),
    }

    @classmethod
    def check_config(cls, config: TurboE1Config) -> None:
        """See `CheckpointMixin.check_config`."""
        super().check_config(config)
        heads, shared, every = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.global_attention_every_n_layers,
        )
        if shared not in (None, heads):
            raise ValueError(f"{heads} heads share {shared} of keys and values; the published E1 have as many of each")
        if config.hidden_size % heads:
            raise ValueError(f"hidden_size {config.hidden_size} is not a multiple of {heads} heads")
        if not 1 <= every <= config.num_hidden_layers:
            raise ValueError(
                f"`global_attention_every_n_layers` must be 1 to {config.num_hidden_layers}, got {every}: without a"
                " global layer no homolog is read"
            )
        if not config.gated_mlp or config.hidden_act != "silu":
            raise ValueError(
                f"the MLP of E1 must be gated by silu, got gated_mlp {config.gated_mlp}, {config.hidden_act!r}"
            )

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, E1RotaryEmbedding):
            init.copy_(module.inv_freq, module.compute())


class TurboE1Model(_E1Checkpoints, CachedModel, PreTrainedModel):
    """The encoder of E1, see `CachedModel`."""

    # Rows and contexts are so long that a device is never waiting for the host.
    capturable = False
    packs = True
    packed_operations = frozenset({"add_rms_norm", "rotate_", "swiglu"})
    options = frozenset({"output_hidden_states", "kv_session", "frozen_query"})
    _no_split_modules = ("E1Layer",)
    plain_modules = frozenset(
        {nn.Embedding, E1RotaryEmbedding, E1Layer, E1AttentionBlock, E1Attention, E1GatedMLP, nn.RMSNorm, nn.Linear}
        | {nn.ModuleList, nn.ModuleDict}
    )

    def __init__(self, config: TurboE1Config) -> None:
        self.check_config(config)
        super().__init__(config)
        head_dim = config.hidden_size // config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_seq_id = nn.Embedding(config.max_num_sequences, config.hidden_size)
        self.layers = nn.ModuleList(E1Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_global = E1RotaryEmbedding(config.rope_theta_global, head_dim)
        self.exact_contexts = ContextLimits(
            config.max_num_sequences, config.max_num_positions_within_seq, config.max_num_positions_global
        )
        self.rotary_within = E1RotaryEmbedding(config.rope_theta_within_seq, head_dim)
        self.prepare_turbo()
        self.post_init()

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        """See `FamilyEncoder.layer_kinds`."""
        kinds: Sequence[LayerKind] = self.config.layer_kinds
        return kinds

    def frequencies(self, kind: LayerKind) -> Tensor:
        """See `FamilyEncoder.frequencies`."""
        frequencies: Tensor = (self.rotary_within if kind.rotary else self.rotary_global).inv_freq
        return frequencies

    @property
    def rotary_frequencies(self) -> Tensor:
        """See `FamilyEncoder.rotary_frequencies`: those of the layers that are stored."""
        return self.frequencies(GLOBAL)

    @property
    def special_ids(self) -> tuple[int, int]:
        """See `FamilyEncoder.special_ids`."""
        return self.config.bos_token_id, self.config.eos_token_id

    @property
    def protected_ids(self) -> tuple[int, ...]:
        """See `FamilyEncoder.protected_ids`: none, as every homolog of a context has its own."""
        return ()

    @property
    def parts(self) -> Sequence[nn.Module]:
        """See `FamilyEncoder.parts`."""
        return self.embed_tokens, self.embed_seq_id, self.layers, self.norm, self.rotary_global, self.rotary_within

    def embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
        """See `FamilyEncoder.embed`."""
        embeddings: Tensor = self.embed_tokens(input_ids)
        return embeddings

    def embed_sequences(self, embeddings: Tensor, chains: Tensor | None) -> Tensor:
        """See `FamilyEncoder.embed_sequences`."""
        if chains is None:
            # By the module, which may have hooks or adapters.
            chains = embeddings.new_zeros((1,) * (embeddings.dim() - 1), dtype=torch.int64)
        numbered: Tensor = embeddings + self.embed_seq_id(chains.clamp_min(0))
        return numbered

    def library_forward(self, plan: ForwardPlan) -> BaseModelOutputWithPast:
        """See `FamilyEncoder.library_forward`."""
        hidden = plan.embeddings
        if hidden is None:
            assert plan.input_ids is not None
            hidden = self.embed_sequences(self.embed_tokens(plan.input_ids), plan.chains)
        states = []
        layer: Any
        for layer in self.layers:
            states.append(hidden)
            # Layers may lie on several devices.
            (hidden,) = to_weight_device(layer.norm_attn_norm.input_layernorm.weight, hidden)
            hidden = layer(hidden, plan)
        (hidden,) = to_weight_device(self.norm.weight, hidden)
        hidden = self.norm(hidden)
        return self.output(hidden, (*states, hidden) if plan.options.get("output_hidden_states") else None)

    def run_packed(self, tokens: PackedTokens, ops: ModuleType) -> tuple[Tensor, dict[int, Tensor]]:
        """See `FamilyEncoder.run_packed`."""
        return run_packed(self.layers, self.norm, tokens, ops)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sequence_id: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Run the model, and optionally write or extend a cache.

        Args:
            input_ids: token ids, int64 or int32 [batch, n]; every sequence begins with `<bos>`.
            attention_mask: zeros and ones, see `CachedModel.forward`.
            position_ids: global positions, [batch, n] or [1, n]; by default 0, 1, 2, ... or each row's next ones.
            sequence_id: number of each token's sequence, integers [batch, n] that never fall along a row, -1 for
                padding, which `attention_mask` may hide as well; by default counted by `<bos>`. Where it or `input_ids`
                lies on a device, it is waited for. Only without a context: new tokens are the sequence after its last.
            past_key_values: see `CachedModel.forward`.
            **kwargs: of `CachedModel.forward`, and `output_hidden_states`.

        Raises:
            ValueError: new tokens after a context are of several sequences or have a `sequence_id`, it is of another
                shape, no integers, falls or is too large, rows of several sequences have padding before or between
                them, or there are `inputs_embeds`; see also `CachedModel.forward`.
            TypeError: there are other arguments, such as `output_attentions`.
        """
        if "chains" in kwargs:
            raise TypeError("the forward of E1 takes no 'chains': give `sequence_id`")
        extends = isinstance(past_key_values, TurboKVCache) and past_key_values.batch_size > 0
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("E1 numbers sequences by their tokens: give `input_ids`, not `inputs_embeds`")
        check_inputs(input_ids, attention_mask, position_ids, self.config.vocab_size, extends=extends)
        if sequence_id is not None:
            if extends:
                raise ValueError(
                    "new tokens after a context are the sequence after its last: give no `sequence_id`, and an"
                    " `attention_mask` where they are padded"
                )
            check_chains(sequence_id, [(input_ids.shape[0], input_ids.shape[1])])
            sequence_id = sequence_id.cpu().long()
        # A caller that captures a graph of extensions cannot wait.
        ids, mask = on_host(input_ids) if extends else input_ids.cpu(), None
        if attention_mask is not None and attention_mask.shape == input_ids.shape and ids is not None:
            mask = attention_mask.cpu() != 0
        if sequence_id is None and ids is not None:
            begins = ids[:, 1:] == self.config.bos_token_id
            if bool((begins if mask is None else begins & mask[:, 1:]).any()):
                if extends:
                    raise ValueError(
                        "new tokens after a context must be one sequence per row: `<bos>` occurs within them"
                    )
                sequence_id = number_sequences(ids, self.config.bos_token_id)
        if sequence_id is not None:
            if mask is not None:
                sequence_id = torch.where(mask, sequence_id, -1)
            real, limit = sequence_id >= 0, self.config.max_num_sequences
            attention_mask = real.long()
            falls = sequence_id.where(real, limit).diff(dim=1) < 0
            if not bool((sequence_id > 0).any()):
                sequence_id = None
            elif bool(falls.any() | (sequence_id >= limit).any()):
                raise ValueError(
                    f"rows of several sequences must begin with `<bos>`, be numbered upwards from 0 to {limit - 1},"
                    " and be padded on the right and nowhere else"
                )
        kwargs["chains"] = sequence_id
        output: BaseModelOutputWithPast | tuple[Any, ...] = super().forward(
            input_ids, attention_mask, position_ids, past_key_values=past_key_values, **kwargs
        )
        return output


class TurboE1ForMaskedLM(_E1Checkpoints, CachedMaskedLM, PreTrainedModel):
    """E1 with its language-model head; see `TurboE1Model`."""

    # Otherwise the Trainer of transformers would leave the mean over accumulated batches to the loss.
    accepts_loss_kwargs = False

    def __init__(self, config: TurboE1Config) -> None:
        self.check_config(config)
        super().__init__(config)
        size = config.hidden_size
        self.model = TurboE1Model(config)
        self.mlm_head = nn.Sequential(
            nn.Linear(size, size),
            nn.GELU(),
            nn.LayerNorm(size, eps=config.rms_norm_eps),
            nn.Linear(size, config.vocab_size),
        )
        self.post_init()

    @property
    def lm_head(self) -> nn.Module:
        """The head by the name that other families have for it."""
        return self.mlm_head

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
        """Run the model as `TurboE1Model` does, with the logits [batch, n, vocab_size] of every token.

        Args:
            input_ids: see `TurboE1Model.forward`, and so are all but `labels`.
            attention_mask: likewise.
            position_ids: likewise.
            sequence_id: likewise.
            labels: token ids to be predicted, -100 where there are none, [batch, n].
            past_key_values: see `CachedModel.forward`.
            use_cache: likewise.
            return_dict: likewise.
            **kwargs: likewise.
        """
        return self.forward_with_head(
            TurboE1ForMaskedLM._with_logits,
            input_ids,
            attention_mask,
            position_ids,
            sequence_id,
            labels=labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=return_dict,
            **kwargs,
        )

    def _with_logits(self, *args: Any, labels: Tensor | None, **kwargs: Any) -> MaskedLMOutput:
        output = self.model(*args, **kwargs)
        logits = self.mlm_head(output.last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().to(logits.device))
        return MaskedLMOutput(loss, logits, output.hidden_states)
