"""Fingerprints, which tell whether an artifact belongs to a model.

A fingerprint describes every tensor that decides keys and values: embeddings, weights, biases and norms of all layers,
rotary frequencies, and adapters. Each tensor, rounded to bfloat16, has its Frobenius norm and, for each of four
contiguous blocks of rows, four fixed random projections u^T W v, divided by the norm. Rounding makes fingerprints of
one checkpoint in float32 and bfloat16 equal up to the order of sums, so that the comparison can be tight.

A calibration fits statistics rather than bits. It is compared with a tolerance by `attention_fingerprint`, the part of
W_q, W_k, W_v and W_o.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from esm_turbo.files.families import FAMILIES, projections_of

RTOL = 1e-2
CODEC_RTOL = 1e-4
# Sums in another order, and roundings of float16, which are not those of bfloat16, relative to a tensor's norm.
_MODEL_RTOL = 1e-4
_HALF_RTOL = 2e-2
_NUM_PROJECTIONS = 4
_NUM_BLOCKS = 4
# Below this root mean square, differences count absolutely: float16 has no relative precision there.
_SMALL = 1e-4
# Elements of each tensor that are compared to notice writes that leave no trace in counters.
_SAMPLED = 32
# Modules that have no influence on keys and values.
OUTSIDE_ENCODER = ("pooler", "contact_head")
_ROW = 1 + _NUM_PROJECTIONS * _NUM_BLOCKS
# Columns of the first row: whether a tensor is float16, layer_norm_eps, token_dropout, then a hash of adapters.
_HASH = 3
_KEPT_AS = "_seen_weights"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Where modules are defined that compute what their parameters say.
_LIBRARY = ("transformers.activations", *(family.library_modules for family in FAMILIES.values()))
_PLAIN = (*_LIBRARY, "torch.nn.modules.", "esm_turbo.")

Fingerprint = npt.NDArray[np.float32]
Gather = Callable[[Sequence[Tensor]], Callable[[], Tensor]]
"""Given views of tensors, [elements] each, makes a function that reads them, one after the other."""
_VERSION = operator.attrgetter("_version")


def model_fingerprint(model: Any, *, sampled: bool | None = None, gather: Gather | None = None) -> Fingerprint:
    """Fingerprint of an encoder, [1 + tensors, 1 + blocks * projections].

    The first row describes the configuration and what adapters show besides tensors; the four attention matrices of
    each layer follow, then all other tensors. The result is kept, and the same array is returned while nothing changes.

    Changes are noticed by counters of in-place writes, by addresses and by the identity of modules and tensors. A write
    through `.data` moves none of these: it is noticed by a sample of evenly spaced elements, if it covers at least one
    part in 32 of a tensor's storage in a row. A write there to fewer elements may go unseen.

    Args:
        model: the model.
        sampled: whether to compare the sample as well, for which a device must be waited for; None for on the CPU only.
        gather: how the sample is read; None for PyTorch, which takes the host several times as long as one launch.

    Raises:
        ValueError: weights are offloaded to the CPU or a disk.
    """
    seen: _Weights | None = model.__dict__.get(_KEPT_AS)
    if seen is None or not seen.are_current(sampled, gather):
        before, seen = seen, _Weights(model)
        if before is not None and same_model(before.fingerprint, seen.fingerprint):
            # Tensors were moved, but not changed.
            seen.fingerprint = before.fingerprint
        model.__dict__[_KEPT_AS] = seen
    return seen.fingerprint


def known_fingerprint(model: Any) -> Fingerprint | None:
    """The last result of `model_fingerprint`, if it was called."""
    seen: _Weights | None = model.__dict__.get(_KEPT_AS)
    return None if seen is None else seen.fingerprint


def attention_fingerprint(fingerprint: Fingerprint, layers: int) -> Fingerprint:
    """The part of a model's fingerprint by which a calibration is compared, [layers, 4, 1 + projections]."""
    rows = fingerprint[1 : 1 + 4 * layers].reshape(layers, 4, _ROW)
    projections = rows[..., 1:].reshape(layers, 4, _NUM_PROJECTIONS, _NUM_BLOCKS).sum(-1)
    part: Fingerprint = np.concatenate([rows[..., :1], projections], axis=-1)
    return part


def is_adapted(fingerprint: Fingerprint) -> bool:
    """True if modules of the model have been replaced, as adapters do."""
    return bool(fingerprint[0, _HASH:].any())


def refuse_offloaded(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Check that weights lie in memory: of those that are copied there for each use, nothing is known.

    Raises:
        ValueError: some do not.
    """
    absent = [name for name, parameter in parameters if parameter.device.type == "meta"]
    if absent:
        raise ValueError(
            f"{len(absent)} weights of the model, such as {absent[0]}, are offloaded to the CPU or a disk, from where"
            " every use would copy them: use more devices, or run all of it on the CPU"
        )


def weights_digest(model: nn.Module) -> str:
    """Hash of the bits of all parameters and of what adapters show besides, the same on every device.

    Each tensor is described by exact sums of its bits as integers, plain and weighted by row and by column.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if _is_foreign(module):
            digest.update(f"{_shown(name, module)}\n".encode())
    for name, parameter in model.named_parameters():
        bits = _as_matrix(parameter).contiguous().view(_INTEGERS[parameter.element_size()])
        rows, columns = (bits.sum(dim, dtype=torch.int64).cpu().numpy() for dim in (1, 0))
        sums = [int((x * np.arange(1, len(x) + 1) ** 3).sum()) for x in (rows, columns)]
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} {int(rows.sum())} {sums}\n".encode())
    return digest.hexdigest()[:16]


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of named tensors, with their dtypes and shapes."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


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
    return _close(a[1:], b[1:], _HALF_RTOL if rounded or a[0, 0] or b[0, 0] else _MODEL_RTOL)


def same_attention(a: Fingerprint, b: Fingerprint) -> bool:
    """True if attention weights agree so far that one calibration serves both, see `attention_fingerprint`."""
    return a.shape == b.shape and _close(a, b, RTOL)


def _close(a: Fingerprint, b: Fingerprint, rtol: float) -> bool:
    norms = np.allclose(a[..., 0], b[..., 0], rtol=rtol)
    return norms and bool(np.abs(a[..., 1:] - b[..., 1:]).max() <= rtol)


class _Weights:
    """The weights of a model when its fingerprint was computed, and what tells whether they have changed since."""

    def __init__(self, model: Any) -> None:
        refuse_offloaded(model.named_parameters())
        modules = list(_modules(model))
        self.own = [module.__dict__ for _, module in modules]
        self.groups = [own[kind] for own in self.own for kind in ("_modules", "_parameters", "_buffers")]
        named = [(group, name, entry) for group in self.groups for name, entry in group.items()]
        self.places = [group for group, _, _ in named], [name for _, name, _ in named]
        self.entries = [entry for _, _, entry in named]
        # Some libraries put other mappings in place of a module's dictionaries.
        self.look_up = dict.get if all(isinstance(group, dict) for group in self.groups) else _entry
        self.foreign = [(name, module) for name, module in modules if _is_foreign(module)]
        self.tensors = list(_tensors(model))
        # Inference tensors count no writes.
        self.counting = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors)
        self.traces = self._traces()
        self.views = _sampled_views(self.tensors)
        self.sample = self._sample()
        self.gathered: list[Callable[[], Tensor]] | None = None
        rows = [_describe(_as_matrix(tensor).bfloat16(), _NUM_BLOCKS) for tensor in self.tensors]
        header = torch.from_numpy(self._header(model.config))
        self.fingerprint: Fingerprint = torch.stack([header, *(row.cpu() for row in rows)]).numpy()

    def __reduce__(self) -> Any:
        """Copies and pickles of a model have not been seen."""
        return type(None), ()

    def are_current(self, sampled: bool | None, gather: Gather | None) -> bool:
        """True if nothing has changed, see `model_fingerprint`."""
        # Every call comes here: loops over all modules run in C.
        entries = map(self.look_up, *self.places)
        if not all(map(operator.is_, entries, self.entries)) or self._traces() != self.traces:
            return False
        if not (self.on_cpu if sampled is None else sampled):
            return True
        if gather is None:
            return all(map(torch.equal, self.sample, self._sample()))
        if self.gathered is None:
            self.gathered = [gather(views) for views in self.views]
        return all(torch.equal(before, found()) for before, found in zip(self.sample, self.gathered, strict=True))

    def _traces(self) -> tuple[Any, ...]:
        """Return what differs after a change, without reading any tensor's elements."""
        return (
            [*map(len, self.groups)],
            ["forward" in own for own in self.own],
            [*map(_VERSION, self.counting)],
            [*map(Tensor.data_ptr, self.tensors)],
            [_shown(name, module) for name, module in self.foreign],
        )

    def _sample(self) -> list[Tensor]:
        """Bits of the sampled elements, one tensor for each device and width."""
        return [torch.cat(views) for views in self.views]

    def _header(self, config: Any) -> Fingerprint:
        shown = "\n".join(_shown(name, module) for name, module in self.foreign)
        bits = np.frombuffer(hashlib.sha256(shown.encode()).digest(), dtype=np.uint8)[: _ROW - _HASH]
        half = any(tensor.dtype == torch.float16 for tensor in self.tensors)
        # Not every family has these options.
        options = np.array([half, getattr(config, "layer_norm_eps", 0), getattr(config, "token_dropout", False)])
        return np.concatenate([options, bits if shown else np.zeros_like(bits)]).astype(np.float32)


def _entry(group: Mapping[str, Any], name: str) -> Any:
    return group.get(name)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name.partition(".")[0] not in OUTSIDE_ENCODER)


def _tensors(model: Any) -> Iterator[Tensor]:
    """The attention matrices of each layer, then all others, each once."""
    linears: list[Any] = [linear for layer in projections_of(model) for linear in layer]
    # PEFT's adapters hold the layer that they adapt.
    first = [getattr(linear, "base_layer", getattr(linear, "original_module", linear)).weight for linear in linears]
    yield from first
    known = {tensor.data_ptr() for tensor in first}
    for _, module in _modules(model):
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
    state = {key: value for key, value in module.__dict__.items() if key != "training" and _is_plain(value)}
    own = "" if forward is None else getattr(forward, "__qualname__", type(forward).__qualname__)
    return f"{name} {kind.__module__}.{kind.__qualname__} {own} {json.dumps(state, sort_keys=True, default=sorted)}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _sampled_views(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Evenly spaced elements of every tensor, as views, by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        # An odd step, so that a sample of a matrix does not stay in one column.
        step = tensor.numel() // _SAMPLED | 1
        stored = tensor.detach() if tensor.is_contiguous() else tensor.detach().movedim(-1, 0)
        # As integers, NaN is equal to itself, and autocast leaves them alone.
        bits = stored.reshape(-1).view(_INTEGERS[tensor.element_size()])
        groups.setdefault((tensor.device, bits.dtype), []).append(bits[step // 2 :: step])
    return list(groups.values())


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
