"""Calibration as an estimator: moments and a bounded sample of a model's queries, keys and values, in one pass.

Memory does not grow with the number of proteins, and the result depends neither on their order nor on how they are
batched: moments are merged exactly, and which tokens enter the sample is decided by a hash of their sequence.

Keys after RoPE depend on their position, and a protein set is mostly short. Attention depends on relative positions
only, so every protein is run at an offset of its own (again by its hash): nothing changes but the rotation of its
queries and keys, and the statistics hold at every position up to `max_positions`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .artifacts import package_versions
from .calibration import Calibration
from .config import PRESETS, Geometry, TurboConfig
from .fingerprint import model_fingerprint
from .kv_statistics import Array, KVStatistics, Moments, TokenMoments, TokenSample
from .modeling_esm_turbo import TurboEsmModel, check_weights
from .sessions import KVSession

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import EsmForMaskedLM, EsmModel


class KVCalibrator:
    """Collects what the codecs of one model are fitted from.

    Args:
        model: an `EsmModel` or `EsmForMaskedLM`; it is not changed.
        sample_size: tokens kept for the codebooks.
        max_positions: the statistics hold for positions below this.

    Attributes:
        n_sequences_seen_: proteins so far.
        n_residues_seen_: residues so far.

    Raises:
        ValueError: the model's weights are not finite, or it is not ESM-2.
    """

    def __init__(self, model: EsmModel | EsmForMaskedLM, *, sample_size: int = 1024, max_positions: int = 1024) -> None:
        if sample_size < 1 or max_positions < 1:
            raise ValueError(f"`sample_size` and `max_positions` must be positive, got {sample_size}, {max_positions}")
        self.model = model
        self.sample_size = sample_size
        self.max_positions = max_positions
        check_weights(model)
        self._encoder = TurboEsmModel.from_esm(getattr(model, "esm", model)).eval()
        config = self._encoder.config
        self.geometry = Geometry.of(config)
        self._special_ids = torch.tensor(self._encoder.special_ids)
        shape = (self.geometry.num_layers, self.geometry.num_heads, self.geometry.head_dim)
        self._residues = TokenMoments(*(Moments.empty(*shape) for _ in range(3)))
        self._specials = TokenMoments(*(Moments.empty(*shape) for _ in range(3)))
        self._sample = _SampleBuffer(sample_size, shape)
        self.n_sequences_seen_ = 0
        self.n_residues_seen_ = 0

    def partial_fit(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> KVCalibrator:
        """Adds a batch of proteins.

        Args:
            input_ids: [batch, n], with `<cls>` and `<eos>`.
            attention_mask: [batch, n], padded on the right; None for all ones.

        Raises:
            ValueError: the mask is padded on the left or has holes, or keys or values are not finite.
        """
        ids = input_ids.cpu()
        mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.cpu() != 0
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("`attention_mask` is padded on the left or has holes; pad on the right")
        seeds = [_hash_tokens(row[keep]) for row, keep in zip(ids, mask, strict=True)]
        offsets = [seed % max(1, self.max_positions - int(n) + 1) for seed, n in zip(seeds, mask.sum(1), strict=True)]
        special = torch.isin(ids, self._special_ids)
        sampled, priorities = self._choose(mask, seeds)
        collector = _Collector(mask & ~special, mask & special, sampled, self.geometry)
        device = self._encoder.device
        positions = torch.tensor(offsets)[:, None] + torch.arange(ids.shape[1])
        with torch.no_grad():
            self._encoder(ids.to(device), mask.long().to(device), positions.to(device), kv_session=collector)
        self._residues = self._residues.merge(collector.residues())
        self._specials = self._specials.merge(collector.specials())
        self._sample.add(priorities, *collector.sample(), special.reshape(-1)[sampled].numpy())
        self.n_sequences_seen_ += len(ids)
        self.n_residues_seen_ += int((mask & ~special).sum())
        return self

    def finalize(
        self,
        presets: Iterable[str | TurboConfig] = PRESETS,
        provenance: dict[str, Any] | None = None,
    ) -> Calibration:
        """Fits the codecs.

        Args:
            presets: which to fit now; others are fitted from the calibration when they are first asked for.
            provenance: more to record, JSON values.

        Raises:
            ValueError: no protein was seen, or fewer residues than a head has components.
        """
        if self.n_residues_seen_ < self.geometry.head_dim:
            raise ValueError(
                f"calibration has seen {self.n_residues_seen_} residues, fewer than a head has components"
                f" ({self.geometry.head_dim}); give it more proteins"
            )
        statistics = KVStatistics(
            self.geometry,
            _as_saved(self._residues),
            _as_saved(self._specials),
            self._sample.sample(),
            _output_gram(self._encoder, self.geometry),
        )
        record = {
            "model": self.model.config._name_or_path or "a model without a name",
            "sequences": self.n_sequences_seen_,
            "residues": self.n_residues_seen_,
            "sample_size": self.sample_size,
            "max_positions": self.max_positions,
            "versions": package_versions(),
        }
        return Calibration(statistics, model_fingerprint(self._encoder), record | (provenance or {})).fit(presets)

    def _choose(self, mask: Tensor, seeds: list[int]) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """The tokens of a batch that may enter the sample, flat indices, and their priorities."""
        width = mask.shape[1]
        flat, priorities = [], []
        for row, (keep, seed) in enumerate(zip(mask, seeds, strict=True)):
            n = int(keep.sum())
            flat.append(row * width + np.arange(n))
            priorities.append(np.random.Generator(np.random.PCG64(seed)).integers(0, 2**63, n))
        indices, ranks = np.concatenate(flat), np.concatenate(priorities)
        best = self._sample.candidates(ranks)
        return torch.from_numpy(indices[best]), ranks[best]


class _Collector(KVSession):
    """Reduces each layer's queries, keys and values of one batch to moments and sampled tokens."""

    def __init__(self, residues: Tensor, specials: Tensor, sampled: Tensor, geometry: Geometry) -> None:
        self.indices = [residues.reshape(-1).nonzero()[:, 0], specials.reshape(-1).nonzero()[:, 0]]
        self.sampled = sampled
        self.geometry = geometry
        # moments[kind][state] is a list over layers of (mean, covariance).
        self.moments: list[list[list[tuple[Tensor, Tensor]]]] = [[[], [], []], [[], [], []]]
        self.samples: tuple[list[Tensor], list[Tensor]] = ([], [])

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        for state, x in enumerate((keys, query, values)):
            tokens = x.transpose(1, 2).flatten(0, 1)
            for kind, index in enumerate(self.indices):
                self.moments[kind][state].append(_mean_and_covariance(tokens, index.to(x.device)))
            if state != 1:
                chosen = tokens[self.sampled.to(x.device)].to("cpu", torch.bfloat16)
                self.samples[state // 2].append(chosen)
        if not all(torch.isfinite(self.moments[0][state][-1][1]).all() for state in range(3)):
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

    def sample(self) -> tuple[Tensor, Tensor]:
        """Sampled keys and values, [tokens, layers, heads, head_dim] bfloat16."""
        keys, values = (torch.stack(layers, dim=1) for layers in self.samples)
        return keys, values


class _SampleBuffer:
    """The tokens of lowest priority number among all seen."""

    def __init__(self, size: int, shape: tuple[int, ...]) -> None:
        self.size = size
        self.priorities = np.zeros(0, dtype=np.int64)
        self.keys = torch.zeros(0, *shape, dtype=torch.bfloat16)
        self.values = torch.zeros(0, *shape, dtype=torch.bfloat16)
        self.is_special = np.zeros(0, dtype=np.bool_)

    def candidates(self, priorities: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Indices of those that would enter."""
        highest = self.priorities.max() if len(self.priorities) == self.size else 2**63 - 1
        inside = np.flatnonzero(priorities < highest)
        return inside[np.argsort(priorities[inside], kind="stable")[: self.size]]

    def add(
        self, priorities: np.ndarray[Any, Any], keys: Tensor, values: Tensor, is_special: np.ndarray[Any, Any]
    ) -> None:
        priorities = np.concatenate([self.priorities, priorities])
        best = np.argsort(priorities, kind="stable")[: self.size]
        rows = torch.from_numpy(best)
        self.priorities = priorities[best]
        self.keys = torch.cat([self.keys, keys])[rows]
        self.values = torch.cat([self.values, values])[rows]
        self.is_special = np.concatenate([self.is_special, is_special])[best]

    def sample(self) -> TokenSample:
        def stack(x: Tensor) -> Any:
            return np.ascontiguousarray(x.float().permute(1, 2, 0, 3).numpy())

        return TokenSample(stack(self.keys), stack(self.values), self.is_special)


def _hash_tokens(ids: Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=8).digest(), "little")


def _mean_and_covariance(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and covariance [H, D, D] of tokens [N, H, D] at `index`, float32."""
    x = tokens[index].transpose(0, 1).float()
    mean = x.mean(dim=1) if len(index) else x.new_zeros(x.shape[0], x.shape[2])
    # Centred first: a large mean would otherwise cancel the digits of a small variance.
    x = x - mean[:, None]
    return mean, x.transpose(1, 2) @ x / max(1, len(index))


def _stacked(layers: Sequence[Tensor]) -> Array:
    return torch.stack(tuple(layers)).cpu().numpy().astype(np.float64)


def _output_gram(model: TurboEsmModel, geometry: Geometry) -> Array:
    """W_o,h^T W_o,h of every head, [layers, heads, head_dim, head_dim]."""
    grams = []
    for layer in model.encoder.layer:
        weight = layer.attention.output.dense.weight.detach().float().cpu().numpy().astype(np.float64)
        heads = weight.reshape(weight.shape[0], geometry.num_heads, geometry.head_dim)
        grams.append(np.einsum("ohi,ohj->hij", heads, heads, optimize=True))
    return np.stack(grams).astype(np.float32).astype(np.float64)


def _as_saved(moments: TokenMoments) -> TokenMoments:
    """Rounded to float32 as files are, so that a calibration and its saved copy give the same codecs."""

    def rounded(m: Moments) -> Moments:
        return Moments(m.count, *(a.astype(np.float32).astype(np.float64) for a in (m.mean, m.covariance)))

    return TokenMoments(rounded(moments.keys), rounded(moments.queries), rounded(moments.values))
