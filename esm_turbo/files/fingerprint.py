"""Fingerprints, which tell whether an artifact belongs to a model.

A fingerprint describes the attention weights: for each matrix W_q, W_k, W_v, W_o of each layer, the Frobenius norm and
fixed random projections u^T W v. Fingerprints are compared with a tolerance, so that a calibration made in float32 fits
the same model in bfloat16, while one of another model is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RTOL = 1e-2
CODEC_RTOL = 1e-4
_NUM_PROJECTIONS = 4


def model_fingerprint(model: Any) -> npt.NDArray[np.float32]:
    """Fingerprint of an `EsmModel`, [layers, 4, 1 + projections]: the norm, then the projections divided by it.

    It is cached on the model until a weight changes.
    """
    weights = [_attention_weights(layer) for layer in model.encoder.layer]
    versions = tuple((w.data_ptr(), version_of(w)) for layer in weights for w in layer)
    cached = getattr(model, "_turbo_fingerprint", None)
    if cached is None or cached[0] != versions:
        with torch.no_grad():
            rows = [torch.stack([_describe(w) for w in layer]) for layer in weights]
        cached = (versions, torch.stack([row.cpu() for row in rows]).numpy())
        model._turbo_fingerprint = cached
    fingerprint: npt.NDArray[np.float32] = cached[1]
    return fingerprint


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def codec_fingerprint(state: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    """Fingerprint of the fitted tensors of a codec, [tensors, 1 + projections]; decoding depends on all of them."""
    rows = [_describe(tensor.reshape(tensor.shape[0], -1)) for _, tensor in sorted(state.items())]
    return torch.stack(rows).cpu().numpy() if rows else np.zeros((0, 1 + _NUM_PROJECTIONS), np.float32)


def same_codec(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Whether either codec decodes the codes of the other: equal up to the rounding of a repeated fit."""
    return a.shape == b.shape and np.allclose(a, b, rtol=CODEC_RTOL, atol=CODEC_RTOL)


def same_model(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Whether two fingerprints are of one model, up to the rounding of its weights."""
    if a.shape != b.shape:
        return False
    norms = np.allclose(a[..., 0], b[..., 0], rtol=RTOL)
    return norms and bool(np.abs(a[..., 1:] - b[..., 1:]).max() <= RTOL)


def _attention_weights(layer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    attention = layer.attention
    own = attention.self
    return own.query.weight, own.key.weight, own.value.weight, attention.output.dense.weight


def _describe(weight: Tensor) -> Tensor:
    weight = weight.float()
    norm = weight.norm()
    # Projections on random sign vectors are of the size of the norm for any matrix.
    rows, columns = _signs(weight.shape[0], weight), _signs(weight.shape[1], weight)
    projections = ((rows @ weight) * columns).sum(-1)
    return torch.cat([norm[None], projections / norm.clamp_min(1e-30)])


def _signs(size: int, like: Tensor) -> Tensor:
    signs = np.random.Generator(np.random.PCG64(size)).integers(0, 2, (_NUM_PROJECTIONS, size)) * 2 - 1
    return torch.from_numpy(signs.astype(np.float32)).to(like.device)
