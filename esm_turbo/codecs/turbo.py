"""Few bits where they matter: query-aware transforms, and bits shared out by what errors do to the output.

Keys and values are mapped so that equal squared errors of components cost equally at the attention's output, and
components are uncorrelated and in order of falling variance (docs/math.md). Keys are taken relative to blocks of 64
columns (`codecs.base`), so that the statistics hold wherever in a protein they stand. Eight components in a row are a
*run*, and every run of a layer has a width, 0 to 8 bits a component, the same for all heads of the layer; the widths,
and how a token's bytes are shared between key and value, minimise the expected error of the layer's output.

A component of a run of width w is the index of the nearest of 2^w levels (Lloyd-Max; one table a width for the whole
model, keys and values apart). The index is stored as a field of 0, 1, 2, 4 or 8 bits, so that none crosses a byte, and
its lowest bits as planes of one bit each:

=======  ====  ====  ====  ====  ====  ====  ====
width      1     2     3     4     5     6     8
field      0     1     2     4     4     4     8
planes     1     1     1     0     1     2     0
=======  ====  ====  ====  ====  ====  ====  ====

Once a context and head, the mean of what quantisation left over is stored in bfloat16 and added to what is read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import transforms
from ..config import Geometry, TurboConfig
from ..kv_statistics import KEY_BLOCK, Array, KVStatistics, TokenSample
from ..lloyd_max import lloyd_max
from ..packing import GROUP_SIZE, pack_codes, quantize
from .base import KVCodec, Packed, rotate

FIELD_AND_PLANES = {0: (0, 0), 1: (0, 1), 2: (1, 1), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
"""For every width the bits of the field and the number of planes."""

# For conditioning alone: two hundredths already cost accuracy.
_SHRINKAGE = 1e-3
# Bytes of keys and of values are multiples of a 32-bit word where a token has this many and more.
_WORD, _WORDS_FROM = 4, 16


class TurboCodec(KVCodec):
    """Query-aware transforms and bits by water-filling, in runs of eight components."""

    block_size = KEY_BLOCK

    def __init__(self, config: TurboConfig, geometry: Geometry, state: dict[str, Tensor]) -> None:
        super().__init__(config, geometry, state)
        self._classes = {
            kind: [_width_classes(widths) for widths in state[f"{kind}_widths"].tolist()] for kind in ("key", "value")
        }

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`.

        Raises:
            ValueError: `head_dim` is no multiple of 8, or the sample holds no residues.
        """
        head_dim = statistics.geometry.head_dim
        if head_dim % GROUP_SIZE:
            raise ValueError(f"components are coded by {GROUP_SIZE}: `head_dim` must be a multiple, got {head_dim}")
        moments, sample = statistics.select(config.protect_special_tokens)
        sensitivity = statistics.sensitivity
        key_mean, value_mean = sensitivity.key_mean, moments.values.mean
        key_covariance = _about(sensitivity.keys.mean, sensitivity.keys.covariance, key_mean)
        value_covariance = _about(sensitivity.values.mean, sensitivity.values.covariance, value_mean)
        key_map = transforms.query_aware(key_covariance, sensitivity.queries, _SHRINKAGE)
        value_map = transforms.query_aware(value_covariance, statistics.output_gram, _SHRINKAGE, rotary_pairs=False)
        key_variances = transforms.component_variances(key_map, key_covariance)
        value_variances = transforms.component_variances(value_map, value_covariance)
        key_map = transforms.standardized(key_map, key_covariance)
        value_map = transforms.standardized(value_map, value_covariance)
        # An error of a value reaches the output through the attention paid to it.
        value_costs = value_variances * sensitivity.attention[..., None]
        widths = [
            _share_out(keys.sum(0), values.sum(0), config.mean_bits * head_dim // 4)
            for keys, values in zip(key_variances, value_costs, strict=True)
        ]
        key_widths, value_widths = (np.stack(kind) for kind in zip(*widths, strict=True))
        turned = _relative_to_blocks(sample, statistics.inv_freq)
        keys = np.einsum("lhij,lhtj->lhti", key_map.forward, turned - key_mean[:, :, None], optimize=True)
        values = np.einsum("lhij,lhtj->lhti", value_map.forward, sample.values - value_mean[:, :, None], optimize=True)
        layers = statistics.geometry.num_layers
        state = {
            "key_map": key_map.forward,
            "key_inverse": key_map.inverse,
            "key_mean": key_mean,
            "value_map": value_map.forward,
            "value_inverse": value_map.inverse,
            "value_mean": value_mean,
            "inv_freq": np.tile(statistics.inv_freq, (layers, 1)),
        }
        state |= _fit_levels("key", keys, sample.key_weights, key_widths)
        state |= _fit_levels("value", values, sample.value_weights, value_widths)
        tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in state.items()}
        tensors["key_widths"] = torch.from_numpy(key_widths)
        tensors["value_widths"] = torch.from_numpy(value_widths)
        return tensors

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if "_levels_" in name]:
            kind, _, width = name.partition("_levels_")
            levels = tensors[name]
            tensors[f"{kind}_boundaries_{width}"] = (levels[1:] + levels[:-1]) / 2
            tensors[f"{kind}_entries_{width}"] = _pair_table(levels, int(width))
            tensors |= _spread_tables(int(width), levels.device)
        return tensors

    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        packed: Packed = {}
        for kind, x in (("key", keys), ("value", values)):
            packed[f"{kind}_fields"], packed[f"{kind}_planes"] = self._pack(layer_idx, kind, x)
        return packed

    def dequantize_keys(self, layer_idx: int, packed: Packed) -> Tensor:
        return self._unpack(layer_idx, "key", packed)

    def dequantize_values(self, layer_idx: int, packed: Packed) -> Tensor:
        return self._unpack(layer_idx, "value", packed)

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        weights = mask[:, None, :, None].float()
        weights = weights / weights.sum(dim=2, keepdim=True).clamp_min(1)
        return {
            f"{kind}_residual": ((x - self._unpack(layer_idx, kind, packed)) * weights)
            .sum(dim=2, keepdim=True)
            .to(torch.bfloat16)
            for kind, x in (("key", keys), ("value", values))
        }

    def _pack(self, layer_idx: int, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
        state = self.layer_state(layer_idx, x.device)
        fields, planes = [], []
        for width, start, stop in self._classes[kind][layer_idx]:
            field_bits, num_planes = FIELD_AND_PLANES[width]
            if not width:
                continue
            codes = quantize(x[..., start:stop], state[f"{kind}_boundaries_{width}"])
            if field_bits:
                fields.append(pack_codes(codes >> num_planes, field_bits))
            for plane in reversed(range(num_planes)):
                planes.append(pack_codes(codes >> plane & 1, 1))
        return _joined(fields, x), _joined(planes, x)

    def _unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        fields, planes = packed[f"{kind}_fields"], packed[f"{kind}_planes"]
        state = self.layer_state(layer_idx, fields.device)
        parts = []
        field_byte = plane_byte = 0
        for width, start, stop in self._classes[kind][layer_idx]:
            field_bits, num_planes = FIELD_AND_PLANES[width]
            if not width:
                parts.append(torch.zeros((*fields.shape[:3], stop - start), device=fields.device))
                continue
            runs = (stop - start) // GROUP_SIZE
            codes: Tensor | None = None
            if field_bits:
                codes = fields[..., field_byte : field_byte + runs * field_bits]
                field_byte += runs * field_bits
                if num_planes:
                    codes = _look_up(state[f"spread_field_{width}"], codes).view(torch.int64)
            for plane in reversed(range(num_planes)):
                bits = _look_up(state[f"spread_plane_{width}_{plane}"], planes[..., plane_byte : plane_byte + runs])
                codes = bits if codes is None else codes | bits
                plane_byte += runs
            assert codes is not None
            if num_planes:
                codes = codes.view(torch.int16)
            parts.append(_look_up(state[f"{kind}_entries_{width}"], codes).view(torch.float32))
        x = torch.cat(parts, dim=-1)
        residual = packed.get(f"{kind}_residual")
        return x if residual is None else x.add_(residual)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table [entries] at codes [B, H, L, n]."""
    index = codes.long().reshape(codes.shape[0] * codes.shape[1], -1)
    return table.expand(len(index), -1).gather(1, index).view(codes.shape)


def _pair_table(levels: Tensor, width: int) -> Tensor:
    """What two codes c and d in a row decode to, at c + 2^width d: two float32 seen as one int64.

    One lookup then fetches two components, which halves the dear part of decoding on a CPU. Codes of eight bits have
    no such table: it would not stay in the processor's cache.
    """
    if width == 8:
        return levels
    pair = torch.arange(4**width, device=levels.device)
    pairs = torch.stack([levels[pair % 2**width], levels[pair // 2**width]], dim=-1)
    return pairs.view(torch.int64).squeeze(-1)


def _spread_tables(width: int, device: torch.device) -> dict[str, Tensor]:
    """What each byte of a field or of a plane adds to the indices of `_pair_table`, one 16-bit lane a pair of codes."""
    field_bits, num_planes = FIELD_AND_PLANES[width]
    if not num_planes:
        return {}
    byte = torch.arange(256, device=device)
    tables = {f"spread_plane_{width}_{plane}": _spread(byte, 1, plane, width) for plane in range(num_planes)}
    if field_bits:
        tables[f"spread_field_{width}"] = _spread(byte, field_bits, num_planes, width)
    return tables


def _spread(byte: Tensor, bits: int, shift: int, width: int) -> Tensor:
    """Parts of codes, `bits` wide, of every byte, moved to where they stand in pairs of codes."""
    parts = [byte >> start & 2**bits - 1 for start in range(0, 8, bits)]
    lanes = [low << shift | high << shift + width for low, high in zip(parts[::2], parts[1::2], strict=True)]
    spread = torch.stack(lanes, dim=-1).to(torch.int16)
    return spread.view({1: torch.int16, 2: torch.int32, 4: torch.int64}[len(lanes)]).squeeze(-1)


def _width_classes(widths: list[int]) -> list[tuple[int, int, int]]:
    """Components of one width, in order: (width, first component, one past the last)."""
    classes: list[tuple[int, int, int]] = []
    for run, width in enumerate(widths):
        start, stop = run * GROUP_SIZE, (run + 1) * GROUP_SIZE
        if classes and classes[-1][0] == width:
            classes[-1] = (width, classes[-1][1], stop)
        else:
            classes.append((width, start, stop))
    return classes


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts, dim=-1) if parts else like.new_empty((*like.shape[:-1], 0), dtype=torch.uint8)


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


def _share_out(key_costs: Array, value_costs: Array, num_bytes: int) -> tuple[Array, Array]:
    """Widths of one layer's runs that minimise the expected error.

    Args:
        key_costs: what each component costs with no bits at all, summed over heads, [head_dim].
        value_costs: likewise.
        num_bytes: of one token and head, key and value together.

    Returns:
        Widths of the runs of keys and of values, int64 [head_dim / 8] each.
    """
    step = _WORD if num_bytes >= _WORDS_FROM else 1
    key_tables = _best_widths(key_costs.reshape(-1, GROUP_SIZE).sum(1), num_bytes)
    value_tables = _best_widths(value_costs.reshape(-1, GROUP_SIZE).sum(1), num_bytes)
    splits = range(0, num_bytes + 1, step)
    key_bytes = min(splits, key=lambda n: key_tables[n][0] + value_tables[num_bytes - n][0])
    return np.array(key_tables[key_bytes][1]), np.array(value_tables[num_bytes - key_bytes][1])


def _best_widths(costs: Array, max_bytes: int) -> list[tuple[float, list[int]]]:
    """For every number of bytes the least expected error of runs with these costs, and their widths.

    A run of width w takes w bytes and leaves the share `GAUSSIAN_DISTORTIONS[w]` of its cost.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (max_bytes + 1)
    for cost in costs:
        best = [_with_run(best, cost, total) for total in range(max_bytes + 1)]
    return best


def _with_run(best: list[tuple[float, list[int]]], cost: float, total: int) -> tuple[float, list[int]]:
    """The best of `total` bytes when one more run of this cost joins the runs that `best` is for."""
    choices = []
    for width in FIELD_AND_PLANES:
        if width <= total:
            error, widths = best[total - width]
            choices.append((error + cost * transforms.GAUSSIAN_DISTORTIONS[width], [*widths, width]))
    return min(choices)


def _fit_levels(kind: str, samples: Array, weights: npt.NDArray[np.float32], widths: Array) -> dict[str, Array]:
    """Lloyd-Max levels of every width in use, symmetric, the same for all layers: [layers, 2^width]."""
    tables = {}
    layers = len(widths)
    by_component = np.repeat(widths, GROUP_SIZE, axis=1)
    # Only the relative weights of one head's tokens mean something.
    weights = weights / np.maximum(weights.mean(axis=2, keepdims=True), np.finfo(np.float32).tiny)
    for width in sorted({int(width) for width in widths.flat} - {0}):
        parts, part_weights = [], []
        for layer in range(layers):
            chosen = samples[layer][:, :, by_component[layer] == width]
            parts.append(chosen.reshape(-1))
            part_weights.append(np.broadcast_to(weights[layer][:, :, None], chosen.shape).reshape(-1))
        pooled, pooled_weights = np.concatenate(parts), np.concatenate(part_weights)
        both, both_weights = np.concatenate([pooled, -pooled]), np.tile(pooled_weights, 2)
        levels = lloyd_max(both, 2**width, both_weights).levels
        tables[f"{kind}_levels_{width}"] = np.tile((levels - levels[::-1]) / 2, (layers, 1))
    return tables
