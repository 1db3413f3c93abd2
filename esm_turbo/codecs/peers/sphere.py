"""Codebooks for components of a unit vector; after a random rotation all components have the same distribution.

A component t of a uniform direction in d dimensions has a density proportional to (1 - t^2)^((d - 3) / 2), a Beta
distribution on [-1, 1] of variance 1 / d that tends to a Gaussian. Its Lloyd-Max quantiser is computed from a fine grid
of its quantiles.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import betaincinv, gammaln

from esm_turbo.codecs.fitting.lloyd_max import lloyd_max
from esm_turbo.codecs.fitting.statistics import Array

_QUANTILES = (np.arange(8192) + 0.5) / 8192


@lru_cache
def sphere_levels(dim: int, bits: int) -> Array:
    """Lloyd-Max levels of a component of a uniform unit vector, ascending, [2^bits].

    Args:
        dim: components of the vector, at least 2.
        bits: bits per code.
    """
    shape = (dim - 1) / 2
    levels = lloyd_max(2 * betaincinv(shape, shape, _QUANTILES) - 1, 2**bits)
    return (levels - levels[::-1]) / 2


@lru_cache
def rayleigh_levels(dim: int, bits: int) -> Array:
    """Lloyd-Max levels of the radius of two such components, Rayleigh with scale dim^(-1/2), ascending, [2^bits]."""
    return lloyd_max(np.sqrt(-2 * np.log1p(-_QUANTILES) / dim), 2**bits)


def mean_absolute_component(dim: int) -> float:
    """E|t| = Gamma(d / 2) / (sqrt(pi) Gamma((d + 1) / 2)), close to sqrt(2 / (pi d))."""
    return float(np.exp(gammaln(dim / 2) - gammaln((dim + 1) / 2)) / np.sqrt(np.pi))
