"""What codes of a few bits leave of a unit Gaussian, computed, not measured."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from esm_turbo.codecs.fitting.lloyd_max import gaussian_lloyd_max, gaussian_uniform
from esm_turbo.codecs.fitting.statistics import Array


def lloyd_max(bits: int) -> tuple[float, float]:
    """Mean squared error with 2^bits Lloyd-Max levels, and read without the last bit of the index."""
    quantiser = gaussian_lloyd_max(2**bits)
    whole = _distortion(quantiser.levels, quantiser.boundaries)
    outer = quantiser.boundaries[1::2]
    return whole, _distortion(_means(outer), outer)


def evenly_spaced(bits: int) -> tuple[float, float]:
    """The same with evenly spaced levels; without the last bit the middle of two levels is read."""
    step = gaussian_uniform(2**bits).step
    levels = (np.arange(2**bits) - (2**bits - 1) / 2) * step
    whole = _distortion(levels, (levels[1:] + levels[:-1]) / 2)
    middles = (levels[::2] + levels[1::2]) / 2
    return whole, _distortion(middles, (middles[1:] + middles[:-1]) / 2)


def sign_of_residual(bits: int, per_level: bool = False) -> tuple[float, float]:
    """The same with 2^(bits - 1) Lloyd-Max levels and the sign of the residual.

    Args:
        bits: the sign included.
        per_level: a magnitude for every level in place of one, the mean absolute residual (the paper's).
    """
    quantiser = gaussian_lloyd_max(2 ** (bits - 1))
    edges = np.sort(np.concatenate([quantiser.boundaries, quantiser.levels]))
    mass, first, _ = _moments(edges)
    # Cells lie in pairs, one below and one above their level.
    level = np.repeat(quantiser.levels, 2)
    absolute = np.abs(first - level * mass)
    magnitudes = absolute.reshape(-1, 2).sum(1) / mass.reshape(-1, 2).sum(1)
    if not per_level:
        magnitudes = np.full_like(magnitudes, absolute.sum())
    read = level + np.repeat(magnitudes, 2) * np.tile([-1.0, 1.0], len(magnitudes))
    return _distortion(read, edges), quantiser.distortion


def _distortion(levels: Array, boundaries: Array) -> float:
    mass, first, second = _moments(boundaries)
    return float((second - 2 * levels * first + levels**2 * mass).sum())


def _means(boundaries: Array) -> Array:
    mass, first, _ = _moments(boundaries)
    return np.asarray(first / mass)


def _moments(boundaries: Array) -> tuple[Array, Array, Array]:
    """Integrals of 1, x and x^2 over the cells between boundaries."""
    edges = np.concatenate([[-np.inf], boundaries, [np.inf]])
    density = norm.pdf(edges)
    weighted = np.where(np.isfinite(edges), edges, 0.0) * density
    mass = np.diff(norm.cdf(edges))
    return mass, -np.diff(density), mass - np.diff(weighted)
