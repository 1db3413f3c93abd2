"""Statistics of one calibration batch, collected layer by layer: what is observed, and moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from esm_turbo.codecs.fitting.statistics import Moments, TokenMoments
from esm_turbo.model.padding import Padding, parts_together
from esm_turbo.model.sessions import KVSession

# One residue in this many is drawn as a query: at a fixed stride all queries would share the phases of the fast rotary
# pairs.
_RESIDUES_PER_QUERY = 8
# Devices that merge what they collected themselves: large models have gigabytes of it, and MPS has no float64.
_SUMS_ON = ("cuda",)
_TOKENS_PER_SUM = 512


@dataclass(frozen=True)
class Proteins:
    """A batch of proteins end to end, without padding, alone or after their homologs.

    Attributes:
        parts: tokens of each protein.
        contexts: tokens whose stored keys and values each protein reads: its own, or those of all homologs before it
            where contexts are exact. It sees the latter and itself.
        positions: position of each token, consecutive within a protein and its context, int64 [tokens].
        special: special tokens, bool [tokens].
        stored: tokens that are in a context, bool [tokens].
        queries: residues from whose queries sensitivities are estimated, as int64 indices into each protein.
    """

    parts: Sequence[slice]
    contexts: Sequence[slice]
    positions: Tensor
    special: Tensor
    stored: Tensor
    queries: Sequence[Tensor]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        positions: Tensor,
        special: Tensor,
        seeds: Sequence[int],
        homologs: Sequence[int] | None = None,
    ) -> Proteins:
        """Draw the queries of each protein with its own seed.

        Args:
            lengths: tokens of each protein.
            positions: of all tokens, int64 [tokens].
            special: special tokens, bool [tokens].
            seeds: of each protein.
            homologs: how many proteins before each are its homologs, where contexts are exact; None elsewhere.
        """
        parts = contexts = list(slices(lengths))
        stored = torch.ones_like(special)
        if homologs is not None:
            contexts = [
                slice(parts[i - n].start, part.start) for i, (part, n) in enumerate(zip(parts, homologs, strict=True))
            ]
            stored = torch.zeros_like(special)
            for context in contexts:
                stored[context] = True
        queries = []
        for part, context, seed in zip(parts, contexts, seeds, strict=True):
            chosen = _draw_queries(~special[part], seed)
            queries.append(chosen if context.stop > context.start else chosen[:0])
        return cls(parts, contexts, positions, special, stored, queries)

    @property
    def seen(self) -> list[slice]:
        """Tokens that each protein sees."""
        pairs = zip(self.contexts, self.parts, strict=True)
        return [slice(context.start, part.stop) for context, part in pairs]


@dataclass(frozen=True)
class LayerStates:
    """Queries and keys after RoPE, values and attention outputs of a layer, float32 [heads, tokens, head_dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor


class Collector(ABC):
    """Collects statistics from one layer after another."""

    @abstractmethod
    def observe(self, layer_idx: int, states: LayerStates) -> None:
        """Collect from one layer; called once per layer, in order."""


class ProteinAttention(KVSession):
    """Session in which each protein attends only to itself and its homologs, and collectors observe every layer.

    Args:
        proteins: of a row.
        collectors: observe the layers.
        device: of the collectors; None where all layers lie on it.
    """

    def __init__(self, proteins: Proteins, collectors: Sequence[Collector], device: torch.device | None = None) -> None:
        self.proteins = proteins
        self.collectors = collectors
        self.device = device
        parts, seen, indices = proteins.parts, proteins.seen, device or torch.device("cpu")
        self._groups = [
            (Padding(parts[group], indices), Padding(seen[group], indices))
            for group in parts_together([part.stop - part.start for part in seen], indices)
        ]

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = query[0], keys[0], values[0]
        if not query.is_cuda:
            # Processors are slow in half precision.
            q, k, v = q.float(), k.float(), v.float()
        outputs = []
        for own, seen in self._groups:
            mask = None if seen.mask is None else seen.mask[:, None].to(q.device)
            padded = scaled_dot_product_attention(own.pad(q), seen.pad(k), seen.pad(v), attn_mask=mask, scale=1.0)
            outputs.append(own.unpad(padded).transpose(0, 1))
        output = torch.cat(outputs).transpose(0, 1)
        states = LayerStates(*(x.to(self.device or x.device).float() for x in (q, k, v, output)))
        for collector in self.collectors:
            collector.observe(layer_idx, states)
        return output[None].to(query.dtype)


class MomentsCollector(Collector):
    """Moments of stored keys and values, over residues and over special tokens.

    Args:
        proteins: the batch.
        device: of the layers.
    """

    def __init__(self, proteins: Proteins, device: torch.device) -> None:
        kinds = (~proteins.special, proteins.special)
        self.indices = [(kind & proteins.stored).nonzero()[:, 0].to(device) for kind in kinds]
        # moments[kind][state] is a list over layers of (mean, covariance).
        self.moments: list[list[list[tuple[Tensor, Tensor]]]] = [[[], []], [[], []]]

    def observe(self, layer_idx: int, states: LayerStates) -> None:
        for state, x in enumerate((states.keys, states.values)):
            for kind, index in enumerate(self.indices):
                self.moments[kind][state].append(_mean_and_covariance(x, index))

    def result(self) -> list[TokenMoments]:
        """Moments over residues, and over special tokens."""
        return [
            TokenMoments(*(Moments(len(index), *map(stacked, zip(*layers, strict=True))) for layers in states))
            for index, states in zip(self.indices, self.moments, strict=True)
        ]


def slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Slices of consecutive parts of these lengths."""
    stops = list(accumulate(lengths))
    return (slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True))


def _draw_queries(residues: Tensor, seed: int) -> Tensor:
    """Indices of the residues drawn as queries: one from each of equal stretches, to spread them evenly."""
    (indices,) = np.nonzero(residues.numpy())
    stretches = -(-len(indices) // _RESIDUES_PER_QUERY)
    bounds = np.arange(stretches + 1) * len(indices) // max(1, stretches)
    # A separate stream: the seed's first numbers are the sample's priorities.
    generator = np.random.Generator(np.random.PCG64([seed, 1]))
    return torch.from_numpy(indices[generator.integers(bounds[:-1], bounds[1:])])


def _mean_and_covariance(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and covariance [H, D, D] of tokens [H, N, D] at `index`."""
    x = tokens.transpose(0, 1).index_select(0, index).transpose(0, 1)
    mean = x.mean(dim=1) if len(index) else x.new_zeros(x.shape[0], x.shape[2])
    # Centred first, because a large mean would cancel the digits of a small variance.
    x -= mean[:, None]
    return mean, sum_over_tokens(x, x) / max(1, len(index))


def sum_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """The products a^T b of a [H, N, D] and b [H, N, E], [H, D, E].

    A CUDA device would sum over all tokens in few threads, and so is given them in parts.
    """
    if not keeps_sums(a.device):
        return a.mT @ b
    whole = a.shape[1] - a.shape[1] % _TOKENS_PER_SUM
    first, second = (x[:, :whole].unflatten(1, (-1, _TOKENS_PER_SUM)) for x in (a, b))
    total: Tensor = (first.mT @ second).sum(1) + a[:, whole:].mT @ b[:, whole:]
    return total


def keeps_sums(device: torch.device) -> bool:
    """Whether statistics stay on a device until codecs are fitted."""
    return device.type in _SUMS_ON


def stacked(layers: Sequence[Tensor]) -> Any:
    """Stack the tensors of all layers in float64: on a CUDA device there, else as an array.

    Raises:
        ValueError: a layer's statistics are not finite.
    """
    stack = torch.stack(tuple(layers))
    finite = torch.isfinite(stack).flatten(1).all(1)
    if not bool(finite.all()):
        layer_idx = int(finite.cpu().int().argmin())
        raise ValueError(f"queries, keys or values of layer {layer_idx} are not finite: are the weights damaged?")
    return stack.double() if keeps_sums(stack.device) else stack.cpu().numpy().astype(np.float64)


def on_host(statistics: Any) -> Any:
    """`TokenMoments` or `Sensitivity` whose tensors are arrays."""
    found = {
        name: on_host(x) if is_dataclass(x) else x.cpu().numpy() if isinstance(x, Tensor) else x
        for name, x in vars(statistics).items()
    }
    return type(statistics)(**found)
