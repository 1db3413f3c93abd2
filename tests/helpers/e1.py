"""E1 written out plainly from its weights, with a mask of all pairs of tokens, and small random models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from esm_turbo.modeling_e1_turbo import TurboE1Config, TurboE1ForMaskedLM

BOS, EOS, MASK, BEGIN, END = 1, 2, 5, 6, 7


def make_e1(
    *, head_dim: int = 16, heads: int = 4, layers: int = 3, seed: int = 0, **config: object
) -> TurboE1ForMaskedLM:
    """A random model in float32 whose logits depend on every token."""
    sizes = {
        "hidden_size": head_dim * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
    }
    model = TurboE1ForMaskedLM(TurboE1Config(**(sizes | config))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "norm.weight" in name or name == "mlm_head.2.weight":
                parameter.mul_(0.1).add_(1.0)
            elif parameter.dim() == 1:
                parameter.mul_(0.1)
            elif "embed" not in name:
                parameter.mul_(1.2 * parameter.shape[1] ** -0.5)
    return model


def random_row(lengths: list[int], seed: int = 0) -> Tensor:
    """Ids of sequences of so many residues, one after the other, int64 [1, n]."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(8, 34, (length,), generator=generator) for length in lengths]
    return torch.cat([torch.tensor([BOS, BEGIN, *part.tolist(), END, EOS]) for part in parts])[None]


@torch.no_grad()
def plain_forward(config: TurboE1Config, weights: Mapping[str, Tensor], input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states and logits of one row of ids [n], [n, hidden_size] and [n, vocab_size]."""
    sequence = (input_ids == BOS).cumsum(0) - 1
    position = torch.arange(len(input_ids))
    first = torch.stack([position[sequence == number].min() for number in sequence])
    x = weights["model.embed_tokens.weight"][input_ids] + weights["model.embed_seq_id.weight"][sequence]
    head_dim = config.hidden_size // config.num_attention_heads
    for index in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(p): w for name, w in weights.items() if name.startswith(p := f"model.layers.{index}.")
        }
        is_global = index % config.global_attention_every_n_layers == config.global_attention_every_n_layers - 1
        normed = _rms_norm(x, layer["norm_attn_norm.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (normed @ layer[f"norm_attn_norm.self_attn.{name}_proj.weight"].T)
            .clamp(-config.clip_qkv, config.clip_qkv)
            .view(len(x), -1, head_dim)
            for name in "qkv"
        )
        theta = config.rope_theta_global if is_global else config.rope_theta_within_seq
        counted = position if is_global else position - first
        q, k = _rope(q, counted, theta), _rope(k, counted, theta)
        scores = torch.einsum("ihd,jhd->hij", q, k) / head_dim**0.5
        seen = sequence[:, None] >= sequence if is_global else sequence[:, None] == sequence
        attended = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        x = x + attended @ layer["norm_attn_norm.self_attn.o_proj.weight"].T
        normed = _rms_norm(x, layer["norm_attn_norm.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (normed @ layer[f"ffn.mlp.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (F.silu(gate) * up) @ layer["ffn.mlp.w2.weight"].T
    x = _rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = {name.removeprefix("mlm_head."): w for name, w in weights.items() if name.startswith("mlm_head.")}
    y = F.gelu(x @ head["0.weight"].T + head["0.bias"])
    y = F.layer_norm(y, y.shape[-1:], head["2.weight"], head["2.bias"], config.rms_norm_eps)
    return x, y @ head["3.weight"].T + head["3.bias"]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Pairs of components i and i + head_dim / 2 as complex numbers, turned by position / theta^(2i / head_dim)."""
    half = x.shape[-1] // 2
    angle = position[:, None, None] / theta ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)
