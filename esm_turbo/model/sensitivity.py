"""Sensitivity of the attention output to errors of cached keys and values, and sampled tokens with their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from esm_turbo.codecs.fitting.statistics import KEY_BLOCK, Moments, Sensitivity
from esm_turbo.model.collectors import Collector, LayerStates, Proteins, keeps_sums, slices, stacked, sum_over_tokens
from esm_turbo.model.padding import Padding, parts_together

# Query-key pairs, over all heads, whose attention is held at once: about the size of a processor's cache.
_MAX_PAIRS = 2**18
_MAX_PAIRS_CUDA = 2**27


@dataclass(frozen=True)
class _Group:
    """Queries of proteins that are computed together: P proteins, padded to m queries, n stored keys and b blocks.

    Attributes:
        queries: their queries among those of all proteins.
        seen: tokens whose keys are attended to.
        keys: those that are stored, with which `seen` begins.
        scale: number of residues that each query represents, [P, 1].
        self_pairs: proteins, rows and columns of the pairs of a query and its own stored key.
        to_blocks: sums over the residues of each block of positions, times `scale`, [P, n, b].
        pairs: the (query, block) pairs among those of all proteins.
        pair_places: their places among the padded ones, int64 [pairs]; None if these are all.
    """

    queries: Padding
    seen: Padding
    keys: Padding
    scale: Tensor
    self_pairs: tuple[Tensor, Tensor, Tensor]
    to_blocks: Tensor
    pairs: slice
    pair_places: Tensor | None

    @property
    def pairs_per_head(self) -> int:
        """Pairs of a query and a key, padding included."""
        return self.queries.longest * len(self.to_blocks) * self.seen.longest


def _group(
    residues: Tensor,
    blocks: Tensor,
    members: Sequence[tuple[slice, slice, slice, Tensor]],
    rows: Sequence[slice],
    pairs: Sequence[slice],
    key_blocks: Sequence[Tensor],
    device: torch.device,
) -> _Group:
    """A group of proteins.

    Args:
        residues: 1 for residues, float32 [tokens].
        blocks: block of each token, [tokens].
        members: tokens, context, tokens seen and queries of each protein.
        rows: queries of each protein among those of all.
        pairs: its (query, block) pairs among those of all.
        key_blocks: blocks of its context.
        device: of the group.
    """
    parts, contexts, seen, drawn = zip(*members, strict=True)
    keys = Padding(contexts, device)
    scale = torch.stack([residues[part].sum() / len(chosen) for part, chosen in zip(parts, drawn, strict=True)])
    most = max(map(len, key_blocks))
    to_blocks = torch.zeros(len(parts), keys.longest, most, dtype=torch.float32)
    real = torch.zeros(len(parts), max(map(len, drawn)), most, dtype=torch.bool)
    own = [torch.zeros(3, 0, dtype=torch.int64)]
    for number, (part, context, chosen, columns) in enumerate(zip(parts, contexts, drawn, key_blocks, strict=True)):
        shares = (blocks[context, None] == columns) * (residues[context] * scale[number])[:, None]
        to_blocks[number, : len(shares), : len(columns)] = shares
        real[number, : len(chosen), : len(columns)] = True
        if context == part:
            own.append(torch.stack((torch.full_like(chosen, number), torch.arange(len(chosen)), chosen)))
    own_protein, own_row, own_column = torch.cat(own, dim=1).to(device)
    return _Group(
        Padding(rows, device),
        Padding(seen, device),
        keys,
        scale[:, None].to(device),
        (own_protein, own_row, own_column),
        to_blocks.to(device),
        slice(pairs[0].start, pairs[-1].stop),
        None if bool(real.all()) else real.flatten().nonzero()[:, 0].to(device),
    )


class SensitivityCollector(Collector):
    """Estimate of `Sensitivity` from a sample of the residues' queries.

    Args:
        proteins: the batch.
        output_root: M of every head, where |x M|^2 is the cost of an error x of its output, float32 [layers, heads,
            head_dim, head_dim].
        inv_freq: rotary frequencies, float32 [head_dim / 2].

    Attributes:
        weights: weights of keys and of values per layer, the square roots of the sums over queries, [heads, tokens]
            each.
    """

    def __init__(self, proteins: Proteins, output_root: Tensor, inv_freq: Tensor) -> None:
        device = output_root.device
        # Two more columns, for the terms of a squared distance besides the product.
        self.output_root = pad(output_root, (0, 2))
        residues = (~proteins.special).float()
        blocks = proteins.positions // KEY_BLOCK
        every = zip(proteins.parts, proteins.contexts, proteins.seen, proteins.queries, strict=True)
        members = [member for member in every if len(member[-1])]
        rows = list(slices([len(chosen) for *_, chosen in members]))
        key_blocks = [
            torch.arange(int(blocks[keys.start]), int(blocks[keys.stop - 1]) + 1) for _, keys, _, _ in members
        ]
        queries = [part.start + chosen for part, _, _, chosen in members]
        pair_queries = [
            torch.arange(one.start, one.stop).repeat_interleave(len(columns))
            for one, columns in zip(rows, key_blocks, strict=True)
        ]
        pair_blocks = [columns.repeat(len(one)) for one, columns in zip(queries, key_blocks, strict=True)]
        pairs = list(slices(list(map(len, pair_queries))))
        self.groups = [
            _group(residues, blocks, members[some], rows[some], pairs[some], key_blocks[some], device)
            for some in parts_together([seen.stop - seen.start for _, _, seen, _ in members], device)
        ]
        residues *= proteins.stored
        self.count = int(residues.sum())
        self.residues = residues.to(device)
        nothing = torch.zeros(0, dtype=torch.int64)
        self.queries, self.pair_queries = (torch.cat([nothing, *x]).to(device) for x in (queries, pair_queries))
        self.rotate_keys = _RotationToBlocks(blocks, inv_freq)
        self.rotate_queries = _RotationToBlocks(torch.cat([nothing, *pair_blocks]), inv_freq)
        self.weights: list[tuple[Tensor, Tensor]] = []
        self._layers: list[dict[str, Tensor]] = []

    def observe(self, layer_idx: int, states: LayerStates) -> None:
        queries = states.queries[:, self.queries]
        key_sums, value_sums, gains = self._sums(layer_idx, queries, states)
        keys = self.rotate_keys(states.keys)
        queries = self.rotate_queries(queries[:, self.pair_queries])
        roots = key_sums.sqrt(), value_sums.sqrt()
        self.weights.append(roots)
        self._layers.append(
            {
                "attention": value_sums.sum(1),
                "queries": sum_over_tokens(queries * gains[..., None], queries),
                "key_sum": self.residues @ keys,
                **_weighted("keys", keys, roots[0]),
                **_weighted("values", states.values, roots[1]),
            }
        )

    def _sums(self, layer_idx: int, queries: Tensor, states: LayerStates) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over queries of G_ij and p_ij^2, [heads, tokens]; sums over a block's keys of G_ij, [heads, pairs]."""
        root = self.output_root[layer_idx]
        # |v_j M - o_i M|^2 as one product, of (v_j M, |v_j M|^2, 1) and (-2 o_i M, 1, |o_i M|^2).
        values, outputs = states.values @ root, states.outputs[:, self.queries] @ root
        values[..., -2] = torch.linalg.vector_norm(values, dim=-1).square_()
        values[..., -1] = 1
        outputs[..., -1] = torch.linalg.vector_norm(outputs, dim=-1).square_()
        outputs[..., -2] = 1
        outputs[..., :-2] *= -2
        key_sums, value_sums = (states.keys.new_zeros(states.keys.shape[:2]) for _ in range(2))
        gains = key_sums.new_zeros(len(key_sums), len(self.pair_queries))
        for group in self.groups:
            for heads in _head_slices(len(queries), group.pairs_per_head, queries.device):
                scores = group.queries.pad(queries[heads]) @ group.seen.pad(states.keys[heads]).mT
                if group.seen.mask is not None:
                    scores.masked_fill_(~group.seen.mask[:, None], -torch.inf)
                squared = torch.softmax(scores, dim=-1)[..., : group.keys.longest].square_()
                squared[(slice(None), *group.self_pairs)] = 0
                if group.queries.mask is not None:
                    squared.mul_(group.queries.mask[..., None])
                gain = (group.queries.pad(outputs[heads]) @ group.keys.pad(values[heads]).mT).mul_(squared)
                group.keys.add_to(value_sums[heads], squared.sum(2).mul_(group.scale))
                # Rounding may make a squared distance negative.
                group.keys.add_to(key_sums[heads], gain.sum(2).clamp_min_(0).mul_(group.scale))
                of_pairs = (gain @ group.to_blocks).flatten(1).clamp_min_(0)
                gains[heads, group.pairs] = of_pairs if group.pair_places is None else of_pairs[:, group.pair_places]
        return key_sums.mul_(self.residues), value_sums.mul_(self.residues), gains

    def result(self) -> Sensitivity:
        """Sensitivity over the whole batch."""

        def stack(name: str) -> Any:
            return stacked([layer[name] for layer in self._layers])

        per_residue = 1 / max(1, self.count)
        return Sensitivity(
            self.count,
            stack("key_sum") * per_residue,
            Moments(stack("keys_count"), stack("keys_mean"), stack("keys_covariance")),
            Moments(stack("values_count"), stack("values_mean"), stack("values_covariance")),
            stack("queries") * per_residue,
            stack("attention") * per_residue,
        )


class SampleCollector(Collector):
    """Sampled tokens of one batch.

    Args:
        sampled: indices of the tokens.
        sensitivity: collector of the weights, which observes each layer before this one.
    """

    def __init__(self, sampled: Tensor, sensitivity: SensitivityCollector) -> None:
        self.sampled = sampled
        self.sensitivity = sensitivity
        self.device = sampled.device if keeps_sums(sampled.device) else torch.device("cpu")
        self._layers: dict[str, list[Tensor]] = {"keys": [], "values": [], "key_weights": [], "value_weights": []}

    def observe(self, layer_idx: int, states: LayerStates) -> None:
        vectors, weights = (states.keys, states.values), self.sensitivity.weights[layer_idx]
        for kept, x in zip(self._layers.values(), (*vectors, *weights), strict=True):
            dtype = torch.bfloat16 if x.dim() == 3 else torch.float32
            kept.append(x[:, self.sampled].transpose(0, 1).to(self.device, dtype))

    def result(self) -> dict[str, Tensor]:
        """Keys (after RoPE) and values, bfloat16 [tokens, layers, heads, head_dim], and their weights, float32."""
        return {name: torch.stack(layers, dim=1) for name, layers in self._layers.items()}


class _RotationToBlocks:
    """Inverse RoPE by the first position of each vector's block, with angles computed once for all layers.

    Args:
        blocks: block of each vector, int64 [n].
        inv_freq: rotary frequencies, [head_dim / 2].
    """

    def __init__(self, blocks: Tensor, inv_freq: Tensor) -> None:
        angle = (blocks.to(inv_freq.device) * KEY_BLOCK)[:, None] * inv_freq
        self.cos = angle.cos().repeat(1, 2)
        self.sin = angle.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate vectors x [heads, n, head_dim]."""
        half = self.sin.shape[1]
        rotated = x * self.cos
        rotated[..., :half].addcmul_(x[..., half:], self.sin)
        rotated[..., half:].addcmul_(x[..., :half], self.sin, value=-1)
        return rotated


def _head_slices(heads: int, pairs: int, device: torch.device) -> Iterator[slice]:
    """Slices of heads with at most so many pairs of tokens each as suit a device, or of a single head."""
    step = max(1, (_MAX_PAIRS_CUDA if device.type == "cuda" else _MAX_PAIRS) // max(1, pairs))
    return (slice(first, first + step) for first in range(0, heads, step))


def _weighted(name: str, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Sum of weights [H], weighted mean [H, D] and covariance [H, D, D] of x [H, n, D] with weights [H, n]."""
    count = weights.sum(1)
    weights = weights / count.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    mean = weights[:, None] @ x
    x = x - mean
    return {
        f"{name}_count": count,
        f"{name}_mean": mean[:, 0],
        f"{name}_covariance": sum_over_tokens(x * weights[..., None], x),
    }
