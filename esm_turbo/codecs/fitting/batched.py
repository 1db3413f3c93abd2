"""Scalar quantisers of many samples at once, as tensors on a device that has float64.

`lloyd_max` and `Magnitudes` compute what those of `fitting.lloyd_max` do, up to the rounding of sums.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esm_turbo.codecs.fitting import lloyd_max as reference
from esm_turbo.codecs.fitting.lloyd_max import LLOYD_TOLERANCE, MAX_LLOYD_STEPS, FloatArray, num_bins

_ROWS = 128
"""Samples that are sorted together, which bounds memory."""


def lloyd_max(samples: Tensor, levels: int) -> Tensor:
    """Levels of the Lloyd-Max quantisers of samples, see `fitting.lloyd_max.lloyd_max`.

    Args:
        samples: floats [rows, n], finite.
        levels: number of levels.

    Returns:
        Float64 [rows, levels], on the samples' device.
    """
    return torch.cat([_of_rows(rows, levels) for rows in samples.split(_ROWS)])


def _of_rows(samples: Tensor, levels: int) -> Tensor:
    x = samples.sort(dim=1).values.double()
    scale = x.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    unit = x / scale
    middle = unit.mean(1, keepdim=True)
    unit -= middle
    enough = unit.diff(dim=1).count_nonzero(1) >= 2 * num_bins(levels)
    found = x.new_empty(len(x), levels)
    means, is_sound = _iterated(_PrefixSums(unit[enough]), levels)
    found[enough] = (means + middle[enough]) * scale[enough]
    enough[enough.clone()] = is_sound
    # Few distinct values, or a level that lost its samples.
    for row in (~enough).nonzero()[:, 0].tolist():
        found[row] = torch.from_numpy(reference.lloyd_max(samples[row].cpu().numpy(), levels))
    return found


def _iterated(sums: _PrefixSums, levels: int) -> tuple[Tensor, Tensor]:
    """Levels after Lloyd's iteration [rows, levels], and in which rows each kept its samples, bool [rows]."""
    edges = _initial_edges(sums, levels)
    is_sound = torch.ones_like(edges[:, 0], dtype=torch.bool)
    active, error = is_sound, sums.x.new_full((len(edges),), torch.inf)
    for _ in range(MAX_LLOYD_STEPS):
        if not bool(active.any()):
            break
        means, moved = sums.means(edges), edges.clone()
        moved[:, 1:-1] = torch.searchsorted(sums.x, 0.5 * (means[:, :-1] + means[:, 1:]), right=True)
        is_sound = is_sound & ~(active & (moved.diff(dim=1) == 0).any(1))
        active = active & is_sound & (moved != edges).any(1)
        edges = torch.where(active[:, None], moved, edges)
        previous, error = error, torch.where(active, sums.squared_errors(edges[:, :-1], edges[:, 1:]).sum(1), error)
        active = active & (previous - error > LLOYD_TOLERANCE * error)
    return sums.means(edges), is_sound


class _PrefixSums:
    """Sums of values and squares over any run of ascending rows [rows, n]."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.first, self.second = (pad(terms.cumsum(1), (1, 0)) for terms in (x, x * x))

    def means(self, edges: Tensor) -> Tensor:
        """Mean of each run between neighbouring edges [rows, runs + 1], none of which is empty."""
        means = self.first.gather(1, edges).diff(dim=1) / edges.diff(dim=1)
        return means.clamp(self.x.gather(1, edges[:, :-1]), self.x.gather(1, edges[:, 1:] - 1))

    def squared_errors(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Sum of squared distances from the mean in each run [start, end), [rows, runs]; 0 for an empty run."""
        first, second = (sums.gather(1, ends) - sums.gather(1, starts) for sums in (self.first, self.second))
        return (second - first * first / (ends - starts).clamp(min=1)).clamp(min=0)


def _initial_edges(sums: _PrefixSums, levels: int) -> Tensor:
    """Edges [rows, levels + 1] from which Lloyd's iteration starts, see the reference."""
    x, bins = sums.x, num_bins(levels)
    rows, n = x.shape
    places = torch.arange(1, n, device=x.device).expand(rows, -1).contiguous()
    begins = x[:, 1:] != x[:, :-1]
    number = begins.cumsum(1)
    # How many values before each place are equal to the one just before it.
    latest = torch.where(begins, places, 0).cummax(1).values
    equal = places - pad(latest[:, :-1], (1, 0))
    dense = (equal * x.diff(dim=1).square()).pow(1 / 3).cumsum(1)
    shares = torch.arange(1, bins, device=x.device) / bins
    by_density = torch.searchsorted(dense, dense[:, -1:] * shares.to(x.dtype)) + 1
    ranks = torch.arange(bins // 2, device=x.device) * (number[:, -1:] - 1) // (bins // 2 - 1)
    by_rank = torch.searchsorted(number, ranks + 1) + 1
    ends = places.new_tensor([[0, n]]).expand(rows, -1)
    edges = torch.cat([ends, by_density, by_rank], dim=1).clamp(max=n).sort(dim=1).values
    count = edges.shape[1]
    upper = edges[:, :, None].expand(-1, count, count).flatten(1)
    lower = edges[:, None].expand(-1, count, count).flatten(1)
    costs = torch.where(lower < upper, sums.squared_errors(lower, upper), torch.inf).unflatten(1, (count, count))
    best, choices = costs[:, :, 0], []
    for _ in range(levels - 1):
        best, choice = (costs + best[:, None]).min(dim=2)
        choices.append(choice)
    chosen = [torch.full_like(edges[:, :1], count - 1)]
    for choice in reversed(choices):
        chosen.append(choice.gather(1, chosen[-1]))
    return edges.gather(1, torch.cat([edges.new_zeros(rows, 1), *reversed(chosen)], dim=1))


class Magnitudes:
    """Magnitudes of a sample in ascending order, see `fitting.lloyd_max.Magnitudes`.

    Args:
        samples: floats of any shape, pooled; finite.
        weights: of each sample, of the same shape; not negative, and not all zero.
    """

    def __init__(self, samples: Tensor, weights: Tensor) -> None:
        x, w = samples.abs().flatten().double(), weights.flatten().double()
        x, w = x[w > 0], w[w > 0]
        # Equal values by their weights: sums depend on the order by rounding.
        w, order = w.sort()
        x, by_value = x[order].sort(stable=True)
        self.largest, self.heaviest = float(x[-1]), float(w[-1])
        self.x, w = x / (self.largest or 1.0), w[by_value] / self.heaviest
        # Of weights, and of weighted magnitudes.
        self._sums = pad(torch.stack([w, w * self.x]).cumsum(1), (1, 0))
        self.total, self.power = float(self._sums[0, -1]), float((w * self.x).dot(self.x))

    def moments(self, steps: FloatArray, levels: int) -> tuple[FloatArray, FloatArray]:
        """See `fitting.lloyd_max.Magnitudes.moments`."""
        boundaries = steps[:, None] * np.arange(levels // 2 + 1)
        boundaries[:, 0], boundaries[:, -1] = -1.0, np.inf
        edges = torch.searchsorted(self.x, torch.from_numpy(boundaries).to(self.x.device), right=True)
        zeroth, first = self._sums[:, edges].diff(dim=2).cpu().numpy()
        centres = np.arange(levels // 2) + 0.5
        return first @ centres, zeroth @ centres**2
