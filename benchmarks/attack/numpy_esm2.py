"""ESM-2 with frozen contexts in NumPy and float64, from a checkpoint alone; independent of esm_turbo and transformers.

One row at a time. Definitions: Lin et al. 2023, docs/math.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from scipy.special import erf, softmax

Array = NDArray[np.float64]
MASK = 32


@dataclass(frozen=True)
class Run:
    """Results for n tokens.

    Attributes:
        logits: [n, vocabulary].
        keys: after RoPE, [layers, heads, n, head_dim].
        values: likewise.
    """

    logits: Array
    keys: Array
    values: Array


class NumpyEsm2:
    """A model read from a folder with `config.json` and `model.safetensors`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.num_layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["layer_norm_eps"]
        # Older checkpoints name the parameters of a layer norm gamma and beta.
        newer = {"gamma": "weight", "beta": "bias"}
        self.weights: dict[str, Array] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stem, _, last = name.rpartition(".")
            self.weights[f"{stem}.{newer.get(last, last)}"] = tensor.double().numpy()

    def run(
        self,
        ids: list[int],
        positions: list[int],
        seen: tuple[Array, Array] | None = None,
        *,
        visible: list[bool] | None = None,
        total_tokens: int | None = None,
        total_masks: int | None = None,
    ) -> Run:
        """Run tokens that see each other and a frozen context.

        Args:
            ids: of the tokens.
            positions: of the tokens.
            seen: keys after RoPE and values of the context's visible tokens, [layers, heads, columns, head_dim] each.
            visible: which of the tokens are seen; None for all.
            total_tokens: visible tokens, context and new, for token dropout; None for the tokens alone.
            total_masks: masks among them.
        """
        shown = np.ones(len(ids), dtype=bool) if visible is None else np.array(visible)
        tokens = len(ids) if total_tokens is None else total_tokens
        masks = ids.count(MASK) if total_masks is None else total_masks
        x = self.weights["esm.embeddings.word_embeddings.weight"][ids]
        x = np.where((np.array(ids) == MASK)[:, None], 0.0, x) * (1 - 0.15 * 0.8) / (1 - masks / tokens)
        x = x * shown[:, None]
        all_keys, all_values = [], []
        for layer in range(self.num_layers):
            prefix = f"esm.encoder.layer.{layer}"
            normed = self._norm(f"{prefix}.attention.LayerNorm", x)
            query, keys, values = (
                self._linear(f"{prefix}.attention.self.{name}", normed).reshape(len(ids), self.heads, -1).swapaxes(0, 1)
                for name in ("query", "key", "value")
            )
            query, keys = self._rotated(layer, query, positions), self._rotated(layer, keys, positions)
            all_keys.append(keys)
            all_values.append(values)
            keys, values = keys[:, shown], values[:, shown]
            if seen is not None:
                keys = np.concatenate([seen[0][layer], keys], axis=1)
                values = np.concatenate([seen[1][layer], values], axis=1)
            weights = softmax(query @ keys.swapaxes(1, 2) / np.sqrt(query.shape[-1]), axis=-1)
            mixed = (weights @ values).swapaxes(0, 1).reshape(len(ids), -1)
            x = x + self._linear(f"{prefix}.attention.output.dense", mixed)
            inner = _gelu(self._linear(f"{prefix}.intermediate.dense", self._norm(f"{prefix}.LayerNorm", x)))
            x = x + self._linear(f"{prefix}.output.dense", inner)
        x = self._norm("esm.encoder.emb_layer_norm_after", x)
        head = self._norm("lm_head.layer_norm", _gelu(self._linear("lm_head.dense", x)))
        logits = head @ self.weights["esm.embeddings.word_embeddings.weight"].T + self.weights["lm_head.bias"]
        return Run(logits, np.stack(all_keys), np.stack(all_values))

    def _norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + self.eps)
        return np.asarray(centred * scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def _linear(self, name: str, x: Array) -> Array:
        return np.asarray(x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"])

    def _rotated(self, layer: int, x: Array, positions: list[int]) -> Array:
        """Component pairs (i, i + head_dim / 2) rotated by position times frequency i (RoPE, Su et al. 2021)."""
        half = x.shape[-1] // 2
        frequencies = 10000.0 ** (-np.arange(half) / half)
        angles = np.array(positions, dtype=np.float64)[:, None] * frequencies
        low, high = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _gelu(x: Array) -> Array:
    return np.asarray(x / 2 * (1 + erf(x / np.sqrt(2))))
