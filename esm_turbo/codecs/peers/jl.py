"""Sign sketches: quantised Johnson-Lindenstrauss, QJL (Zandieh, Daliri and Han 2024, arXiv:2406.03482).

A vector k is stored as the signs of m random projections and its norm. For a query q that is not quantised,

    c / m |k| sum_i sign(s_i . k) (s_i . q)

is an unbiased estimate of q . k over the projections s_i (Lemma 3.2): c is sqrt(pi / 2) for Gaussian rows, where the
variance is at most (pi / 2) |q|^2 |k|^2 / m, and 1 / E|t| for uniform unit rows with component t. The estimate is
linear in q, that is, the product of q and the vector c / m |k| sum_i sign(s_i . k) s_i. This vector is what `unsketch`
returns.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.fitting.statistics import Array
from esm_turbo.codecs.fitting.transforms import haar_rotation
from esm_turbo.codecs.packing import pack_codes, unpack_codes
from esm_turbo.codecs.peers.data_free import split_norm
from esm_turbo.codecs.peers.sphere import mean_absolute_component

GAUSSIAN_GAIN = math.sqrt(math.pi / 2)


def gaussian_projection(num_rows: int, dim: int, seed: int) -> Array:
    """Independent standard normal rows, [num_rows, dim]."""
    return _rng(seed).standard_normal((num_rows, dim))


def orthogonal_projection(num_rows: int, dim: int, seed: int) -> Array:
    """Unit rows, orthogonal within every `dim` of them: Gaussian matrices orthogonalised by QR, [num_rows, dim].

    QJL's authors find them more accurate than independent rows (section 4).
    """
    rng = _rng(seed)
    return np.concatenate([haar_rotation(dim, rng).T for _ in range(-(-num_rows // dim))])[:num_rows]


def orthogonal_gain(dim: int) -> float:
    """The constant c for unit rows."""
    return 1 / mean_absolute_component(dim)


def sketch(projection: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sketch vectors as the signs of their projections, and their norms.

    Args:
        projection: rows s_i, [m, n], m a multiple of 8.
        x: vectors [..., n].

    Returns:
        Packed signs uint8 [..., m / 8], norms bfloat16 [..., 1].
    """
    unit, norm = split_norm(x)
    return pack_codes((unit @ projection.T >= 0).to(torch.uint8), 1), norm


def unsketch(projection: Tensor, gain: float, signs: Tensor, norm: Tensor) -> Tensor:
    """Vectors [..., n] whose products with a query are the estimates."""
    signed = 2.0 * unpack_codes(signs, 1).float() - 1
    return signed @ projection * (gain / len(projection)) * norm.float()


def _rng(seed: int) -> np.random.Generator:
    # A separate stream: rotations are drawn from the seed itself.
    return np.random.default_rng((seed, 1))
