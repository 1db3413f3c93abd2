"""Fingerprints, which tell whether a calibration serves a model.

A calibration fits statistics rather than bits, so that it is compared with a tolerance: it serves a model in any dtype.
Contexts are compared exactly, see `identity`.

A fingerprint describes every tensor that decides keys and values: embeddings, weights, biases and norms of all layers,
rotary frequencies, and adapters. Each tensor, rounded to bfloat16, has its Frobenius norm and, for each of four
contiguous blocks of rows, four fixed random projections u^T W v, divided by the norm. Whether a calibration can be
used at all is decided by `attention_fingerprint`, the part of W_q, W_k, W_v and W_o.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from esm_turbo.files.families import FAMILIES, projections_of
from esm_turbo.files.model_contents import is_plain, modules_inside, refuse_offloaded

RTOL = 1e-2
CODEC_RTOL = 1e-4
# Sums in another order, and roundings of float16, which are not those of bfloat16, relative to a tensor's norm.
_MODEL_RTOL = 1e-4
HALF_RTOL = 2e-2
_NUM_PROJECTIONS = 4
_NUM_BLOCKS = 4
# Below this root mean square, differences count absolutely: float16 has no relative precision there.
_SMALL = 1e-4
_ROW = 1 + _NUM_PROJECTIONS * _NUM_BLOCKS
# Columns of the first row: whether a tensor is float16, layer_norm_eps, token_dropout, then a hash of adapters and of
# other options that are not those of the family's published models.
_HASH = 3
_OPTIONS = ("hidden_act", "gated_mlp", "clip_qkv", "rms_norm_eps", "global_attention_every_n_layers")
# Where modules are defined that compute what their parameters say.
_LIBRARY = ("transformers.activations", *(family.library_modules for family in FAMILIES.values()))
_PLAIN = (*_LIBRARY, "torch.nn.modules.", "esm_turbo.")

Fingerprint = npt.NDArray[np.float32]


def model_fingerprint(model: Any) -> Fingerprint:
    """Fingerprint of an encoder, [1 + tensors, 1 + blocks * projections].

    The first row describes the configuration and what adapters show besides tensors; the four attention matrices of
    each layer follow, then all other tensors.

    Raises:
        ValueError: weights are offloaded to the CPU or a disk.
    """
    refuse_offloaded(model.named_parameters())
    tensors = list(_tensors(model))
    # Eight-bit products know what their weights were.
    known: dict[int, Tensor] = {
        module.weight.data_ptr(): module.described
        for module in model.modules()
        if getattr(module, "described", None) is not None
    }
    rows = [known[tensor.data_ptr()] if tensor.data_ptr() in known else describe_weight(tensor) for tensor in tensors]
    header = torch.from_numpy(_header(model, tensors))
    fingerprint: Fingerprint = torch.stack([header, *(row.cpu() for row in rows)]).numpy()
    return fingerprint


def describe_weight(tensor: Tensor) -> Tensor:
    """The row of a tensor in a fingerprint, float32 [1 + blocks * projections]."""
    return _describe(_as_matrix(tensor).bfloat16(), _NUM_BLOCKS)


def attention_fingerprint(fingerprint: Fingerprint, layers: int) -> Fingerprint:
    """The part of a model's fingerprint by which a calibration is compared, [layers, 4, 1 + projections]."""
    rows = fingerprint[1 : 1 + 4 * layers].reshape(layers, 4, _ROW)
    projections = rows[..., 1:].reshape(layers, 4, _NUM_PROJECTIONS, _NUM_BLOCKS).sum(-1)
    part: Fingerprint = np.concatenate([rows[..., :1], projections], axis=-1)
    return part


def codec_fingerprint(state: Mapping[str, Tensor]) -> Fingerprint:
    """Fingerprint of the fitted tensors of a codec, [tensors, 1 + projections]; decoding depends on all of them."""
    rows = [_describe(tensor.reshape(tensor.shape[0], -1), 1) for _, tensor in sorted(state.items())]
    return torch.stack(rows).cpu().numpy() if rows else np.zeros((0, 1 + _NUM_PROJECTIONS), np.float32)


def same_codec(a: Fingerprint, b: Fingerprint) -> bool:
    """True if either codec decodes the codes of the other: equal up to the rounding of a repeated fit."""
    return a.shape == b.shape and np.allclose(a, b, rtol=CODEC_RTOL, atol=CODEC_RTOL)


def same_model(a: Fingerprint, b: Fingerprint, *, rounded: bool = False) -> bool:
    """True if two fingerprints are of one model, in any dtype.

    Args:
        a: a fingerprint.
        b: another one.
        rounded: whether weights that were rounded to float16 and cast back are the same model.
    """
    if a is b:
        return not np.isnan(a).any()
    if a.shape != b.shape or a.ndim != 2 or not np.array_equal(a[0, 1:], b[0, 1:]):
        return False
    return _close(a[1:], b[1:], HALF_RTOL if rounded or a[0, 0] or b[0, 0] else _MODEL_RTOL)


def same_weights(a: Fingerprint, b: Fingerprint) -> bool:
    """True if the fingerprints of `same_model` agree so far that only sums can have differed."""
    return a.shape == b.shape and _close(a[1:], b[1:], _MODEL_RTOL)


def same_attention(a: Fingerprint, b: Fingerprint) -> bool:
    """True if attention weights agree so far that one calibration serves both, see `attention_fingerprint`."""
    return a.shape == b.shape and _close(a, b, RTOL)


def _close(a: Fingerprint, b: Fingerprint, rtol: float) -> bool:
    norms = np.allclose(a[..., 0], b[..., 0], rtol=rtol)
    return norms and bool(np.abs(a[..., 1:] - b[..., 1:]).max() <= rtol)


def _header(model: Any, tensors: Sequence[Tensor]) -> Fingerprint:
    config = model.config
    usual = type(config)()
    own = [(name, getattr(config, name)) for name in _OPTIONS if hasattr(config, name)]
    shown_options = [f"{name} {value}" for name, value in own if value != getattr(usual, name, None)]
    modules = [_shown(name, module) for name, module in modules_inside(model) if _is_foreign(module)]
    shown = "\n".join([*modules, *shown_options])
    bits = np.frombuffer(hashlib.sha256(shown.encode()).digest(), dtype=np.uint8)[: _ROW - _HASH]
    half = any(tensor.dtype == torch.float16 for tensor in tensors)
    # Not every family has these options.
    options = np.array([half, getattr(config, "layer_norm_eps", 0), getattr(config, "token_dropout", False)])
    return np.concatenate([options, bits if shown else np.zeros_like(bits)]).astype(np.float32)


def _tensors(model: Any) -> Iterator[Tensor]:
    """The attention matrices of each layer, then all others, each once."""
    linears: list[Any] = [linear for layer in projections_of(model) for linear in layer]
    # PEFT's adapters hold the layer that they adapt.
    linears = [getattr(linear, "base_layer", getattr(linear, "original_module", linear)) for linear in linears]
    for linear in linears:
        if not hasattr(linear, "weight"):
            raise ValueError(f"a projection of the attention is a {type(linear).__name__}, which has no weight")
    first = [linear.weight for linear in linears]
    yield from first
    known = {tensor.data_ptr() for tensor in first}
    for _, module in modules_inside(model):
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            wanted = isinstance(tensor, nn.Parameter) or name == "inv_freq"
            if tensor is not None and wanted and tensor.data_ptr() not in known:
                yield tensor


def _is_foreign(module: nn.Module) -> bool:
    """True if a module may compute something else than its parameters say: adapters replace it or its forward."""
    # accelerate replaces forwards to move tensors between devices.
    replaced = "forward" in module.__dict__ and not hasattr(module, "_hf_hook")
    return replaced or not type(module).__module__.startswith(_PLAIN)


def _shown(name: str, module: nn.Module) -> str:
    """Name, class and plain attributes of a module, such as an adapter's scaling and whether it is disabled."""
    kind, forward = type(module), module.__dict__.get("forward")
    state = {key: value for key, value in module.__dict__.items() if key != "training" and is_plain(value)}
    own = "" if forward is None else getattr(forward, "__qualname__", type(forward).__qualname__)
    return f"{name} {kind.__module__}.{kind.__qualname__} {own} {json.dumps(state, sort_keys=True, default=sorted)}"


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)


@torch.no_grad()
def _describe(matrix: Tensor, blocks: int) -> Tensor:
    """Norm of a matrix [R, C] and its projections in every block of rows, [1 + projections * blocks]."""
    matrix = matrix.float()
    norm = matrix.norm()
    # Projections on random sign vectors are of the size of the norm for any matrix.
    rows, columns = (_signs(size).to(matrix.device) for size in matrix.shape)
    parts = zip(rows.tensor_split(blocks, 1), matrix.tensor_split(blocks), strict=True)
    with torch.autocast(matrix.device.type, enabled=False):
        projections = torch.stack([((signs @ part) * columns).sum(-1) for signs, part in parts], dim=-1)
    scale = norm.clamp_min(_SMALL * matrix.numel() ** 0.5 if blocks > 1 else 1e-30)
    return torch.cat([norm[None], projections.flatten() / scale])


@functools.lru_cache
def _signs(size: int) -> Tensor:
    signs = np.random.Generator(np.random.PCG64(size)).integers(0, 2, (_NUM_PROJECTIONS, size)) * 2 - 1
    return torch.from_numpy(signs.astype(np.float32))
