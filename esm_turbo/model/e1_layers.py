"""The architecture of E1 (Profluent 2025), which transformers does not have, with the names of published weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedConfig

from esm_turbo.model.plan import ForwardPlan, LayerKind, PackedTokens, Scope
from esm_turbo.model.projections import stacked_weight
from esm_turbo.model.rotary import Float32Frequencies
from esm_turbo.model.spread import to_weight_device
from esm_turbo.ops.torch_ops import rotate

GLOBAL = LayerKind(Scope.PREFIX)
WITHIN = LayerKind(Scope.SEQUENCE, rotary=1, stored=False)


class TurboE1Config(PreTrainedConfig):
    """The fields of a published `config.json`; the defaults are those of E1 600M."""

    model_type = "E1"
    vocab_size: int = 34
    hidden_size: int = 1280
    intermediate_size: int = 3840
    num_hidden_layers: int = 30
    num_attention_heads: int = 20
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    gated_mlp: bool = True
    clip_qkv: float | int = 8
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    global_attention_every_n_layers: int = 3
    rope_theta_within_seq: float | int = 10000.0
    rope_theta_global: float | int = 500000.0
    max_num_sequences: int = 512
    max_num_positions_within_seq: int = 8192
    max_num_positions_global: int = 65536
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    mask_token_id: int = 5
    tie_word_embeddings: bool = False

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The attention of each layer."""
        every = self.global_attention_every_n_layers
        return tuple(WITHIN if (index + 1) % every else GLOBAL for index in range(self.num_hidden_layers))

    @property
    def num_cached_layers(self) -> int:
        """Number of layers whose keys and values caches store, see `Geometry`."""
        return self.layer_kinds.count(GLOBAL)


class E1RotaryEmbedding(Float32Frequencies, nn.Module):
    """Inverse frequencies of rotary positions, float32 [head_dim / 2]."""

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        self.theta, self.head_dim = theta, head_dim
        self.register_buffer("inv_freq", self.compute(), persistent=False)

    def compute(self) -> Tensor:
        """The frequencies, on the CPU."""
        with torch.device("cpu"):
            frequencies: Tensor = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        return frequencies


class E1Attention(nn.Module):
    """Self-attention whose projections are clamped before RoPE."""

    def __init__(self, config: TurboE1Config, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer_idx, self.clip = layer_idx, config.clip_qkv
        self.head_dim = size // config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor, plan: ForwardPlan) -> Tensor:
        """Attention of hidden states [batch, n, hidden_size] to what the plan lets the layer see."""
        query, keys, values = (
            project(hidden).clamp(-self.clip, self.clip).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, keys = rotate(query, keys, *plan.rotary.at(self.layer_idx, hidden.device), self.head_dim**-0.5)
        attended = plan.attend(self.layer_idx, query, keys, values)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class E1AttentionBlock(nn.Module):
    """Attention and its norms; the second is that of the MLP."""

    def __init__(self, config: TurboE1Config, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = E1Attention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class E1GatedMLP(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: TurboE1Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The MLP of hidden states [..., hidden_size]."""
        output: Tensor = self.w2(silu(self.w1(hidden)) * self.w3(hidden))
        return output


class E1Layer(nn.Module):
    """A transformer layer with norms before attention and MLP."""

    def __init__(self, config: TurboE1Config, layer_idx: int) -> None:
        super().__init__()
        self.norm_attn_norm = E1AttentionBlock(config, layer_idx)
        self.ffn = nn.ModuleDict({"mlp": E1GatedMLP(config)})

    def forward(self, hidden: Tensor, plan: ForwardPlan) -> Tensor:
        """Hidden states after the layer, [batch, n, hidden_size]."""
        block = self.norm_attn_norm
        hidden = hidden + block.self_attn(block.input_layernorm(hidden), plan)
        output: Tensor = hidden + self.ffn["mlp"](block.post_attention_layernorm(hidden))
        return output


def run_packed(
    layers: Any, last_norm: nn.RMSNorm, tokens: PackedTokens, ops: ModuleType
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run layers on packed tokens, with fused operations; see `FamilyEncoder.run_packed`.

    Args:
        layers: modules, an `E1Layer` each.
        last_norm: after them.
        tokens: of all rows.
        ops: `triton_encoder`, or another module with its operations.
    """
    blocks = [layer.norm_attn_norm for layer in layers]
    norms = [*(block.input_layernorm for block in blocks), last_norm]
    # Layers may lie on several devices.
    (hidden,) = to_weight_device(norms[0].weight, tokens.embeddings)
    residual, normed = ops.add_rms_norm(hidden, None, norms[0].weight, norms[0].eps)
    states: dict[int, Tensor] = {}
    for index, (layer, block, following) in enumerate(zip(layers, blocks, norms[1:], strict=True)):
        if index in tokens.layers:
            states[index] = residual
        attention, mlp, norm = block.self_attn, layer.ffn["mlp"], block.post_attention_layernorm
        weight = stacked_weight(attention, (attention.q_proj, attention.k_proj, attention.v_proj))
        qkv = linear(normed, weight).view(len(normed), 3, -1, attention.head_dim)
        ops.rotate_(qkv, *tokens.rotary.at(index, qkv.device), attention.head_dim**-0.5, attention.clip)
        delta = linear(tokens.attend(index, qkv), attention.o_proj.weight)
        residual, normed = ops.add_rms_norm(residual, delta, norm.weight, norm.eps)
        gate_up = linear(normed, stacked_weight(mlp, (mlp.w1, mlp.w3)))
        delta = linear(ops.swiglu(gate_up), mlp.w2.weight)
        residual, delta = to_weight_device(following.weight, residual, delta)
        residual, normed = ops.add_rms_norm(residual, delta, following.weight, following.eps)
    return normed, states
