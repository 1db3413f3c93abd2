"""What calibration takes from one batch: moments, sensitivities and sampled tokens, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .codecs.base import rotate
from .kv_statistics import KEY_BLOCK, Array, Moments, Sensitivity, TokenMoments, TokenSample
from .sessions import KVSession

# One query in four stands for all: it settles which keys matter at a quarter of the cost.
_QUERY_STRIDE = 4


class Observers(KVSession):
    """Shows every layer's queries, keys and values to several sessions; the model attends as it would."""

    def __init__(self, sessions: Sequence[KVSession]) -> None:
        self.sessions = sessions

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        for session in self.sessions:
            session.attend(layer_idx, query, keys, values)


class MomentsCollector(KVSession):
    """Moments of keys, queries and values.

    Args:
        residues: which tokens are residues, bool [batch, n].
        specials: which are `<cls>` and `<eos>`, bool [batch, n].
    """

    def __init__(self, residues: Tensor, specials: Tensor) -> None:
        self.indices = [residues.reshape(-1).nonzero()[:, 0], specials.reshape(-1).nonzero()[:, 0]]
        # moments[kind][state] is a list over layers of (mean, covariance).
        self.moments: list[list[list[tuple[Tensor, Tensor]]]] = [[[], [], []], [[], [], []]]

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        for state, x in enumerate((keys, query, values)):
            tokens = x.transpose(1, 2).flatten(0, 1)
            for kind, index in enumerate(self.indices):
                self.moments[kind][state].append(_mean_and_covariance(tokens, index.to(x.device)))
        if not all(torch.isfinite(kind[state][-1][1]).all() for kind in self.moments for state in range(3)):
            raise ValueError(f"queries, keys or values of layer {layer_idx} are not finite: are the weights damaged?")

    def residues(self) -> TokenMoments:
        return self._token_moments(0)

    def specials(self) -> TokenMoments:
        return self._token_moments(1)

    def _token_moments(self, kind: int) -> TokenMoments:
        count = len(self.indices[kind])
        stacks = []
        for layers in self.moments[kind]:
            means, covariances = zip(*layers, strict=True)
            stacks.append(Moments(count, _stacked(means), _stacked(covariances)))
        return TokenMoments(*stacks)


class SensitivityCollector(KVSession):
    """How much errors of keys and values matter, see `Sensitivity`: needs the attention itself, protein by protein.

    Sums over queries are over every fourth one, chosen by its position.

    Args:
        mask: bool [batch, n], padded on the right.
        special: which tokens are no residues, bool [batch, n].
        positions: [batch, n].
        output_gram: [layers, heads, head_dim, head_dim].
        inv_freq: [head_dim / 2].

    Attributes:
        weights: per layer those of keys and values, the square roots of the sums over queries, [batch, n, heads].
    """

    def __init__(self, mask: Tensor, special: Tensor, positions: Tensor, output_gram: Array, inv_freq: Array) -> None:
        self.lengths = mask.sum(1).tolist()
        self.residues = (mask & ~special).float()
        self.positions = positions
        self.output_gram = torch.from_numpy(output_gram.astype(np.float32))
        self.inv_freq = torch.from_numpy(inv_freq.astype(np.float32))
        self.weights: list[tuple[Tensor, Tensor]] = []
        self._layers: list[list[dict[str, Tensor]]] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        device = query.device
        gram = self.output_gram[layer_idx].to(device)
        batch_size, heads, width = query.shape[:3]
        weights = torch.zeros(2, batch_size, width, heads, device=device)
        sums = []
        for row, n in enumerate(self.lengths):
            q, k, v = (x[row, :, :n].float() for x in (query, keys, values))
            found = self._protein(q, k, v, gram, self.residues[row, :n].to(device), self.positions[row, :n].to(device))
            weights[0, row, :n] = found["key_weights"].T
            weights[1, row, :n] = found["value_weights"].T
            sums.append(found)
        self.weights.append((weights[0], weights[1]))
        self._layers.append(sums)

    def _protein(
        self, q: Tensor, k: Tensor, v: Tensor, gram: Tensor, residues: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        """Sums over one protein; q, k, v [heads, n, head_dim], residues and positions [n]."""
        asks = (positions % _QUERY_STRIDE == 0).nonzero()[:, 0]
        q = q[:, asks]
        attention = torch.softmax(q @ k.transpose(1, 2), dim=-1)
        output = attention @ v
        squared = attention.square_() * (residues[asks, None] * residues)
        squared[:, torch.arange(len(asks), device=q.device), asks] = 0
        # |W (v_j - o_i)|^2, expanded; rounding may take it below zero.
        mapped = v @ gram
        distance = torch.baddbmm((mapped * v).sum(-1)[:, None, :], output, mapped.transpose(1, 2), alpha=-2)
        distance += ((output @ gram) * output).sum(-1)[:, :, None]
        value_weights = squared.sum(1)
        gain = squared.mul_(distance.clamp_min_(0))
        key_weights = gain.sum(1)
        inv_freq = self.inv_freq.to(q.device)
        starts, block = torch.unique_consecutive(positions // KEY_BLOCK * KEY_BLOCK, return_inverse=True)
        by_block = gain @ torch.nn.functional.one_hot(block).float()
        # A block's sum of (R q)(R q)^T is R (sum of q q^T) R^T: one small matrix is rotated, not every query.
        turn = -starts[:, None, None] * inv_freq
        sums = (q[:, None] * by_block.transpose(1, 2)[..., None]).transpose(2, 3) @ q[:, None]
        turned_keys = rotate(k, -starts[block][:, None] * inv_freq)
        key_roots, value_roots = key_weights.sqrt(), value_weights.sqrt()
        return {
            "key_weights": key_roots,
            "value_weights": value_roots,
            "attention": value_weights.sum(1),
            "queries": rotate(rotate(sums, turn).transpose(2, 3), turn).sum(1),
            "key_sum": (turned_keys * residues[:, None]).sum(1),
            **_weighted("keys", turned_keys, key_roots),
            **_weighted("values", v, value_roots),
        }

    def result(self) -> Sensitivity:
        """Of the whole batch."""
        total = None
        for row in range(len(self.lengths)):
            one = self._of_protein(row)
            total = one if total is None else total.merge(one)
        assert total is not None
        return total

    def _of_protein(self, row: int) -> Sensitivity:
        def stack(name: str) -> Array:
            stacked: Array = _stacked([layer[row][name] for layer in self._layers])
            return stacked

        count = int(self.residues[row].sum())
        per_residue = 1 / max(1, count)
        return Sensitivity(
            count,
            stack("key_sum") * per_residue,
            Moments(stack("keys_count"), stack("keys_mean"), stack("keys_covariance")),
            Moments(stack("values_count"), stack("values_mean"), stack("values_covariance")),
            stack("queries") * per_residue,
            stack("attention") * per_residue,
        )


class SampleCollector(KVSession):
    """Sampled tokens of one batch.

    Args:
        sampled: which, indices into the flattened batch.
        sensitivity: has seen each layer before this one does.
    """

    def __init__(self, sampled: Tensor, sensitivity: SensitivityCollector) -> None:
        self.sampled = sampled
        self.sensitivity = sensitivity
        self._states: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._weights: tuple[list[Tensor], list[Tensor]] = ([], [])

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        index = self.sampled.to(keys.device)
        for states, x in zip(self._states, (keys, values), strict=True):
            states.append(x.transpose(1, 2).flatten(0, 1)[index].to("cpu", torch.bfloat16))
        for weights, x in zip(self._weights, self.sensitivity.weights[layer_idx], strict=True):
            weights.append(x.flatten(0, 1)[index].cpu())

    def keys(self) -> Tensor:
        """[tokens, layers, heads, head_dim] bfloat16."""
        return torch.stack(self._states[0], dim=1)

    def values(self) -> Tensor:
        """[tokens, layers, heads, head_dim] bfloat16."""
        return torch.stack(self._states[1], dim=1)

    def key_weights(self) -> Tensor:
        """[tokens, layers, heads]."""
        return torch.stack(self._weights[0], dim=1)

    def value_weights(self) -> Tensor:
        """[tokens, layers, heads]."""
        return torch.stack(self._weights[1], dim=1)


class SampleBuffer:
    """The tokens of lowest priority number among all seen."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.priorities = np.zeros(0, dtype=np.int64)
        self.tokens: dict[str, Tensor] = {}

    def candidates(self, priorities: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices of those that would enter."""
        highest = self.priorities.max() if len(self.priorities) == self.size else 2**63 - 1
        inside = np.flatnonzero(priorities < highest)
        best: npt.NDArray[np.int64] = inside[np.argsort(priorities[inside], kind="stable")[: self.size]]
        return best

    def add(self, priorities: npt.NDArray[np.int64], **tokens: Tensor) -> None:
        """Adds tokens: tensors [tokens, ...] of every kind that `sample` asks for."""
        priorities = np.concatenate([self.priorities, priorities])
        best = np.argsort(priorities, kind="stable")[: self.size]
        rows = torch.from_numpy(best)
        self.priorities = priorities[best]
        for name, new in tokens.items():
            self.tokens[name] = torch.cat([self.tokens[name], new])[rows] if name in self.tokens else new[rows]

    def sample(self) -> TokenSample:
        def stack(name: str) -> npt.NDArray[np.float32]:
            """[layers, heads, tokens, ...]."""
            stacked: npt.NDArray[np.float32] = self.tokens[name].float().movedim(0, 2).contiguous().numpy()
            return stacked

        return TokenSample(
            stack("keys"),
            stack("values"),
            self.tokens["is_special"].numpy(),
            self.tokens["positions"].numpy(),
            stack("key_weights"),
            stack("value_weights"),
        )


def _mean_and_covariance(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and covariance [H, D, D] of tokens [N, H, D] at `index`, float32."""
    x = tokens.index_select(0, index).transpose(0, 1).float()
    mean = x.mean(dim=1) if len(index) else x.new_zeros(x.shape[0], x.shape[2])
    # Centred first: a large mean would otherwise cancel the digits of a small variance.
    x -= mean[:, None]
    return mean, x.transpose(1, 2) @ x / max(1, len(index))


def _weighted(name: str, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Sum of weights [H], weighted mean [H, D] and covariance [H, D, D] of x [H, n, D] with weights [H, n]."""
    count = weights.sum(1)
    weights = (weights / count.clamp_min(torch.finfo(torch.float32).tiny)[:, None])[..., None]
    mean = (weights * x).sum(1)
    x = x - mean[:, None]
    return {f"{name}_count": count, f"{name}_mean": mean, f"{name}_covariance": (x * weights).transpose(1, 2) @ x}


def _stacked(layers: Sequence[Tensor]) -> Any:
    """Over layers, as float64 on the CPU."""
    return torch.stack(tuple(layers)).cpu().numpy().astype(np.float64)
