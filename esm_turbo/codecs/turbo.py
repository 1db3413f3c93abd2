"""Few bits where they matter: query-aware transforms, and bits shared out by what errors do to the output.

Keys and values are mapped so that equal squared errors of components cost equally at the attention's output, and
components are uncorrelated and in order of falling variance (docs/math.md). Keys are taken relative to blocks of 64
columns (`codecs.base`), so that the statistics hold wherever in a protein they stand. Neighbouring components form
*runs*, and every run of a layer has a width, 0 to 8 bits a component, the same for all heads of the layer; the widths,
and how a token's bytes are shared between key and value, minimise the expected error of the layer's output.

Every component is scaled by the step of its width, so that it is coded by counting: with w bits it is read as the
nearest of -(2^w - 1) / 2, ..., -1/2, 1/2, ..., (2^w - 1) / 2. Evenly spaced levels lose a little against Lloyd-Max
levels (docs/accuracy.md), and make a code a number that the tensor cores of a GPU multiply as it is.

A code is kept in *slabs*, tensors of fields of 8, 4, 2 or 1 bits: the binary digits of a width say which (`slabs`).
With c_f = (2^f - 1) / 2 a component is the sum over its slabs of (field - c_f) 2^shift, `shift` the bits of the code
that stand below the field. Every slab has mean zero, so that the last may be dropped and a coarser code remains.

Once a context and head, the mean of what quantisation left over is stored in bfloat16, mapped back, and added to what
is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.base import FieldSlab, KVCodec, Packed, rotate
from esm_turbo.codecs.fitting import transforms
from esm_turbo.codecs.fitting.lloyd_max import gaussian_uniform, uniform_quantizer
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK, Array, KVStatistics, TokenSample
from esm_turbo.codecs.packing import GROUP_SIZE, pack_codes, unpack_codes
from esm_turbo.config import Geometry, TurboConfig

IntArray = npt.NDArray[np.int64]

MAX_WIDTH = 8
FIELDS = (8, 4, 2, 1)
# Slabs are whole 32-bit words where heads are large enough for that to cost little.
_WORD, _WORDS_FROM = 4, 64
# What a GPU does for a token grows with the components of its operands, here in units of `head_dim`: the limits cost a
# fifth of accuracy and save half of the work (docs/kernels.md).
_MOST_PLACES = {"key": 1.0, "value": 0.75}
_SMALLEST_OPERAND = 16
# What a width leaves of a component's variance.
_DISTORTIONS = (1.0, *(gaussian_uniform(2**width).distortion for width in range(1, MAX_WIDTH + 1)))
# For conditioning alone: two hundredths already cost accuracy.
_SHRINKAGE = 1e-3
# The sample is in bfloat16: components smaller than this part of the largest, as where values have a lower rank than
# `head_dim`, are nothing but its rounding in there.
_RESOLUTION = 2.0**-9
# Layers share so many profiles of widths: a GPU kernel is compiled for each.
_MAX_PROFILES = 3


@dataclass(frozen=True)
class Slab:
    """A tensor of fields: some bits of the codes of some runs.

    Attributes:
        bits: of a field: 8, 4, 2 or 1.
        pieces: neighbouring components whose fields stand at one place of their codes, in order: (first component, one
            past the last, bits of the code below the field).
    """

    bits: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def num_components(self) -> int:
        return sum(stop - start for start, stop, _ in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Of a token and head."""
        return self.num_components * self.bits // 8


def run_size(head_dim: int) -> int:
    """Components of a run: an eighth of a head of 64 or more, in whole groups of 8, and at least 8."""
    return max(GROUP_SIZE, head_dim // 64 * GROUP_SIZE)


def slabs(widths: Sequence[int], size: int) -> list[Slab]:
    """The slabs that hold codes of these widths, in order of their fields' bits, the most first.

    Digit f (8, 4, 2 or 1) of a width asks for a field of f bits. The runs that have a digit share slabs, in order; each
    slab takes as many of them as the largest power of two.

    Args:
        widths: of the runs, 0 to 8 bits a component.
        size: components of a run.
    """
    found = []
    for bits in FIELDS:
        runs = [run for run, width in enumerate(widths) if width & bits]
        while runs:
            length = 1 << len(runs).bit_length() - 1
            part, runs = runs[:length], runs[length:]
            pieces: list[tuple[int, int, int]] = []
            for run in part:
                start, shift = run * size, widths[run] & bits - 1
                if pieces and pieces[-1][1:] == (start, shift):
                    start = pieces.pop()[0]
                pieces.append((start, (run + 1) * size, shift))
            found.append(Slab(bits, tuple(pieces)))
    return found


class TurboCodec(KVCodec):
    """Query-aware transforms and bits by water-filling, in runs of components."""

    block_size = KEY_BLOCK
    layers_alike = False

    def __init__(self, config: TurboConfig, geometry: Geometry, state: dict[str, Tensor]) -> None:
        super().__init__(config, geometry, state)
        size = run_size(geometry.head_dim)
        self.slabs: dict[str, list[list[Slab]]] = {
            kind: [slabs(widths, size) for widths in state[f"{kind}_widths"].tolist()] for kind in ("key", "value")
        }

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`.

        Raises:
            ValueError: `head_dim` is no multiple of 8, or the sample holds no residues.
        """
        head_dim = statistics.geometry.head_dim
        size = run_size(head_dim)
        if head_dim % size:
            raise ValueError(f"components are coded by {size}: `head_dim` must be a multiple, got {head_dim}")
        moments, sample = statistics.select(config.protect_special_tokens)
        sensitivity = statistics.sensitivity
        key_mean, value_mean = sensitivity.key_mean, moments.values.mean
        key_covariance = _about(sensitivity.keys.mean, sensitivity.keys.covariance, key_mean)
        value_covariance = _about(sensitivity.values.mean, sensitivity.values.covariance, value_mean)
        key_map = transforms.query_aware(key_covariance, sensitivity.queries, _SHRINKAGE)
        value_map = transforms.query_aware(value_covariance, statistics.output_gram, _SHRINKAGE, rotary_pairs=False)
        key_variances = transforms.component_variances(key_map, key_covariance)
        value_variances = transforms.component_variances(value_map, value_covariance)
        key_map = transforms.standardized(key_map, key_covariance, _RESOLUTION)
        value_map = transforms.standardized(value_map, value_covariance, _RESOLUTION)
        # An error of a value reaches the output through the attention paid to it.
        value_costs = value_variances * sensitivity.attention[..., None]
        key_widths, value_widths = _share_out(
            key_variances.sum(1), value_costs.sum(1), size, config.mean_bits * head_dim // 4
        )
        turned = _relative_to_blocks(sample, statistics.inv_freq)
        keys = np.einsum("lhij,lhtj->lhti", key_map.forward, turned - key_mean[:, :, None], optimize=True)
        values = np.einsum("lhij,lhtj->lhti", value_map.forward, sample.values - value_mean[:, :, None], optimize=True)
        layers = statistics.geometry.num_layers
        state = {
            "key_map": key_map.forward,
            "key_inverse": key_map.inverse,
            "key_steps": _fit_steps(keys, sample.key_weights, key_widths, size),
            "key_mean": key_mean,
            "value_map": value_map.forward,
            "value_inverse": value_map.inverse,
            "value_steps": _fit_steps(values, sample.value_weights, value_widths, size),
            "value_mean": value_mean,
            "inv_freq": np.tile(statistics.inv_freq, (layers, 1)),
        }
        tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in state.items()}
        tensors["key_widths"] = torch.from_numpy(key_widths)
        tensors["value_widths"] = torch.from_numpy(value_widths)
        return tensors

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for kind in ("key", "value"):
            # Stored apart, since the presets share the maps.
            tensors[f"{kind}_map"] = tensors[f"{kind}_map"] / tensors[f"{kind}_steps"][:, None]
            tensors[f"{kind}_inverse"] = tensors[f"{kind}_inverse"] * tensors[f"{kind}_steps"]
            size = run_size(self.geometry.head_dim)
            widths = tensors[f"{kind}_widths"].repeat_interleave(size).float()
            tensors[f"{kind}_half"] = torch.exp2(widths - 1)
            tensors[f"{kind}_highest"] = torch.exp2(widths) - 1
            for index, slab in enumerate(slabs(tensors[f"{kind}_widths"].tolist(), size)):
                middle = torch.zeros_like(widths)
                for start, stop, shift in slab.pieces:
                    middle[start:stop] = (2**slab.bits - 1) / 2 * 2**shift
                tensors[f"{kind}_middle_{index}"] = middle
        return tensors

    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        return self._pack(layer_idx, "key", keys) | self._pack(layer_idx, "value", values)

    def dequantize_keys(self, layer_idx: int, packed: Packed) -> Tensor:
        return self._unpack(layer_idx, "key", packed)

    def dequantize_values(self, layer_idx: int, packed: Packed) -> Tensor:
        return self._unpack(layer_idx, "value", packed)

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        state = self.layer_state(layer_idx, keys.device)
        weights = mask[:, None, :, None].float()
        weights = weights / weights.sum(dim=2, keepdim=True).clamp_min(1)
        rows: Packed = {}
        for kind, x in (("key", keys), ("value", values)):
            mean = ((x - self._unpack(layer_idx, kind, packed)) * weights).sum(dim=2, keepdim=True)
            # In the model's coordinates, where a reader adds it to the means that it knows anyway.
            rows[f"{kind}_residual"] = (mean @ state[f"{kind}_inverse"].transpose(-1, -2)).to(torch.bfloat16)
        return rows

    def field_slabs(self, layer_idx: int, kind: str) -> list[FieldSlab]:
        found = []
        for index, slab in enumerate(self.slabs[kind][layer_idx]):
            components = [component for start, stop, _ in slab.pieces for component in range(start, stop)]
            weights = [2.0**shift for start, stop, shift in slab.pieces for _ in range(start, stop)]
            found.append(FieldSlab(f"{kind}_{index}", slab.bits, tuple(components), tuple(weights)))
        return found

    def refinements(self, layer_idx: int) -> list[str]:
        """See `KVCodec.refinements`: the planes, slabs of one bit, where other slabs remain."""
        names = []
        for kind in ("key", "value"):
            slabs = self.slabs[kind][layer_idx]
            planes = [f"{kind}_{index}" for index, slab in enumerate(slabs) if slab.bits == 1]
            names += planes if len(planes) < len(slabs) else []
        return names

    def _pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        state = self.layer_state(layer_idx, x.device)
        # The boundaries of levels are whole numbers, the lower code's at a tie; NaN counts as below all.
        counted = x.ceil().add_(state[f"{kind}_half"] - 1).nan_to_num_(nan=0.0).clamp_min_(0)
        codes = counted.minimum(state[f"{kind}_highest"]).to(torch.uint8)
        packed: Packed = {}
        for index, slab in enumerate(self.slabs[kind][layer_idx]):
            fields = [codes[..., start:stop] >> shift for start, stop, shift in slab.pieces]
            packed[f"{kind}_{index}"] = pack_codes(torch.cat(fields, dim=-1), slab.bits)
        return packed

    def _unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        some = next(iter(packed.values()))
        state = self.layer_state(layer_idx, some.device)
        offset = torch.zeros(self.geometry.head_dim, device=some.device)
        if f"{kind}_residual" in packed:
            offset = packed[f"{kind}_residual"].float() @ state[f"{kind}_map"].transpose(-1, -2)
        # Eight codes of eight bits are a word, whose fields never carry into each other.
        words = torch.zeros(
            (*some.shape[:3], self.geometry.head_dim // GROUP_SIZE), dtype=torch.int64, device=some.device
        )
        for index, slab in enumerate(self.slabs[kind][layer_idx]):
            # A slab that was dropped has mean zero.
            if f"{kind}_{index}" in packed:
                fields = unpack_codes(packed[f"{kind}_{index}"], slab.bits).view(torch.int64)
                offset = offset - state[f"{kind}_middle_{index}"]
                first = 0
                for start, stop, shift in slab.pieces:
                    start, stop = start // GROUP_SIZE, stop // GROUP_SIZE
                    words[..., start:stop].add_(fields[..., first : first + stop - start], alpha=2**shift)
                    first += stop - start
        return words.view(torch.uint8).float().add_(offset)


def _about(mean: Array, covariance: Array, centre: Array) -> Array:
    """Second moment about `centre` of vectors with this mean and covariance."""
    shift = mean - centre
    return covariance + shift[..., :, None] * shift[..., None, :]


def _relative_to_blocks(sample: TokenSample, inv_freq: Array) -> npt.NDArray[np.float32]:
    """The sample's keys, rotated back by the first positions of their blocks."""
    starts = torch.from_numpy(sample.positions // KEY_BLOCK * KEY_BLOCK)
    angle = -starts[:, None] * torch.from_numpy(inv_freq).float()
    turned: npt.NDArray[np.float32] = rotate(torch.from_numpy(sample.keys), angle).numpy()
    return turned


def _share_out(key_costs: Array, value_costs: Array, size: int, num_bytes: int) -> tuple[IntArray, IntArray]:
    """Widths of the runs of all layers that minimise the expected error, in at most `_MAX_PROFILES` ways.

    Args:
        key_costs: what each component costs with no bits at all, summed over heads, [layers, head_dim].
        value_costs: likewise.
        size: components of a run.
        num_bytes: of one token and head, key and value together.

    Returns:
        Widths of the runs of keys and of values, int64 [layers, head_dim / size] each.
    """
    key_runs, value_runs = (costs.reshape(len(costs), -1, size).sum(2) for costs in (key_costs, value_costs))
    num_runs = key_runs.shape[1]
    widths = _possible_widths(num_runs, size)
    taken = widths.sum(1) * size // 8
    left = np.array(_DISTORTIONS)[widths].T
    key_errors, value_errors = key_runs @ left, value_runs @ left
    if num_runs * size >= _WORDS_FROM:
        places = _num_places(widths, size)
        key_errors[:, places > _MOST_PLACES["key"] * num_runs * size] = np.inf
        value_errors[:, places > _MOST_PLACES["value"] * num_runs * size] = np.inf
    candidates = np.unique(_best_pairs(key_errors, value_errors, taken, num_bytes), axis=0)
    # [layers, candidates], in units of what is best for a layer: no layer counts for more than another.
    errors = key_errors[:, candidates[:, 0]] + value_errors[:, candidates[:, 1]]
    errors /= np.maximum(errors.min(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    few = itertools.combinations(range(len(candidates)), min(_MAX_PROFILES, len(candidates)))
    profiles = np.array(list(few))
    chosen = profiles[errors[:, profiles].min(axis=2).sum(axis=0).argmin()]
    best = candidates[chosen[errors[:, chosen].argmin(axis=1)]]
    return widths[best[:, 0]], widths[best[:, 1]]


def _possible_widths(num_runs: int, size: int) -> IntArray:
    """All widths that do not rise from run to run, are not all zero, and whose slabs are whole words, [ways, runs]."""
    ways = itertools.combinations_with_replacement(range(MAX_WIDTH, -1, -1), num_runs)
    widths = np.array(list(ways)[:-1], dtype=np.int64)
    if num_runs * size < _WORDS_FROM:
        return widths
    whole = [(np.count_nonzero(widths & bits, axis=1) * size * bits // 8) % _WORD == 0 for bits in FIELDS]
    return widths[np.all(whole, axis=0)]


def _num_places(widths: IntArray, size: int) -> IntArray:
    """Components that a GPU's operands hold, a component once for every slab that it has a field in, [ways]."""
    counts = np.stack([np.count_nonzero(widths & bits, axis=1) for bits in FIELDS])
    # A slab's operand has at least 16 places; only a last, lone run of 8 leaves some empty.
    places: IntArray = (counts * size + counts % 2 * max(_SMALLEST_OPERAND - size, 0)).sum(axis=0)
    return places


def _best_pairs(key_errors: Array, value_errors: Array, taken: IntArray, num_bytes: int) -> IntArray:
    """The ways for keys and values that together take at most `num_bytes` and leave the least error, [layers, 2]."""

    def best_by_bytes(errors: Array) -> tuple[Array, IntArray]:
        least, way = np.full((len(errors), num_bytes + 1), np.inf), np.zeros((len(errors), num_bytes + 1), np.int64)
        for total in set(taken[taken <= num_bytes].tolist()):
            ways = np.flatnonzero(taken == total)
            way[:, total] = ways[errors[:, ways].argmin(axis=1)]
            least[:, total] = errors[:, ways].min(axis=1)
        return least, way

    (keys, key_way), (values, value_way) = best_by_bytes(key_errors), best_by_bytes(value_errors)
    fits = np.add.outer(np.arange(num_bytes + 1), np.arange(num_bytes + 1)) <= num_bytes
    total = np.where(fits, keys[:, :, None] + values[:, None, :], np.inf)
    key_bytes, value_bytes = np.unravel_index(total.reshape(len(total), -1).argmin(axis=1), fits.shape)
    layers = np.arange(len(total))
    return np.stack([key_way[layers, key_bytes], value_way[layers, value_bytes]], axis=1)


def _fit_steps(samples: Array, weights: npt.NDArray[np.float32], widths: IntArray, size: int) -> Array:
    """The step of every component, [layers, head_dim]: one a width for the whole model, 1 where no sample says."""
    by_component = np.repeat(widths, size, axis=1)
    steps = np.ones(by_component.shape)
    # Only the relative weights of one head's tokens mean something.
    weights = weights / np.maximum(weights.mean(axis=2, keepdims=True), np.finfo(np.float32).tiny)
    for width in sorted({int(width) for width in widths.flat} - {0}):
        parts, part_weights = [], []
        for layer in range(len(widths)):
            chosen = samples[layer][:, :, by_component[layer] == width]
            parts.append(chosen.reshape(-1))
            part_weights.append(np.broadcast_to(weights[layer][:, :, None], chosen.shape).reshape(-1))
        pooled, pooled_weights = np.concatenate(parts), np.concatenate(part_weights)
        if (pooled * pooled_weights).any():
            steps[by_component == width] = uniform_quantizer(pooled, 2**width, pooled_weights).step
    return steps
