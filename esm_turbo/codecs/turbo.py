"""The turbo codec: query-aware transforms, and bits allocated by their effect on the attention output.

Keys and values are mapped so that equal squared errors of components cost equally at the attention's output and
components are uncorrelated, in order of falling variance (docs/math.md). Keys are taken relative to blocks of 64
columns (`codecs.base`), so that their statistics hold at every position in a protein. Neighbouring components form
*runs*. Every run of a layer has a width of 0 to 8 bits per component, the same for all heads of the layer. The widths,
and the split of a token's bytes between key and value, minimise the expected error of the layer's output.

Every component is divided by the step of its width, so that levels are evenly spaced with distance 1: w bits encode the
nearest of -(2^w - 1) / 2, ..., -1/2, 1/2, ..., (2^w - 1) / 2. Evenly spaced levels have 1 % (two bits) to 40 % (five)
more squared error on a Gaussian than Lloyd-Max levels (docs/math.md), but their codes are numbers that a GPU's tensor
cores multiply directly. Components that dominate the error of their layer although they have 8 bits are divided by
steps of their own.

Codes of few bits are on average smaller than what they encode. In such a layer of exact contexts, components are
multiplied by gains that make them unbiased.

A code is stored in *slabs*, tensors of fields of 8, 4, 2 or 1 bits: the binary digits of its width (`slabs`). With
c_f = (2^f - 1) / 2 a component is the sum over its slabs of (field - c_f) 2^shift, where `shift` is the number of bits
of the code below the field. Every slab has mean zero, so that dropping the last one leaves a coarser code.

Once per context and head, the mean quantisation residual is stored in bfloat16, in the model's coordinates; it is added
when the context is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.base import FieldSlab, KVCodec, Packed, rotate
from esm_turbo.codecs.fitting import batched, transforms
from esm_turbo.codecs.fitting.lloyd_max import (
    Magnitudes,
    SortedMagnitudes,
    gaussian_uniform,
    pooled_uniform_quantizer,
    uniform_quantizer,
)
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK, Array, KVStatistics, TokenSample
from esm_turbo.codecs.fitting.threads import run_threads
from esm_turbo.codecs.packing import GROUP_SIZE, pack_codes, unpack_codes
from esm_turbo.config import Geometry, TurboConfig

IntArray = npt.NDArray[np.int64]

MAX_WIDTH = 8
FIELDS = (8, 4, 2, 1)
# Slabs are whole 32-bit words for heads of at least this size.
_WORD_BYTES, _WORDS_FROM_HEAD_DIM = 4, 64
# A GPU's work per token grows with the columns of its operands, which are limited to these, in units of `head_dim`
# (docs/notes/kernels.md).
_MAX_OPERAND_COLUMNS = {"key": 1.0, "value": 0.75}
_MIN_SLAB_COLUMNS = 16
# Fraction of a component's variance that remains as error, by width.
_DISTORTIONS = (1.0, *(gaussian_uniform(2**width).distortion for width in range(1, MAX_WIDTH + 1)))
# A normal component times the code of its optimal levels is on average the component's variance less the error.
_GAINS = np.array([1.0, *(1 / (1 - distortion) for distortion in _DISTORTIONS[1:])])
# For conditioning only.
_SHRINKAGE = 1e-3
# The sample is in bfloat16: components below this fraction of the largest are only its rounding error, for example
# where values have a lower rank than `head_dim`.
_SAMPLE_RESOLUTION = 2.0**-9
# A GPU kernel is compiled for each distinct pair of key and value widths.
_MAX_PROFILES = 3
# Share of a layer's expected error at four bits from which on components of the greatest width have steps of their own:
# no bits can lessen their errors. Two layers of e1-mini come here; esm2-mini and esmc-mini stay below.
_DOMINANT_SHARE = 2 / 3
# Those steps reach beyond the largest component of the sample by this factor, as contexts have larger ones. What is cut
# off there can change which key is looked up.
_BEYOND_SAMPLE = 1.1


@dataclass(frozen=True)
class Slab:
    """A tensor of bit fields, one per component of some of the runs.

    Attributes:
        bits: bits per field: 8, 4, 2 or 1.
        pieces: ranges of neighbouring components with fields at the same bits of their codes, in order: (first
            component, one past the last, bits of the code below the field).
    """

    bits: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def num_components(self) -> int:
        return sum(stop - start for start, stop, _ in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes per token and head."""
        return self.num_components * self.bits // 8


def run_size(head_dim: int) -> int:
    """Components per run: an eighth of a head of 64 or more, in whole groups of 8, and at least 8."""
    return max(GROUP_SIZE, head_dim // 64 * GROUP_SIZE)


def slabs(widths: Sequence[int], size: int) -> list[Slab]:
    """Slabs that hold codes of these widths, widest fields first.

    Each binary digit f (8, 4, 2 or 1) of a width becomes a field of f bits. The runs with that digit share slabs, in
    order: each slab takes the largest power of two of the remaining runs.

    Args:
        widths: bits per component of each run, 0 to 8.
        size: components per run.
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
    """Query-aware transforms and bit allocation by run of components."""

    block_size = KEY_BLOCK
    layers_alike = False
    # What each row stores as a number is of its first tokens.
    hides_appended_nan = True

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
            ValueError: `head_dim` is not a multiple of the run size, or the sample holds no residues.
        """
        return cls.fit_all([config], statistics)[0]

    @classmethod
    def fit_all(cls, configs: Sequence[TurboConfig], statistics: KVStatistics) -> list[dict[str, Tensor]]:
        """See `KVCodec.fit_all`; presets differ in their bits, and share maps and sorted samples."""
        states: dict[TurboConfig, dict[str, Tensor]] = {}
        for protect in {config.protect_special_tokens for config in configs}:
            alike = [config for config in configs if config.protect_special_tokens == protect]
            budgets = [config.mean_bits * statistics.geometry.head_dim // 4 for config in alike]
            states |= zip(alike, fit_budgets(budgets, statistics, protect), strict=True)
        return [states[config] for config in configs]

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for kind in ("key", "value"):
            # Steps are stored apart because the presets share the maps.
            tensors[f"{kind}_map"] = tensors[f"{kind}_map"] / tensors[f"{kind}_steps"][:, None]
            tensors[f"{kind}_inverse"] = tensors[f"{kind}_inverse"] * tensors[f"{kind}_steps"]
            if f"{kind}_gains" in tensors:
                tensors[f"{kind}_inverse"] = tensors[f"{kind}_inverse"] * tensors[f"{kind}_gains"]
            size = run_size(self.geometry.head_dim)
            widths = tensors[f"{kind}_widths"].long().repeat_interleave(size)
            # Shifted, as no device promises exact powers.
            levels = (torch.ones_like(widths) << widths).float()
            tensors[f"{kind}_half"] = levels / 2
            tensors[f"{kind}_highest"] = levels - 1
            for index, slab in enumerate(slabs(tensors[f"{kind}_widths"].tolist(), size)):
                middle = torch.zeros_like(levels)
                for start, stop, shift in slab.pieces:
                    middle[start:stop] = (2**slab.bits - 1) / 2 * 2**shift
                tensors[f"{kind}_middle_{index}"] = middle
        return tensors

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        state = self.layer_state(layer_idx, keys.device)
        weights = mask[:, None, :, None].float()
        weights = weights / weights.sum(dim=2, keepdim=True).clamp_min(1)
        rows: Packed = {}
        for kind, x in (("key", keys), ("value", values)):
            mean = ((x - self.unpack(layer_idx, kind, packed)) * weights).sum(dim=2, keepdim=True)
            # In the model's coordinates, where a reader adds it to the means of keys and values.
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
        """See `KVCodec.refinements`: the slabs of one bit, if other slabs remain."""
        names = []
        for kind in ("key", "value"):
            slabs = self.slabs[kind][layer_idx]
            one_bit = [f"{kind}_{index}" for index, slab in enumerate(slabs) if slab.bits == 1]
            names += one_bit if len(one_bit) < len(slabs) else []
        return names

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        state = self.layer_state(layer_idx, x.device)
        # Boundaries between levels are whole numbers; ties go to the lower code, NaN to the lowest.
        codes = x.ceil().add_(state[f"{kind}_half"] - 1).nan_to_num_(nan=0.0).clamp_min_(0)
        codes = codes.minimum(state[f"{kind}_highest"]).to(torch.uint8)
        packed: Packed = {}
        for index, slab in enumerate(self.slabs[kind][layer_idx]):
            fields = [codes[..., start:stop] >> shift for start, stop, shift in slab.pieces]
            packed[f"{kind}_{index}"] = pack_codes(torch.cat(fields, dim=-1), slab.bits)
        return packed

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        first_tensor = next(iter(packed.values()))
        device, shape = first_tensor.device, first_tensor.shape[:3]
        state = self.layer_state(layer_idx, device)
        offset = torch.zeros(self.geometry.head_dim, dtype=torch.float32, device=device)
        if f"{kind}_residual" in packed:
            offset = packed[f"{kind}_residual"].float() @ state[f"{kind}_map"].transpose(-1, -2)
            if f"{kind}_gains" in state:
                offset = offset / state[f"{kind}_gains"]
        # A word holds eight codes of eight bits, which never carry into each other.
        words = torch.zeros((*shape, self.geometry.head_dim // GROUP_SIZE), dtype=torch.int64, device=device)
        for index, slab in enumerate(self.slabs[kind][layer_idx]):
            # A dropped slab has mean zero.
            if f"{kind}_{index}" in packed:
                fields = unpack_codes(packed[f"{kind}_{index}"], slab.bits).view(torch.int64)
                offset = offset - state[f"{kind}_middle_{index}"]
                first = 0
                for start, stop, shift in slab.pieces:
                    start, stop = start // GROUP_SIZE, stop // GROUP_SIZE
                    words[..., start:stop].add_(fields[..., first : first + stop - start], alpha=2**shift)
                    first += stop - start
        return words.view(torch.uint8).float().add_(offset)


@dataclass(frozen=True)
class _Mapped:
    """Keys or values of a layer after their map.

    Attributes:
        forward: the map, [heads, head_dim, head_dim].
        variances: of every component before it is standardised, [heads, head_dim].
        samples: the sample, mapped, float64 [heads, tokens, head_dim].
    """

    forward: Array
    variances: Array
    samples: Tensor


def fit_budgets(budgets: Sequence[int], statistics: KVStatistics, protect: bool) -> list[dict[str, Tensor]]:
    """States of codecs that quantise the same tokens, one for each budget.

    Args:
        budgets: bytes per token and head, key and value together.
        statistics: what the codecs are fitted to.
        protect: whether special tokens are left out.

    Raises:
        ValueError: see `TurboCodec.fit`.
    """
    head_dim, layers = statistics.geometry.head_dim, range(statistics.geometry.num_layers)
    size = run_size(head_dim)
    if head_dim % size:
        raise ValueError(f"components are coded by {size}: `head_dim` must be a multiple, got {head_dim}")
    moments, sample = statistics.select(protect)
    sensitivity = statistics.sensitivity
    means = {"key": sensitivity.key_mean, "value": moments.values.mean}
    weighted = {"key": sensitivity.keys, "value": sensitivity.values}
    costs = {"key": sensitivity.queries, "value": statistics.output_gram}
    vectors = {"key": _block_relative_keys(sample, statistics.inv_freq), "value": sample.values}
    weights = {"key": sample.key_weights, "value": sample.value_weights}

    def mapped(kind: str, layer: int) -> _Mapped:
        mean = means[kind][layer]
        covariance = _second_moment_about(weighted[kind].mean[layer], weighted[kind].covariance[layer], mean)
        found = transforms.query_aware(covariance, costs[kind][layer], _SHRINKAGE, rotary_pairs=kind == "key")
        variances = transforms.component_variances(found, covariance)
        forward = transforms.standardized(found, covariance, _SAMPLE_RESOLUTION).forward
        centred = torch.from_numpy(vectors[kind][layer] - mean[:, None]).to(statistics.device)
        return _Mapped(forward, variances, centred @ torch.from_numpy(forward).to(statistics.device).mT)

    maps = {kind: run_threads(partial(mapped, kind), layers) for kind in ("key", "value")}
    variances = {kind: np.stack([one.variances for one in maps[kind]]) for kind in maps}
    # An error of a value reaches the output weighted by attention.
    errors = {"key": variances["key"], "value": variances["value"] * sensitivity.attention[..., None]}
    pairs = [_allocate_bits(errors["key"].sum(1), errors["value"].sum(1), size, num_bytes) for num_bytes in budgets]
    # Four bits per number take as many bytes as a head has components.
    four_bits = _allocate_bits(errors["key"].sum(1), errors["value"].sum(1), size, head_dim)
    dominant = _dominant_runs(errors, four_bits, size)
    # Tokens that are stored unquantised would be multiplied by gains, too; exact contexts have none.
    gained = np.any([runs.any(1) for runs in dominant.values()], axis=0) & (not statistics.specials.keys.count)
    shared = {"inv_freq": _f32(np.tile(statistics.inv_freq, (len(layers), 1)))}
    states: list[dict[str, Tensor]] = [{} for _ in budgets]
    for kind, widths in zip(maps, zip(*pairs, strict=True), strict=True):
        forward = np.stack([one.forward for one in maps[kind]])
        shared |= {
            f"{kind}_map": _f32(forward),
            f"{kind}_inverse": _f32(transforms.inverted(forward)),
            f"{kind}_mean": _f32(means[kind]),
        }
        samples = [one.samples for one in maps[kind]]
        steps = _fit_steps(samples, weights[kind], widths, size)
        for state, one, step in zip(states, widths, steps, strict=True):
            for layer, run in np.argwhere(dominant[kind] & (one == MAX_WIDTH)):
                own = slice(run * size, (run + 1) * size)
                step[layer, own] = _own_steps(
                    samples[layer][..., own].cpu().numpy(), weights[kind][layer], errors[kind][layer, :, own]
                )
            state |= {f"{kind}_steps": _f32(step), f"{kind}_widths": torch.from_numpy(one)}
            if gained.any():
                gains = np.where(gained[:, None], _GAINS[one], 1.0)
                state[f"{kind}_gains"] = _f32(gains.repeat(size, axis=1))
    return [shared | state for state in states]


def _f32(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _second_moment_about(mean: Array, covariance: Array, centre: Array) -> Array:
    """Second moment about `centre` of vectors with this mean and covariance, [..., head_dim, head_dim]."""
    shift = mean - centre
    return covariance + shift[..., :, None] * shift[..., None, :]


def _block_relative_keys(sample: TokenSample, inv_freq: Array) -> npt.NDArray[np.float32]:
    """The sample's keys rotated to the coordinates of their blocks, [layers, heads, tokens, head_dim]."""
    starts = torch.from_numpy(sample.positions // KEY_BLOCK * KEY_BLOCK)
    angle = -starts[:, None] * torch.from_numpy(inv_freq).float()
    rotated: npt.NDArray[np.float32] = rotate(torch.from_numpy(sample.keys), angle).numpy()
    return rotated


def _allocate_bits(key_costs: Array, value_costs: Array, size: int, num_bytes: int) -> tuple[IntArray, IntArray]:
    """Widths that minimise the expected error of all layers, with at most `_MAX_PROFILES` distinct profiles.

    Args:
        key_costs: expected error of each component at 0 bits, summed over heads, [layers, head_dim].
        value_costs: the same for values.
        size: components per run.
        num_bytes: budget per token and head, key and value together.

    Returns:
        Widths of the runs of keys and of values, int64 [layers, head_dim / size] each.
    """
    key_runs, value_runs = (costs.reshape(len(costs), -1, size).sum(2) for costs in (key_costs, value_costs))
    head_dim = key_costs.shape[1]
    widths = _possible_widths(key_runs.shape[1], size)
    remaining = np.array(_DISTORTIONS)[widths].T
    key_errors, value_errors = key_runs @ remaining, value_runs @ remaining
    if head_dim >= _WORDS_FROM_HEAD_DIM:
        columns = _operand_columns(widths, size)
        key_errors[:, columns > _MAX_OPERAND_COLUMNS["key"] * head_dim] = np.inf
        value_errors[:, columns > _MAX_OPERAND_COLUMNS["value"] * head_dim] = np.inf
    widths_bytes = widths.sum(1) * size // 8
    candidates = np.unique(_best_pairs(key_errors, value_errors, widths_bytes, num_bytes), axis=0)
    # [layers, candidates], relative to each layer's best: all layers count the same.
    errors = key_errors[:, candidates[:, 0]] + value_errors[:, candidates[:, 1]]
    errors /= np.maximum(errors.min(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    profiles = np.array(list(itertools.combinations(range(len(candidates)), min(_MAX_PROFILES, len(candidates)))))
    chosen = profiles[errors[:, profiles].min(axis=2).sum(axis=0).argmin()]
    best = candidates[chosen[errors[:, chosen].argmin(axis=1)]]
    return widths[best[:, 0]], widths[best[:, 1]]


def _possible_widths(num_runs: int, size: int) -> IntArray:
    """All non-increasing widths that are not all zero and whose slabs are whole words, [candidates, runs]."""
    widths = itertools.combinations_with_replacement(range(MAX_WIDTH, -1, -1), num_runs)
    candidates = np.array(list(widths)[:-1], dtype=np.int64)
    if num_runs * size < _WORDS_FROM_HEAD_DIM:
        return candidates
    whole = [(np.count_nonzero(candidates & bits, axis=1) * size * bits // 8) % _WORD_BYTES == 0 for bits in FIELDS]
    return candidates[np.all(whole, axis=0)]


def _operand_columns(widths: IntArray, size: int) -> IntArray:
    """Columns of a GPU kernel's operands, one per component and slab, [candidates]."""
    counts = np.stack([np.count_nonzero(widths & bits, axis=1) for bits in FIELDS])
    # A slab's operand has at least 16 columns; only a single remaining run of 8 leaves some of them empty.
    columns: IntArray = (counts * size + counts % 2 * max(_MIN_SLAB_COLUMNS - size, 0)).sum(axis=0)
    return columns


def _best_pairs(key_errors: Array, value_errors: Array, widths_bytes: IntArray, num_bytes: int) -> IntArray:
    """Candidates for keys and for values with the least total error in at most `num_bytes` together, [layers, 2]."""

    def best_by_bytes(errors: Array) -> tuple[Array, IntArray]:
        """Least error at each number of bytes and its candidate, [layers, num_bytes + 1] each."""
        least, best = np.full((len(errors), num_bytes + 1), np.inf), np.zeros((len(errors), num_bytes + 1), np.int64)
        for total in set(widths_bytes[widths_bytes <= num_bytes].tolist()):
            candidates = np.flatnonzero(widths_bytes == total)
            best[:, total] = candidates[errors[:, candidates].argmin(axis=1)]
            least[:, total] = errors[:, candidates].min(axis=1)
        return least, best

    (keys, best_keys), (values, best_values) = best_by_bytes(key_errors), best_by_bytes(value_errors)
    fits = np.add.outer(np.arange(num_bytes + 1), np.arange(num_bytes + 1)) <= num_bytes
    total = np.where(fits, keys[:, :, None] + values[:, None, :], np.inf)
    key_bytes, value_bytes = np.unravel_index(total.reshape(len(total), -1).argmin(axis=1), fits.shape)
    layers = np.arange(len(total))
    return np.stack([best_keys[layers, key_bytes], best_values[layers, value_bytes]], axis=1)


def _dominant_runs(
    errors: Mapping[str, Array], widths: tuple[IntArray, IntArray], size: int
) -> dict[str, npt.NDArray[np.bool_]]:
    """Runs of the greatest width that make most of their layer's expected error, bool [layers, runs] each.

    Args:
        errors: expected error of each component of keys and of values at 0 bits, [layers, heads, head_dim].
        widths: of their runs, [layers, runs] each.
        size: components per run.
    """
    by_kind = dict(zip(("key", "value"), widths, strict=True))
    left = {
        kind: errors[kind].sum(1).reshape(*one.shape, size).sum(2) * np.array(_DISTORTIONS)[one]
        for kind, one in by_kind.items()
    }
    total = sum(one.sum(1, keepdims=True) for one in left.values())
    return {kind: (one == MAX_WIDTH) & (left[kind] > _DOMINANT_SHARE * total) for kind, one in by_kind.items()}


def _own_steps(samples: Array, weights: npt.NDArray[np.float32], errors: Array) -> list[float]:
    """The step of each component of a run of the greatest width: the best one, or that which cuts nothing off.

    Heads count as their errors do. Where the sample is zero, the step is 1.

    Args:
        samples: the components of the sample, standardised, [heads, tokens, size].
        weights: of the tokens, [heads, tokens].
        errors: expected error of each component at 0 bits, [heads, size].
    """
    weights = weights / np.maximum(weights.mean(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    steps = []
    for i in range(samples.shape[2]):
        own = weights * errors[:, i, None]
        best = uniform_quantizer(samples[..., i], 2**MAX_WIDTH, own).step if own.any() else 0.0
        whole = 2 * float(np.abs(samples[..., i]).max()) / (2**MAX_WIDTH - 1)
        steps.append(_BEYOND_SAMPLE * max(best, whole) or 1.0)
    return steps


def _fit_steps(
    samples: Sequence[Tensor], weights: npt.NDArray[np.float32], widths: Sequence[IntArray], size: int
) -> list[Array]:
    """Steps of every component, [layers, head_dim] for each preset: one per width for the whole model.

    Where the sample is zero, the step is 1.

    Args:
        samples: mapped keys or values of each layer, float64 [heads, tokens, head_dim].
        weights: of the tokens, [layers, heads, tokens].
        widths: of the runs, [layers, runs] for each preset.
        size: components per run.
    """
    # Weights are comparable only between tokens of the same head.
    weights = weights / np.maximum(weights.mean(axis=2, keepdims=True), np.finfo(np.float32).tiny)
    device = samples[0].device
    # Components with the same widths in all presets are sorted together, once.
    profiles, members = np.unique(np.stack(widths, axis=-1).reshape(-1, len(widths)), axis=0, return_inverse=True)
    members = np.repeat(members.reshape(widths[0].shape), size, axis=1)

    def pooled(profile: int) -> SortedMagnitudes | None:
        parts, part_weights = [], []
        for layer in np.flatnonzero((members == profile).any(axis=1)).tolist():
            chosen = samples[layer][:, :, torch.from_numpy(members[layer] == profile).to(device)]
            parts.append(chosen.flatten())
            part_weights.append(torch.from_numpy(weights[layer]).to(device)[:, :, None].expand_as(chosen).flatten())
        x, w = torch.cat(parts), torch.cat(part_weights)
        if not (profiles[profile].any() and bool(w.any())):
            return None
        return Magnitudes(x.numpy(), w.numpy()) if device.type == "cpu" else batched.Magnitudes(x, w)

    magnitudes = run_threads(pooled, range(len(profiles)))

    def step(preset: int, width: int) -> float:
        chosen = np.flatnonzero(profiles[:, preset] == width)
        parts = [part for part in map(magnitudes.__getitem__, chosen.tolist()) if part is not None and part.power]
        return pooled_uniform_quantizer(parts, 2**width).step if parts else 1.0

    wanted = [(preset, int(width)) for preset, one in enumerate(widths) for width in np.unique(one) if width]
    found = [np.ones(members.shape) for _ in widths]
    for (preset, width), one in zip(wanted, run_threads(lambda pair: step(*pair), wanted), strict=True):
        found[preset][profiles[members, preset] == width] = one
    return found
