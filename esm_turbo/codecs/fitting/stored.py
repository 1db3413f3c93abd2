"""Statistics as the tensors of a calibration's file, and back.

Numbers are rounded to float32 and sampled tokens to bfloat16. A symmetric matrix is one triangle, row by row,
[..., n (n + 1) / 2]; files of format 1 hold it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.fitting.statistics import Array, KVStatistics, Moments, Sensitivity, TokenMoments, TokenSample
from esm_turbo.config import Geometry

_TOKEN_KINDS = ("residues", "specials")
_STATES = ("keys", "values")
_SYMMETRIC = ("covariance", "queries", "output_gram")


def to_tensors(statistics: KVStatistics, sampled: int | None = None) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors and counts of statistics.

    Args:
        statistics: the statistics.
        sampled: tokens of the sample to keep; None for all.
    """
    tensors = _arrays("", {"inv_freq": statistics.inv_freq, "output_gram": statistics.output_gram})
    sample = statistics.sample.at(slice(sampled))
    tensors |= {f"sample.{name}": torch.from_numpy(array) for name, array in vars(sample).items()}
    for name in ("sample.keys", "sample.values"):
        tensors[name] = tensors[name].to(torch.bfloat16)
    counts = {"sensitivity": statistics.sensitivity.count}
    for kind in _TOKEN_KINDS:
        moments = getattr(statistics, kind)
        tensors |= _arrays(f"moments.{kind}.", vars(moments))
        counts[kind] = moments.keys.count
    return tensors | _arrays("sensitivity.", vars(statistics.sensitivity)), counts


def from_tensors(tensors: Mapping[str, Tensor], counts: Mapping[str, int], geometry: Geometry) -> KVStatistics:
    """Statistics of the tensors and counts that `to_tensors` returns, or of files of format 1.

    Raises:
        KeyError: a tensor or a count is missing.
        ValueError: a tensor is not of this geometry.
    """

    def f64(name: str) -> Array:
        array = tensors[name].numpy().astype(np.float64)
        return _square(name, array, geometry.head_dim) if name.split(".")[-1] in _SYMMETRIC else array

    def moments(prefix: str, count: int | Array) -> Moments:
        return Moments(count, f64(f"{prefix}.mean"), f64(f"{prefix}.covariance"))

    residues, specials = (
        TokenMoments(*(moments(f"moments.{kind}.{state}", counts[kind]) for state in _STATES)) for kind in _TOKEN_KINDS
    )
    keys, values = (moments(f"sensitivity.{state}", f64(f"sensitivity.{state}.count")) for state in _STATES)
    sensitivity = Sensitivity(
        counts["sensitivity"],
        f64("sensitivity.key_mean"),
        keys,
        values,
        f64("sensitivity.queries"),
        f64("sensitivity.attention"),
    )
    sample = {field.name: tensors[f"sample.{field.name}"] for field in fields(TokenSample)}
    for name in _STATES:
        sample[name] = sample[name].float()
    found = TokenSample(**{name: tensor.numpy() for name, tensor in sample.items()})
    return KVStatistics(geometry, residues, specials, sensitivity, found, f64("inv_freq"), f64("output_gram"))


def _arrays(prefix: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of these arrays and of the dataclasses among them; counts that are one number are metadata."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if is_dataclass(value):
            found |= _arrays(f"{prefix}{name}.", vars(value))
        elif isinstance(value, np.ndarray):
            array = _triangle(value) if name in _SYMMETRIC else value
            found[f"{prefix}{name}"] = torch.from_numpy(array.astype(np.float32))
    return found


def _triangle(matrix: Array) -> Array:
    """Lower triangle of matrices [..., n, n] that are symmetric but for rounding, [..., n (n + 1) / 2]."""
    size = matrix.shape[-1]
    rows, columns = np.tril_indices(size)
    lower, upper = (
        np.take(matrix.reshape(*matrix.shape[:-2], -1), places, axis=-1)
        for places in (rows * size + columns, columns * size + rows)
    )
    half: Array = 0.5 * (lower + upper)
    return half


def _square(name: str, array: Array, size: int) -> npt.NDArray[Any]:
    if array.shape[-2:] == (size, size) and array.ndim == 4:
        return array
    if array.ndim != 3 or array.shape[-1] != size * (size + 1) // 2:
        raise ValueError(f"{name} {list(array.shape)} holds no symmetric matrices of {size} rows")
    rows, columns = np.tril_indices(size)
    places = np.empty((size, size), dtype=np.intp)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return np.take(array, places, axis=-1)
