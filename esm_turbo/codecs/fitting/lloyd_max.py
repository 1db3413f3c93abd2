"""Scalar quantisers of samples, in float64 on the CPU: Lloyd-Max levels and evenly spaced ones.

A quantiser of n levels c_1 <= ... <= c_n maps x to the nearest level: cell i is the interval between the
boundaries (midpoints) on either side of c_i, the upper one included, which is the tie rule of
`esm_turbo.codecs.packing.quantize`. A quantiser of least mean squared error satisfies two conditions at once (Lloyd
1957, published in IEEE Trans. Inf. Theory 28, 129 (1982); Max, IRE Trans. Inf. Theory 6, 7 (1960)): boundaries are
midpoints of levels, and each level is the mean of its cell. A sample can have many such quantisers. The best is sought
by dynamic programming on bins of the sorted sample, followed by Lloyd's iteration on the sample itself.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

MAX_LEVELS = 256

MAX_LLOYD_STEPS = 1000
LLOYD_TOLERANCE = 1e-8
"""Iterations stop when the distortion falls by less than this fraction."""
_STEPS_TRIED = np.exp2(np.arange(-70, 106) / 35)
"""Candidate steps of evenly spaced levels, in units of the Gaussian quantiser's step."""
_MIN_BINS = 128
_BINS_PER_LEVEL = 4


def lloyd_max(samples: ArrayLike, levels: int, weights: ArrayLike | None = None) -> FloatArray:
    """Levels of the Lloyd-Max quantiser of a sample.

    The result does not depend on the order of the sample, and shifts and scales with it. If the sample has no more
    distinct values than levels, each value is a level, and the largest one is repeated.

    Args:
        samples: real numbers of any shape, pooled; sorted in their own dtype.
        levels: number of levels, 1 to 256.
        weights: non-negative weight of each sample, of the same shape; samples of weight 0 are ignored.

    Returns:
        Decoded value of each code, ascending, float64 [levels].

    Raises:
        ValueError: no samples, NaN or infinity, weights that are negative, not finite, all zero or of another
            shape, or `levels` outside 1 to 256.
    """
    _check_levels(levels)
    x, w = _ascending(samples, weights)
    starts = _run_starts(x)
    if len(starts) > levels:
        # Centred and scaled to 1, so that squares neither overflow nor cancel; distinct values may merge.
        scale = float(np.abs(x).max())
        unit = x / scale
        middle = float(np.average(unit, weights=w))
        unit -= middle
        starts = _run_starts(unit)
    if len(starts) <= levels:
        values = x[starts]
        return np.concatenate((values, np.full(levels - len(values), values[-1])))
    sums = _PrefixSums(unit, w)
    return (_lloyd(sums, starts, _initial_ends(sums, starts, levels)) + middle) * scale


class UniformQuantizer(NamedTuple):
    """A quantiser with evenly spaced levels, symmetric about 0: (k + 1/2) step for -n/2 <= k < n/2.

    Attributes:
        step: distance between neighbouring levels.
        distortion: mean squared error on the sample or density.
    """

    step: float
    distortion: float


@lru_cache(maxsize=MAX_LEVELS)
def gaussian_uniform(levels: int) -> UniformQuantizer:
    """The best evenly spaced quantiser of the standard normal distribution (Max 1960, table II).

    Args:
        levels: number of levels, even, 2 to 256.

    Raises:
        ValueError: `levels` is odd, or outside 2 to 256.
    """
    _check_even(levels)
    centres = np.arange(levels, dtype=np.float64) - (levels - 1) / 2

    def distortion(step: float) -> float:
        mass, mean = _gaussian_cells(centres * step)
        return 1.0 - float(np.sum(mass * centres * step * (2.0 * mean - centres * step)))

    # The outermost level lies about one to five standard deviations from 0, closer for fewer levels.
    best = minimize_scalar(distortion, bounds=(1 / levels, 12 / levels), method="bounded", options={"xatol": 1e-12})
    return UniformQuantizer(float(best.x), float(best.fun))


def uniform_quantizer(samples: ArrayLike, levels: int, weights: ArrayLike | None = None) -> UniformQuantizer:
    """The evenly spaced quantiser of a sample.

    With many levels and heavy tails the error has many local minima as a function of the step. The best of a range of
    steps around the Gaussian quantiser's is refined by Lloyd's iteration, which alternates between nearest levels and
    the best step.

    Args:
        samples: real numbers of any shape, pooled.
        levels: number of levels, even, 2 to 256.
        weights: non-negative weight of each sample, of the same shape; samples of weight 0 are ignored.

    Returns:
        The quantiser, with its (weighted) mean squared error on the sample.

    Raises:
        ValueError: no samples, NaN or infinity, no sample other than zero, weights that are negative, not finite, all
            zero or of another shape, or `levels` odd or outside 2 to 256.
    """
    return pooled_uniform_quantizer([Magnitudes(samples, weights)], levels)


class SortedMagnitudes(Protocol):
    """`Magnitudes`, here or on a device (fitting/batched.py)."""

    largest: float
    heaviest: float
    total: float
    power: float

    def moments(self, steps: FloatArray, levels: int) -> tuple[FloatArray, FloatArray]: ...


class Magnitudes:
    """Magnitudes of a sample in ascending order, with sums that give the moments of evenly spaced quantisers.

    Args:
        samples: real numbers of any shape, pooled.
        weights: non-negative weight of each sample, of the same shape.

    Raises:
        ValueError: as `uniform_quantizer`, if not for `levels` and samples that are all zero.
    """

    def __init__(self, samples: ArrayLike, weights: ArrayLike | None = None) -> None:
        x = np.asarray(samples)
        _check_samples(x)
        x, w = _ascending(np.abs(x, dtype=np.float64), weights)
        self.largest = float(x[-1])
        self.heaviest = 1.0 if weights is None else float(np.max(weights))
        self.x = x / (self.largest or 1.0)
        self._zeroth, self._first = np.zeros((2, len(x) + 1))
        np.cumsum(w, out=self._zeroth[1:])
        w *= self.x
        np.cumsum(w, out=self._first[1:])
        self.total, self.power = float(self._zeroth[-1]), float(np.dot(w, self.x))

    def moments(self, steps: FloatArray, levels: int) -> tuple[FloatArray, FloatArray]:
        """Sums of centre times magnitude and of the squared centre, with centres in units of the step, [steps] each.

        Args:
            steps: distances between levels, in units of the largest magnitude, [steps].
            levels: number of levels.
        """
        edges = np.zeros((len(steps), levels // 2 + 1), dtype=np.intp)
        edges[:, 1:-1] = np.searchsorted(self.x, steps[:, None] * np.arange(1, levels // 2), side="right")
        edges[:, -1] = len(self.x)
        centres = np.arange(levels // 2) + 0.5
        return np.diff(self._first[edges]) @ centres, np.diff(self._zeroth[edges]) @ centres**2


def pooled_uniform_quantizer(parts: Sequence[SortedMagnitudes], levels: int) -> UniformQuantizer:
    """The evenly spaced quantiser of samples that are pooled, see `uniform_quantizer`; each is sorted but once.

    Raises:
        ValueError: no sample other than zero, or `levels` odd or outside 2 to 256.
    """
    _check_even(levels)
    scale, heaviest = max(part.largest for part in parts) or 1.0, max(part.heaviest for part in parts)
    sizes = [part.largest / scale for part in parts]
    shares = [part.heaviest / heaviest for part in parts]
    total = sum(share * part.total for share, part in zip(shares, parts, strict=True))
    power = sum(share * size**2 * part.power for share, size, part in zip(shares, sizes, parts, strict=True)) / total
    if power == 0.0:
        raise ValueError("`samples` are all zero: no step is best")

    def moments(steps: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Means of centre times sample and of the squared centre, and the distortion."""
        first, zeroth = np.zeros((2, len(steps)))
        for share, size, part in zip(shares, sizes, parts, strict=True):
            # Where all are zero, every step is too large.
            one, other = part.moments(steps / size if size else np.full_like(steps, 2.0), levels)
            first += share * size * one
            zeroth += share * other
        first, zeroth = first / total, zeroth / total
        return first, zeroth, np.maximum(power - steps * (2.0 * first - steps * zeroth), 0.0)

    steps = float(np.sqrt(power)) * gaussian_uniform(levels).step * _STEPS_TRIED
    best = int(moments(steps)[2].argmin())
    step = steps[best : best + 1]
    first, zeroth, distortion = moments(step)
    for _ in range(MAX_LLOYD_STEPS):
        step, previous = first / zeroth, distortion
        first, zeroth, distortion = moments(step)
        if previous - distortion <= LLOYD_TOLERANCE * distortion:
            break
    return UniformQuantizer(float(step[0]) * scale, float(distortion[0]) * scale * scale)


def _check_levels(levels: int) -> None:
    if levels not in range(1, MAX_LEVELS + 1):
        raise ValueError(f"`levels` must be one of 1 to {MAX_LEVELS}, got {levels}")


def _check_even(levels: int) -> None:
    _check_levels(levels)
    if levels % 2:
        raise ValueError(f"`levels` must be even, got {levels}")


def _check_samples(x: NDArray[Any]) -> None:
    if x.size == 0:
        raise ValueError("`samples` is empty")
    if x.dtype.kind not in "iuf":
        raise ValueError(f"`samples` must be real numbers, got {x.dtype}")
    if not np.isfinite(x).all():
        raise ValueError(f"`samples` holds {np.count_nonzero(~np.isfinite(x))} values that are NaN or infinite")


def _ascending(samples: ArrayLike, weights: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
    """Samples and weights in ascending order, without samples of weight 0, scaled to a largest weight of 1."""
    x = np.asarray(samples).ravel()
    _check_samples(x)
    if weights is None:
        return np.sort(x).astype(np.float64), np.ones(x.size)
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != np.shape(samples):
        raise ValueError(f"`weights` must have the shape of `samples` {np.shape(samples)}, got {w.shape}")
    w = w.ravel()
    if not np.isfinite(w).all() or (w < 0).any() or not w.any():
        raise ValueError("`weights` must be finite and non-negative, and not all zero")
    x, w = x[w > 0].astype(np.float64), w[w > 0]
    order = np.argsort(x)
    ascending = x[order]
    # Equal values by their weights: sums depend on the order by rounding. Most samples have few.
    same = ascending[1:] == ascending[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    order[tied] = order[tied][np.lexsort((w[order[tied]], ascending[tied]))]
    # Divided by the largest, because the sum of large weights may overflow.
    return ascending, w[order] / w.max()


def _midpoints(levels: FloatArray) -> FloatArray:
    # Halved first, because the sum may overflow.
    return 0.5 * levels[:-1] + 0.5 * levels[1:]


def _gaussian_cells(centres: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mass and mean of a standard normal variable in each cell, [levels] each."""
    edges = np.concatenate(([-np.inf], _midpoints(centres), [np.inf]))
    density = np.exp(-0.5 * edges**2) / np.sqrt(2.0 * np.pi)
    lower, upper = edges[:-1], edges[1:]
    # The difference of the nearer tails keeps its digits.
    mass = np.where(lower > 0, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    return mass, (density[:-1] - density[1:]) / mass


def _run_starts(x: FloatArray) -> IntArray:
    """Index of the first element of each run of equal values in an ascending sample."""
    return np.concatenate(([0], np.flatnonzero(x[1:] != x[:-1]) + 1))


class _PrefixSums:
    """Sums of weights, values and squares over any run of an ascending sample, each in constant time."""

    def __init__(self, x: FloatArray, weights: FloatArray) -> None:
        self.x = x
        self.zeroth, self.first, self.second = np.zeros((3, len(x) + 1))
        for sums, terms in ((self.zeroth, weights), (self.first, weights * x), (self.second, weights * x * x)):
            np.cumsum(terms, out=sums[1:])

    def means(self, edges: IntArray) -> FloatArray:
        """Mean of each run between neighbouring edges; no run may be empty."""
        lowest, highest = self.x[edges[:-1]], self.x[edges[1:] - 1]
        zeroth, first = self.zeroth[edges], self.first[edges]
        zeroth, first = zeroth[1:] - zeroth[:-1], first[1:] - first[:-1]
        # If rounding of the sums loses the weight of a run, its values still bound the mean.
        known = zeroth > 0
        means = np.where(known, first / np.where(known, zeroth, 1.0), lowest)
        return np.minimum(np.maximum(means, lowest), highest)

    def squared_errors(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """Sum of squared distances from the mean in each run [start, end); 0 for an empty run."""
        zeroth = self.zeroth[ends] - self.zeroth[starts]
        first = self.first[ends] - self.first[starts]
        second = self.second[ends] - self.second[starts]
        return np.maximum(second - first * first / np.where(zeroth > 0, zeroth, 1.0), 0.0)


def num_bins(levels: int) -> int:
    """Number of bins among whose unions the first cells are sought."""
    return max(_MIN_BINS, _BINS_PER_LEVEL * levels)


def _initial_ends(sums: _PrefixSums, starts: IntArray, levels: int) -> IntArray:
    """Edges [levels + 1] of the cells of least squared error among unions of bins.

    Bins follow the density of optimal levels, the cube root of the sample's density (Panter and Dite 1951), which is
    estimated from the gaps of the sorted sample: tails and a few planted outliers get bins of their own. Dynamic
    programming finds the best cells (Bruce 1965).
    """
    bins = num_bins(levels)
    candidates = starts[1:]
    if len(candidates) >= 2 * bins:
        gaps, masses = np.diff(sums.x[starts]), np.diff(sums.zeroth[starts])
        dense = np.cumsum(np.cbrt(masses * gaps * gaps))
        by_density = np.searchsorted(dense, dense[-1] * np.arange(1, bins) / bins)
        by_rank = np.arange(bins // 2) * (len(candidates) - 1) // (bins // 2 - 1)
        candidates = candidates[np.unique(np.concatenate((by_density, by_rank)))]
    edges = np.concatenate(([0], candidates, [len(sums.x)]))
    upper, lower = edges[:, None], edges[None, :]
    # costs[b, a]: squared error of one cell made of bins a to b - 1.
    costs = np.where(lower < upper, sums.squared_errors(lower, upper), np.inf)
    best = costs[:, 0]
    choices = []
    for _ in range(levels - 1):
        totals = costs + best
        choice = totals.argmin(axis=1)
        best = totals[np.arange(len(edges)), choice]
        choices.append(choice)
    last = len(edges) - 1
    chosen = [last]
    for choice in reversed(choices):
        last = int(choice[last])
        chosen.append(last)
    cells: IntArray = edges[[0, *reversed(chosen)]]
    return cells


def _lloyd(sums: _PrefixSums, starts: IntArray, edges: IntArray) -> FloatArray:
    """Levels after Lloyd's iteration, starting from non-empty cells between `edges` [levels + 1]."""
    error = np.inf
    for _ in range(MAX_LLOYD_STEPS):
        inner = np.searchsorted(sums.x, _midpoints(sums.means(edges)), side="right")
        moved = _without_empty_cells(sums, starts, np.concatenate(([0], inner, [len(sums.x)])))
        if np.array_equal(moved, edges):
            break
        edges = moved
        previous, error = error, float(sums.squared_errors(edges[:-1], edges[1:]).sum())
        if previous - error <= LLOYD_TOLERANCE * error:
            break
    return sums.means(edges)


def _without_empty_cells(sums: _PrefixSums, starts: IntArray, edges: IntArray) -> IntArray:
    """Replace each empty cell by splitting the cell of largest squared error at its best position."""
    if (edges[1:] > edges[:-1]).all():
        return edges
    kept = np.unique(edges)
    while len(kept) < len(edges):
        errors = sums.squared_errors(kept[:-1], kept[1:])
        errors[sums.x[kept[:-1]] == sums.x[kept[1:] - 1]] = -1.0
        cell = int(errors.argmax())
        first, last = np.searchsorted(starts, (kept[cell] + 1, kept[cell + 1]))
        splits = starts[first:last]
        halves = sums.squared_errors(kept[cell], splits) + sums.squared_errors(splits, kept[cell + 1])
        kept = np.sort(np.append(kept, splits[halves.argmin()]))
    return kept
