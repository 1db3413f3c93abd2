"""The best quantiser of a unit Gaussian, computed from its density."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_banded
from scipy.special import ndtr, ndtri

from esm_turbo.codecs.fitting.statistics import Array

_MAX_NEWTON_STEPS = 100


class LloydMax(NamedTuple):
    """Ascending levels, the midpoints between them, and the mean squared error."""

    levels: Array
    boundaries: Array
    distortion: float


@lru_cache
def gaussian_lloyd_max(levels: int) -> LloydMax:
    """The Lloyd-Max quantiser of the standard normal distribution, by Newton's method (Max 1960, table I)."""
    # Panter and Dite (1951): optimal levels are dense as the cube root of the density, here a wider Gaussian.
    centres = np.sqrt(3.0) * ndtri((np.arange(levels) + 0.5) / levels)
    for _ in range(_MAX_NEWTON_STEPS):
        boundaries = _midpoints(centres)
        mass, first, _ = _moments(boundaries)
        mean = first / mass
        residual = centres - mean
        if np.abs(residual).max() < 1e-14:
            break
        # Derivative of a cell's mean by its lower and its upper edge; edges at infinity do not move.
        density = _density(boundaries)
        lower_slope = np.append(0.0, density * (mean[1:] - boundaries) / mass[1:])
        upper_slope = np.append(density * (boundaries - mean[:-1]) / mass[:-1], 0.0)
        # Row i of the Jacobian of centre - mean holds centres i - 1, i and i + 1.
        bands = np.zeros((3, levels))
        bands[0, 1:] = -0.5 * upper_slope[:-1]
        bands[1] = 1.0 - 0.5 * (lower_slope + upper_slope)
        bands[2, :-1] = -0.5 * lower_slope[1:]
        step = solve_banded((1, 1), bands, residual)
        # A step that would swap centres is shortened; near the solution it never is.
        gap = np.diff(step) / np.diff(centres)
        centres = centres - step / max(1.0, 2.0 * float(gap.max(initial=0.0)))
        centres = 0.5 * (centres - centres[::-1])
    boundaries = _midpoints(centres)
    return LloydMax(centres, boundaries, _distortion(centres, boundaries))


def _distortion(levels: Array, boundaries: Array) -> float:
    mass, first, second = _moments(boundaries)
    return float((second - 2 * levels * first + levels**2 * mass).sum())


def _moments(boundaries: Array) -> tuple[Array, Array, Array]:
    """Integrals of 1, x and x^2 over the cells between boundaries, [cells] each."""
    edges = np.concatenate([[-np.inf], boundaries, [np.inf]])
    lower, upper = edges[:-1], edges[1:]
    # The difference of the nearer tails keeps its digits.
    mass = np.where(lower > 0, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    density = _density(edges)
    weighted = np.where(np.isfinite(edges), edges, 0.0) * density
    return mass, -np.diff(density), mass - np.diff(weighted)


def _density(x: Array) -> Array:
    return np.asarray(np.exp(-0.5 * x**2) / np.sqrt(2.0 * np.pi))


def _midpoints(levels: Array) -> Array:
    return (levels[1:] + levels[:-1]) / 2
