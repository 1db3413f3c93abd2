"""ESM-2 with frozen contexts, computed from the tensors of a checkpoint alone.

An independent reference for the package's extensions: plain PyTorch functions without esm_turbo or transformers, one
protein at a time, in float64, following the definitions in Lin et al. 2023 and docs/math.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

MASK = 32


@dataclass(frozen=True)
class FrozenRun:
    """Results of one run.

    Attributes:
        hidden_states: inputs of all layers, then the output of the last after its norm, [n, hidden] each.
        logits: logits of the language-model head, [n, vocabulary].
        kv: keys after RoPE and values of every layer, [heads, n, head_dim] each.
    """

    hidden_states: list[Tensor]
    logits: Tensor
    kv: list[tuple[Tensor, Tensor]]


class FrozenEsm2:
    """Model read from a folder with `config.json` and `model.safetensors`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.num_layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["layer_norm_eps"]
        # Older checkpoints name the parameters of a layer norm gamma and beta.
        newer = {"gamma": "weight", "beta": "bias"}
        self.weights: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stem, _, last = name.rpartition(".")
            self.weights[f"{stem}.{newer.get(last, last)}"] = tensor.double()

    def run(
        self,
        ids: list[int],
        positions: list[int],
        *,
        total_tokens: int,
        total_masks: int,
        past: list[tuple[Tensor, Tensor]] | None = None,
    ) -> FrozenRun:
        """Run tokens that see each other and the frozen keys and values of a past.

        Args:
            ids: ids of the new tokens.
            positions: positions of the new tokens.
            total_tokens: number of visible tokens, past and new, for token dropout.
            total_masks: number of masks among them.
            past: visible keys (after RoPE) and values of every layer, [heads, columns, head_dim] each.
        """
        token_ids = torch.tensor(ids)
        x = self.weights["esm.embeddings.word_embeddings.weight"][token_ids]
        x = torch.where((token_ids == MASK)[:, None], 0.0, x)
        x = x * (1 - 0.15 * 0.8) / (1 - total_masks / total_tokens)
        hidden_states, kv = [x], []
        for layer in range(self.num_layers):
            prefix = f"esm.encoder.layer.{layer}"
            normed = self._norm(f"{prefix}.attention.LayerNorm", x)
            projected = (self._linear(f"{prefix}.attention.self.{name}", normed) for name in ("query", "key", "value"))
            query, keys, values = (self._heads(x) for x in projected)
            query, keys = self._rotate(layer, query, positions), self._rotate(layer, keys, positions)
            kv.append((keys, values))
            if past is not None:
                keys = torch.cat([past[layer][0], keys], dim=1)
                values = torch.cat([past[layer][1], values], dim=1)
            scores = query @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])
            mixed = (scores.softmax(dim=-1) @ values).transpose(0, 1).flatten(1)
            x = x + self._linear(f"{prefix}.attention.output.dense", mixed)
            inner = self._linear(f"{prefix}.intermediate.dense", self._norm(f"{prefix}.LayerNorm", x))
            x = x + self._linear(f"{prefix}.output.dense", _gelu(inner))
            hidden_states.append(x)
        hidden_states[-1] = self._norm("esm.encoder.emb_layer_norm_after", x)
        head = self._norm("lm_head.layer_norm", _gelu(self._linear("lm_head.dense", hidden_states[-1])))
        # The decoder is tied to the embeddings.
        logits = head @ self.weights["esm.embeddings.word_embeddings.weight"].T + self.weights["lm_head.bias"]
        return FrozenRun(hidden_states, logits, kv)

    def context(self, ids: list[int], total_tokens: int | None = None, total_masks: int | None = None) -> FrozenRun:
        """Run a context on its own, at positions 0, 1, 2, ..."""
        return self.run(
            ids,
            list(range(len(ids))),
            total_tokens=len(ids) if total_tokens is None else total_tokens,
            total_masks=ids.count(MASK) if total_masks is None else total_masks,
        )

    def extend(
        self,
        context_ids: list[int],
        context: FrozenRun,
        new_ids: list[int],
        *,
        positions: list[int] | None = None,
        hidden: tuple[int, ...] = (),
    ) -> FrozenRun:
        """Run new tokens that see a frozen context except for its columns `hidden`."""
        seen = [column for column in range(len(context_ids)) if column not in hidden]
        ids = [context_ids[column] for column in seen] + new_ids
        return self.run(
            new_ids,
            positions or list(range(len(context_ids), len(context_ids) + len(new_ids))),
            total_tokens=len(ids),
            total_masks=ids.count(MASK),
            past=[(keys[:, seen], values[:, seen]) for keys, values in context.kv],
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.eps)
        return centred * scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1).transpose(0, 1)

    def _rotate(self, layer: int, x: Tensor, positions: list[int]) -> Tensor:
        """Rotate component pairs (i, i + head_dim / 2) by position times frequency i."""
        frequencies = self.weights[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"]
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))
