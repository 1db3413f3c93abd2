"""Which model an artifact belongs to.

A fingerprint is made of the attention weights: per layer and per matrix W_q, W_k, W_v, W_o the Frobenius norm and
fixed random projections u^T W v. They are compared with a tolerance, so that a calibration made in float32 serves
the same model in bfloat16, and one of another model is refused.
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
    """Fingerprint of an `EsmModel`, [layers, 4, 1 + projections]: norm, then projections divided by their scale.

    It is kept on the model and made anew when a weight has changed.
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
    """How often a tensor was changed in place; 0 for one made in inference mode, where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def codec_fingerprint(state: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    """Fingerprint of a codec's fitted tensors, [tensors, 1 + projections]: what codes mean depends on all of them."""
    rows = [_describe(tensor.reshape(tensor.shape[0], -1)) for _, tensor in sorted(state.items())]
    return torch.stack(rows).cpu().numpy() if rows else np.zeros((0, 1 + _NUM_PROJECTIONS), np.float32)


def same_codec(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Whether codes written with one can be read with the other: equal up to the rounding of a fit made again."""
    return a.shape == b.shape and np.allclose(a, b, rtol=CODEC_RTOL, atol=CODEC_RTOL)


def same_model(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Whether two fingerprints are one model's, up to the rounding of its weights."""
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
    # A random sign vector keeps the projection's size at the norm itself, whatever the matrix.
    rows, columns = _signs(weight.shape[0], weight), _signs(weight.shape[1], weight)
    projections = ((rows @ weight) * columns).sum(-1)
    return torch.cat([norm[None], projections / norm.clamp_min(1e-30)])


def _signs(size: int, like: Tensor) -> Tensor:
    signs = np.random.Generator(np.random.PCG64(size)).integers(0, 2, (_NUM_PROJECTIONS, size)) * 2 - 1
    return torch.from_numpy(signs.astype(np.float32)).to(like.device)
