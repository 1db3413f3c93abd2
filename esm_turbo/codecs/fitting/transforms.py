"""Per-head rotations and other linear maps of keys and values before quantisation, fitted in float64 on the CPU.

`KVCodec.transform` (codecs/base.py) applies them, after RoPE.

Every function takes or returns stacks [..., head_dim, head_dim], one matrix per head, and returns a `Transform`: T,
which acts on column vectors (k' = T k), and its inverse. A query passes through the transposed inverse, q' = T^-T q, so
that q'.k' = q.k; the weighted sum of transformed values passes through the inverse once.

| map | T | purpose |
| --- | --- | --- |
| `svd_rotation` | V^T of the SVD of the stacked vectors | the paper's: concentrates the variance |
| `random_hadamard` | H diag(signs) / sqrt(head_dim) | data-free: spreads the variance |
| `standardized` | diag(1 / standard deviations) T | one codebook fits all components |
| `query_aware` | E^T S_q^(1/2) | equal errors cost equally in the output |

Second moments are means of x x^T: about zero (*second moment*) or about the mean (*covariance*).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import hadamard

FloatArray = NDArray[np.float64]

_MIN_RELATIVE_EIGENVALUE = 1e-10
"""Floor of the queries' eigenvalues, whose square roots are inverted, as a fraction of the largest."""
_SYMMETRY_TOLERANCE = 1e-4
_ROUNDING = 1e-9


class Transform(NamedTuple):
    """An invertible map.

    Attributes:
        forward: T, float64 [..., head_dim, head_dim].
        inverse: T^-1, the same shape.
    """

    forward: FloatArray
    inverse: FloatArray


def svd_rotation(second_moment: ArrayLike) -> Transform:
    """The rotation to principal directions (TurboESM section 3.2).

    With X [tokens, head_dim] the stacked vectors and X = U S V^T, T is V^T. The right singular vectors are the
    eigenvectors of the uncentred second moment X^T X / tokens, so that X itself is not needed. Rows are in order of
    falling variance; the entry of largest magnitude in each row is positive.

    Args:
        second_moment: [..., head_dim, head_dim], symmetric and positive semi-definite, of post-RoPE keys.

    Returns:
        An orthogonal T; its inverse is its transpose.

    Raises:
        ValueError: not square, not symmetric, NaN or infinity.
    """
    _, vectors = _falling_eigh(_checked_moment(second_moment, "second_moment"))
    rows = _transposed(vectors)
    rows = rows * _row_signs(rows)
    return Transform(rows, _transposed(rows).copy())


def random_hadamard(head_dim: int, seed: int) -> Transform:
    """Random signs followed by a Hadamard matrix: every component becomes a signed mean of all, independent of data.

    The Hadamard matrix is Sylvester's for powers of two and otherwise the Kronecker product of Sylvester's and Paley's
    first construction where one exists (12, 20, 24, 28, 44, 48 and so on, including the head size 24 of ESM-2 35M): all
    entries have magnitude head_dim^(-1/2). For other sizes 2^a m, m odd, it is the Kronecker product of Sylvester's
    matrix and a random rotation of m components drawn from the Haar measure, whose entries differ in magnitude.

    Args:
        head_dim: number of components.
        seed: seed of the signs (and of the rotation), not negative.

    Returns:
        An orthogonal T [head_dim, head_dim]; its inverse is its transpose.
    """
    rng = np.random.default_rng(seed)
    signs = rng.choice((-1.0, 1.0), size=(1, head_dim))
    rows = _hadamard_like(head_dim, rng) * signs
    return Transform(rows, _transposed(rows).copy())


def standardized(transform: tuple[ArrayLike, ArrayLike], second_moment: ArrayLike, smallest: float) -> Transform:
    """Divide each component after a map by its root mean square, so that one codebook fits all.

    A component whose root mean square is below a small fraction of the largest of its head is divided by that floor
    instead: it stays near zero and adds hardly any error. A head that is zero throughout is unchanged.

    Args:
        transform: the map (T, T^-1), [..., head_dim, head_dim].
        second_moment: second moment of the map's input, [..., head_dim, head_dim]; about zero or about the mean.
        smallest: the floor, as a fraction of the largest root mean square.

    Returns:
        diag(1 / s) T and T^-1 diag(s), with s_i^2 = (T second_moment T^T)_ii.
    """
    forward, inverse = (np.asarray(part, dtype=np.float64) for part in transform)
    std = np.sqrt(component_variances((forward, inverse), second_moment))
    largest = std.max(axis=-1, keepdims=True)
    std = np.where(largest > 0, np.maximum(std, smallest * largest), 1.0)
    return Transform(forward / std[..., :, None], inverse * std[..., None, :])


def inverted(forward: ArrayLike) -> FloatArray:
    """Inverse of maps in float32, [..., head_dim, head_dim]: as good as that of the fit, and it need not be stored."""
    return np.linalg.inv(np.asarray(forward, dtype=np.float32).astype(np.float64))


def component_variances(transform: tuple[ArrayLike, ArrayLike], second_moment: ArrayLike) -> FloatArray:
    """Mean square of each component after a map, the diagonal of T second_moment T^T, float64 [..., head_dim].

    Args:
        transform: the map (T, T^-1), [..., head_dim, head_dim].
        second_moment: second moment of the map's input, the same shape; about zero or about the mean.
    """
    forward, moment = np.asarray(transform[0], dtype=np.float64), np.asarray(second_moment, dtype=np.float64)
    # Rounding may leave slightly negative numbers.
    return np.asarray(np.maximum(np.sum((forward @ moment) * forward, axis=-1), 0.0))


def query_aware(
    key_covariance: ArrayLike,
    query_second_moment: ArrayLike,
    shrinkage: float = 0.0,
    *,
    rotary_pairs: bool = True,
) -> Transform:
    """The map after which equal squared errors of components cost equally in the scores.

    The expected squared error of q.k is tr(S_q S_e), with S_e the second moment of the error of k. T = E^T S_q^(1/2)
    turns it into the sum of squared errors, and with E the eigenvectors of S_q^(1/2) S_k S_q^(1/2) components are
    uncorrelated, in order of falling variance. Any other square root of S_q gives the same T. For values, S_q is W^T W
    with W the head's columns of the output projection.

    Both moments are shrunk first, S <- (1 - shrinkage) S + shrinkage D, with D the diagonal of S in which the two
    channels of each RoPE pair (i, i + head_dim / 2, as in `rotate_half`) share their mean. D scales with a pair as S
    does: scaling keys by a and queries by 1/a, pair by pair, leaves T k unchanged.

    Args:
        key_covariance: S_k, [..., head_dim, head_dim], about the mean that is subtracted from keys.
        query_second_moment: S_q, the same shape, about zero. Directions without queries are kept invertible.
        shrinkage: weight of D, 0 to 1.
        rotary_pairs: False if channels are not RoPE pairs (values): D is then the plain diagonal.

    Returns:
        T and T^-1. In each row of T, the entry with the largest effect on its component is positive.

    Raises:
        ValueError: not square, not symmetric, NaN or infinity.
    """
    keys = _checked_moment(key_covariance, "key_covariance")
    queries = _checked_moment(query_second_moment, "query_second_moment")
    # In units of the queries' own scale, planted outliers vanish before anything is rounded.
    scale = _with_zeros_replaced(np.sqrt(_diagonal(queries, rotary_pairs)))
    outer = scale[..., :, None] * scale[..., None, :]
    keys = _shrunk(keys * outer, shrinkage, rotary_pairs)
    queries = _shrunk(queries / outer, shrinkage, rotary_pairs)
    root, inverse_root = _square_roots(queries)
    _, vectors = _falling_eigh(_symmetric(root @ keys @ root))
    rows = _transposed(vectors) @ root
    spread = np.sqrt(_diagonal(keys, rotary_pairs))
    flip = _row_signs(rows * np.where(spread.any(axis=-1, keepdims=True), spread, 1.0)[..., None, :])
    forward = flip * rows * scale[..., None, :]
    inverse = (inverse_root @ vectors) * _transposed(flip) / scale[..., :, None]
    return Transform(forward, inverse)


def _checked_moment(moment: ArrayLike, name: str) -> FloatArray:
    matrix = np.asarray(moment, dtype=np.float64)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"`{name}` must be [..., head_dim, head_dim], got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError(f"`{name}` holds NaN or infinity")
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    # A covariance computed as a difference of two sums may be slightly negative.
    rounding = _ROUNDING * np.abs(diagonal).max(axis=-1)
    if (diagonal < -rounding[..., None]).any():
        raise ValueError(f"`{name}` has a negative diagonal")
    # In units of correlation, so that an outlier channel does not hide asymmetry elsewhere.
    std = np.sqrt(np.maximum(diagonal, 0.0))
    bound = _SYMMETRY_TOLERANCE * std[..., :, None] * std[..., None, :] + rounding[..., None, None]
    if (np.abs(matrix - _transposed(matrix)) > bound).any():
        raise ValueError(f"`{name}` is not symmetric")
    return _symmetric(matrix)


def _transposed(matrix: FloatArray) -> FloatArray:
    return np.swapaxes(matrix, -1, -2)


def _symmetric(matrix: FloatArray) -> FloatArray:
    return 0.5 * (matrix + _transposed(matrix))


def _falling_eigh(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues [..., n] in falling order and eigenvectors as columns [..., n, n]."""
    values, vectors = np.linalg.eigh(matrix)
    return values[..., ::-1], vectors[..., ::-1]


def _row_signs(rows: FloatArray) -> FloatArray:
    """Sign of the entry of largest magnitude in each row, [..., n, 1]."""
    index = np.abs(rows).argmax(axis=-1)[..., None]
    return np.where(np.take_along_axis(rows, index, axis=-1) < 0, -1.0, 1.0)


def _diagonal(matrix: FloatArray, rotary_pairs: bool) -> FloatArray:
    """Non-negative diagonal [..., n]; with `rotary_pairs`, both channels of a RoPE pair get their mean."""
    diagonal = np.maximum(np.diagonal(matrix, axis1=-2, axis2=-1), 0.0)
    if not rotary_pairs:
        return np.asarray(diagonal)
    first, second = np.split(diagonal, 2, axis=-1)
    mean = 0.5 * (first + second)
    return np.concatenate((mean, mean), axis=-1)


def _with_zeros_replaced(scale: FloatArray) -> FloatArray:
    """Replace zeros by the smallest positive value of the row, or by 1 if there is none."""
    positive = np.where(scale > 0, scale, np.inf)
    smallest = positive.min(axis=-1, keepdims=True)
    return np.where(scale > 0, scale, np.where(np.isfinite(smallest), smallest, 1.0))


def _shrunk(matrix: FloatArray, shrinkage: float, rotary_pairs: bool) -> FloatArray:
    target = _diagonal(matrix, rotary_pairs)[..., None, :] * np.eye(matrix.shape[-1])
    return (1.0 - shrinkage) * matrix + shrinkage * target


def _square_roots(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Symmetric square root and its inverse, [..., n, n]; small eigenvalues are raised to a floor."""
    values, vectors = np.linalg.eigh(matrix)
    largest = values[..., -1:]
    floor = np.where(largest > 0, _MIN_RELATIVE_EIGENVALUE * largest, 1.0)
    root = np.sqrt(np.maximum(values, floor))[..., None, :]
    return (vectors * root) @ _transposed(vectors), (vectors / root) @ _transposed(vectors)


def _hadamard_like(size: int, rng: np.random.Generator) -> FloatArray:
    """Sylvester's matrix, alone or in a Kronecker product with Paley's or a random rotation; orthogonal."""
    if size & (size - 1) == 0:
        return _sylvester(size)
    factor, rest = 1, size
    while (core := _paley(rest)) is None:
        if rest % 2:
            core = haar_rotation(rest, rng)
            break
        factor, rest = 2 * factor, rest // 2
    return np.asarray(np.kron(_sylvester(factor), core), dtype=np.float64)


def _sylvester(size: int) -> FloatArray:
    return np.asarray(hadamard(size) / np.sqrt(size))


def _paley(size: int) -> FloatArray | None:
    """Paley's Hadamard matrix (construction I) over sqrt(size), if size - 1 is a prime q with q % 4 == 3; else None."""
    q = size - 1
    if q % 4 != 3 or any(q % divisor == 0 for divisor in range(2, int(q**0.5) + 1)):
        return None
    residue = -np.ones(q)
    residue[np.arange(1, q) ** 2 % q] = 1.0
    residue[0] = 0.0
    skew = np.ones((size, size))
    skew[0, 0] = 0.0
    skew[1:, 0] = -1.0
    skew[1:, 1:] = residue[np.subtract.outer(np.arange(q), np.arange(q)) % q]
    return np.asarray((skew + np.eye(size)) / np.sqrt(size))


def haar_rotation(size: int, rng: np.random.Generator) -> FloatArray:
    """An orthogonal matrix [size, size], uniform over all of them."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    # Without this correction the distribution depends on the signs of R's diagonal.
    return np.asarray(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))
