"""The identity of a model: what decides its keys and values, to the bit.

Contexts are read by the model that made them, and by no other. A model is identified by digests of the bits of all
parameters and buffers, of its options (the configuration, and the plain values that modules carry), and of what runs
(classes of modules, functions of the classes, and what these call in their own modules), and by its precision. Where
something else runs than the code of known libraries, such as a hook, nothing can be said of its results: contexts are
then used within the call that computes them, unless the user names the model (`model_id`).

`exact_identity` reads all of it. `model_identity` is for every call: it reads no tensor, but what changes with them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import operator
import os
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

__all__ = [
    "MODEL_ID",
    "OUTSIDE_ENCODER",
    "UNKNOWN_MODEL",
    "Gather",
    "ModelIdentity",
    "exact_identity",
    "is_recorder",
    "kept_digest",
    "lasting_identity",
    "model_identity",
    "refuse_offloaded",
    "seen_before",
    "tensors_digest",
    "version_of",
]

MODEL_ID = "model_id"
"""Attribute of an encoder by which a user names what runs, where it cannot be identified."""
# Modules that have no influence on keys and values.
OUTSIDE_ENCODER = ("pooler", "contact_head")
_KEPT_AS = "_seen_model"
# Whose code is what its version says.
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "esm_turbo")
# What decides no number: names, places and what is returned besides.
_INERT_OPTIONS = {
    "_attn_implementation",
    "_attn_implementation_internal",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "esmfold_config",
    "id2label",
    "initializer_range",
    "is_folding_model",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "untrained_heads",
    "use_cache",
    "vocab_list",
}
_INERT_VALUES = {
    MODEL_ID,
    "all_tied_weights_keys",
    "gradient_checkpointing",
    "hf_device_map",
    "is_spread",
    "kernel_config",
    "loss_type",
    "name_or_path",
}
# Plain values that no forward reads: they are left out where every call looks.
_SHAPES = {"in_features", "out_features", "num_embeddings", "embedding_dim", "normalized_shape", "elementwise_affine"}
_OWN_OF_MODULE = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
# Elements of each tensor that are compared to notice writes that leave no trace in counters.
_SAMPLED = 32
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words of eight bytes that are summed together, and those that are read at a time.
_CHUNK, _BLOCK = 1 << 14, 1 << 20
_VERSION = operator.attrgetter("_version")

Gather = Callable[[Sequence[Tensor]], Callable[[], Tensor]]
"""Given views of tensors, [elements] each, makes a function that reads them, one after the other."""


@dataclass(frozen=True)
class ModelIdentity:
    """What decides a model's keys and values.

    Attributes:
        precision: dtypes of the parameters, that of autocast if it is on, and `tf32` where products are rounded to it.
        weights: digest of the bits of all parameters and buffers, hexadecimal.
        options: digest of the configuration and of plain values that modules carry.
        forward: digest of the names of what runs.
        foreign: what runs that is not known, for the message; empty if all is known or the user named the model.
        dropout: name of a module that drops values at random, as in training; empty for none.
        owner: the model; None in another process.
    """

    precision: str
    weights: str
    options: str
    forward: str
    foreign: str = ""
    dropout: str = ""
    owner: Callable[[], Any] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> Any:
        """Copies and pickles have no model."""
        return ModelIdentity, tuple(getattr(self, name) for name in (*_LASTING, "foreign", "dropout"))

    @property
    def digest(self) -> str:
        """Short hash of the whole, hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, str]:
        """JSON values of a lasting identity."""
        return {name: getattr(self, name) for name in _LASTING}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelIdentity:
        """The identity of `to_dict`.

        Raises:
            KeyError: a value is missing.
            TypeError: a value is no string.
        """
        own = {name: values[name] for name in _LASTING}
        if not all(isinstance(value, str) for value in own.values()):
            raise TypeError("an identity consists of strings")
        return cls(**own)

    def difference(self, model: ModelIdentity) -> str:
        """How the model at hand differs from the one that made an artifact, in words; empty if it does not."""
        if self is model:
            return ""
        if self.precision != model.precision:
            return f"it was made in {self.precision}, and the model computes in {model.precision}"
        for name, noun in (("weights", "the weights differ"), ("options", "options of its modules differ")):
            if getattr(self, name) != getattr(model, name):
                return noun
        if self.forward != model.forward or self.foreign != model.foreign:
            return f"other code runs in its forward{f': {model.foreign}' if model.foreign else ''}"
        random = self.dropout or model.dropout
        return f"dropout is active in {random}" if random else "it was copied" if self.foreign else ""

    def check_lasting(self) -> None:
        """Make sure that what the model computes may be used after the call that computed it.

        Raises:
            ValueError: dropout is active, or unknown code runs.
        """
        if self.dropout:
            raise ValueError(
                f"the model is in training mode, with dropout in {self.dropout}: what it computes is random, and may"
                " not be kept; call .eval() on the model first"
            )
        if self.foreign:
            raise ValueError(
                f"{self.foreign} is not code of a known library, so that nothing tells whether contexts are of the"
                " model as it is: they can be used within one call, such as `score`, and cannot be kept. To keep them,"
                f" name what runs by `{MODEL_ID}`, and change the name whenever it changes"
            )

    def check_unchanged(self) -> None:
        """Make sure that the model, where it still exists, is to the bit what it was seen as.

        Raises:
            ValueError: it is not, or as of `check_lasting`.
        """
        self.check_lasting()
        model = None if self.owner is None else self.owner()
        if model is not None and (difference := self.difference(exact_identity(model))):
            raise ValueError(
                f"the model has changed since it computed this: {difference}; compute it again before it is saved"
            )


_LASTING = ("precision", "weights", "options", "forward")
UNKNOWN_MODEL = ModelIdentity("", "", "", "")
"""Of caches that no model made."""


def model_identity(model: Any, *, sampled: bool | None = None, gather: Gather | None = None) -> ModelIdentity:
    """The identity of an encoder; the same object while nothing changes.

    Changes are noticed by counters of in-place writes, by addresses, and by the identity of modules, tensors, hooks,
    functions and plain values. A write through `.data` or numpy moves none of these: it is noticed by a sample of
    evenly spaced elements, if it covers at least one part in 32 of a tensor's storage in a row.

    Args:
        model: the encoder.
        sampled: whether to compare the sample as well, for which a device must be waited for; None for on the CPU only.
        gather: how the sample is read; None for PyTorch, which takes the host several times as long as one launch.

    Raises:
        ValueError: weights are offloaded to the CPU or a disk, or packed by PyTorch's quantisation.
    """
    seen: _Seen | None = model.__dict__.get(_KEPT_AS)
    if seen is None or not seen.is_current(model, sampled, gather):
        seen = _look(model)
    return seen.identity(model)


def exact_identity(model: Any) -> ModelIdentity:
    """The identity of an encoder, or of a model with a head, for which every tensor is read.

    Raises:
        ValueError: as of `model_identity`.
    """
    return _look(model).identity(model)


def lasting_identity(model: Any) -> ModelIdentity:
    """See `exact_identity`, for what is kept in a file.

    Raises:
        ValueError: as of `ModelIdentity.check_lasting`.
    """
    identity = exact_identity(model)
    identity.check_lasting()
    return identity


def kept_digest(model: Any) -> str:
    """Digest by which results are found again; of a model that cannot be identified, another one each time."""
    identity = exact_identity(model)
    return uuid.uuid4().hex[:16] if identity.foreign or identity.dropout else identity.digest


def seen_before(model: Any) -> object:
    """What stands for the state in which `model_identity` last saw a model: the same object while nothing changes."""
    return model.__dict__.get(_KEPT_AS)


def _look(model: Any) -> _Seen:
    before: _Seen | None = model.__dict__.get(_KEPT_AS)
    after = _Seen(model)
    if before is not None and before.described == after.described:
        # Tensors were moved, but not changed.
        after.identities = before.identities
    model.__dict__[_KEPT_AS] = after
    return after


class _Seen:
    """A model as it was seen, and what tells whether it has changed since."""

    def __init__(self, model: Any) -> None:
        refuse_offloaded(model.named_parameters())
        named = [(name, module) for name, module in model.named_modules() if _is_inside(name)]
        _refuse_packed(named)
        own = [module.__dict__ for _, module in named]
        entered = ("_modules", "_parameters", "_buffers", *_HOOKS)
        self.groups = [values[kind] for values in own for kind in entered]
        self.groups += [getattr(torch_module, name) for name in _GLOBAL_HOOKS]
        self.config = vars(model.config)
        watched = [(group, key, value) for group in self.groups for key, value in group.items()]
        watched += [(values, key, values.get(key)) for values in own for key in _watched_values(values)]
        self.places = [group for group, _, _ in watched], [key for _, key, _ in watched]
        self.entries = [value for _, _, value in watched]
        # Some libraries put other mappings in place of a module's dictionaries.
        plain = all(isinstance(group, dict) for group, _, _ in watched)
        self.look_up: Callable[..., Any] = dict.get if plain else _entry
        code = _Code(named)
        self.code = [[*column] for column in zip(*code.watched, strict=True)]
        self.own = own
        tensors = dict(_tensors(named))
        self.tensors = list({id(tensor): tensor for tensor in tensors.values()}.values())
        # Inference tensors count no writes.
        self.counting = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors)
        self.traces = self._traces(model)
        self.views = _sampled_views(self.tensors)
        self.sample = self._sample()
        self.gathered: list[Callable[[], Tensor]] | None = None
        self.dtypes = "+".join(sorted({_short(parameter.dtype) for parameter in model.parameters()}))
        self.described = {
            "weights": tensors_digest(tensors.items()),
            "options": _digest(_options(model.config, named)),
            "forward": _digest([sorted(code.names), getattr(model, MODEL_ID, None)]),
            "foreign": "" if getattr(model, MODEL_ID, None) else code.foreign,
            "dropout": next((name for name, module in named if _drops(module)), ""),
        }
        self.identities: dict[str, ModelIdentity] = {}

    def __reduce__(self) -> Any:
        """Copies and pickles of a model have not been seen."""
        return type(None), ()

    def identity(self, model: Any) -> ModelIdentity:
        precision = self.dtypes + _rounding(model)
        if precision not in self.identities:
            self.identities[precision] = ModelIdentity(precision, **self.described, owner=weakref.ref(model))
        return self.identities[precision]

    def is_current(self, model: Any, sampled: bool | None, gather: Gather | None) -> bool:
        """True if nothing has changed, see `model_identity`."""
        # Every call comes here: loops over all modules run in C.
        if not all(map(operator.is_, map(self.look_up, *self.places), self.entries)):
            return False
        spaces, keys, functions = self.code
        if not all(map(operator.is_, map(getattr, spaces, keys), functions)) or self._traces(model) != self.traces:
            return False
        if not (self.on_cpu if sampled is None else sampled):
            return True
        if gather is None:
            return all(map(torch.equal, self.sample, self._sample()))
        if self.gathered is None:
            self.gathered = [gather(views) for views in self.views]
        return all(torch.equal(before, found()) for before, found in zip(self.sample, self.gathered, strict=True))

    def _traces(self, model: Any) -> tuple[Any, ...]:
        """What differs after a change, without reading any tensor's elements."""
        return (
            [*map(len, self.groups)],
            [*map(len, self.own)],
            [*map(_VERSION, self.counting)],
            [*map(Tensor.data_ptr, self.tensors)],
            [*self.config.values()],
            getattr(model, MODEL_ID, None),
        )

    def _sample(self) -> list[Tensor]:
        """Bits of the sampled elements, one tensor for each device and width."""
        return [torch.cat(views) for views in self.views]


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of the bits of named tensors, with dtypes and shapes; the same on every device, hexadecimal.

    Words of eight bytes are multiplied by fixed random odd numbers and summed modulo 2^64 in chunks, which a device
    does at the speed of its memory; the sums are hashed by SHA-256. A change within one word always shows.
    """
    digest = hashlib.sha256()
    sums: list[Tensor] = []
    for name, tensor in named:
        for path, inner in _plain_tensors(name, tensor):
            digest.update(f"{path} {inner.dtype} {tuple(inner.shape)}\n".encode())
            sums.append(_sums(inner))
    # One wait for each device.
    places = {one.device: [index for index, other in enumerate(sums) if other.device == one.device] for one in sums}
    for indices in places.values():
        sizes = [len(sums[index]) for index in indices]
        for index, one in zip(indices, torch.cat([sums[i] for i in indices]).cpu().split(sizes), strict=True):
            sums[index] = one
    for one in sums:
        digest.update(one.numpy().tobytes())
    return digest.hexdigest()[:32]


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """Weighted sums of a tensor's words, int64 [chunks]."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if short := -len(data) % 8:
        data = torch.cat([data, data.new_zeros(short)])
    elif data.storage_offset() % 8:
        data = data.clone()
    words = data.view(torch.int64)
    factors = _factors(tensor.device)
    whole = len(words) // _CHUNK * _CHUNK
    parts = [(block.view(-1, _CHUNK) * factors).sum(1) for block in words[:whole].split(_BLOCK) if len(block)]
    rest = words[whole:]
    return torch.cat([*parts, (rest * factors[: len(rest)]).sum()[None]])


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    drawn = np.random.Generator(np.random.PCG64(0)).integers(-(2**63), 2**63, _CHUNK, dtype=np.int64)
    with torch.inference_mode(mode=False):
        return torch.from_numpy(drawn | 1).to(device)


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those of which a subclass consists, such as a quantised one."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounding(model: Any) -> str:
    """What rounds the products of a model besides its dtype."""
    device = model.device.type
    rounding = f"-autocast-{_short(torch.get_autocast_dtype(device))}" if torch.is_autocast_enabled(device) else ""
    return rounding + ("-tf32" if device == "cuda" and torch.backends.cuda.matmul.allow_tf32 else "")


def _entry(group: Mapping[str, Any], name: str) -> Any:
    return group.get(name)


def _is_inside(name: str) -> bool:
    return name.partition(".")[0] not in OUTSIDE_ENCODER


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


def is_recorder(hook: Any) -> bool:
    """True if a hook is the library's own, which records hidden states while a forward asks for them."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.utils.")


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _refuse_packed(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that modules hold their weights as tensors.

    Raises:
        ValueError: one does not, as those of `torch.ao.quantization.quantize_dynamic`.
    """
    for name, module in named:
        if type(module).__module__.startswith(("torch.ao.", "torch.nn.quantized")):
            raise ValueError(
                f"{name} is {type(module).__qualname__} of {type(module).__module__}, whose weights are packed: a model"
                " quantised that way cannot run here; load it in float32, bfloat16 or float16"
            )


def _tensors(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and other tensors that modules hold, by name."""
    for name, module in named:
        own = module.__dict__
        for group in (own["_parameters"], own["_buffers"], own):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Plain values that a module carries, except for those that decide nothing."""
    return {
        key: sorted(value, key=str) if isinstance(value, set | frozenset) else value
        for key, value in module.__dict__.items()
        if key not in _OWN_OF_MODULE and not key.startswith("_") and key not in _INERT_VALUES and _is_plain(value)
    }


def _watched_values(own: Mapping[str, Any]) -> list[str]:
    """Names of those values of a module at which every call looks."""
    names = [key for key in own if key not in _OWN_OF_MODULE and key not in _SHAPES and not key.startswith("_")]
    rates = [value for key, value in own.items() if (key == "p" or "dropout" in key) and isinstance(value, float)]
    return [*names, "training"] if any(rates) else names


def _drops(module: nn.Module) -> bool:
    rates = {key: value for key, value in _plain_values(module).items() if key == "p" or "dropout" in key}
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates.values())


def _options(config: Any, named: Iterable[tuple[str, nn.Module]]) -> list[Any]:
    chosen = {key: value for key, value in config.to_dict().items() if key not in _INERT_OPTIONS}
    return [chosen, [(name, _plain_values(module)) for name, module in named]]


class _Code:
    """What a forward runs.

    Attributes:
        names: of classes, of their functions and of what these call in their own modules.
        watched: class or module, name and value of each of those functions.
        foreign: the first of them that is not of a known library, for a message; empty for none.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.names: list[str] = []
        self.watched: list[tuple[Any, str, Any]] = []
        self.foreign = ""
        if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
            self.foreign = "a global forward hook"
        classes: dict[type, None] = {}
        for name, module in named:
            self._add_module(name, module)
            classes |= dict.fromkeys(one for one in type(module).__mro__ if _runs(one))
        # Functions of the modules in which classes are defined, which these call.
        pending = [function for one in classes for function in self._functions(one)]
        modules = {one.__module__ for one in classes if not one.__module__.startswith("torch.")}
        known: set[tuple[str, str]] = set()
        while pending:
            function = pending.pop()
            space = getattr(function, "__globals__", {})
            for key in _called_names(function):
                place = space.get("__name__", ""), key
                value = space.get(key)
                if place[0] not in modules or place in known or not callable(value) or isinstance(value, type):
                    continue
                known.add(place)
                self._add(_Namespace(space), key, value, f"{place[0]}.{key}")
                if isinstance(value, types.FunctionType) and value.__module__ in modules:
                    pending.append(value)
        for key, value in vars(nn.functional).items():
            if isinstance(value, types.FunctionType):
                self._judge(value, f"torch.nn.functional.{key}")

    def _add_module(self, name: str, module: nn.Module) -> None:
        own, kind = module.__dict__, type(module)
        self.names.append(f"{name} {kind.__module__}.{kind.__qualname__}")
        for hook in (hook for hooks in _HOOKS for hook in own[hooks].values()):
            if not is_recorder(hook):
                self._name_own(name, hook)
                self._judge(hook, f"a hook of {name or 'the model'}")
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            self.foreign = self.foreign or f"{kind.__module__}.{kind.__qualname__} ({name})"
        for key, value in own.items():
            if key not in _OWN_OF_MODULE and callable(value) and not isinstance(value, nn.Module):
                if not key.startswith("_"):
                    self._name_own(f"{name}.{key}", value)
                self._judge(value, f"{name}.{key}")

    def _name_own(self, name: str, value: Any) -> None:
        # These move tensors between devices, and compute nothing.
        if not _name_of(value).startswith(("accelerate.", "esm_turbo.")):
            self.names.append(f"{name} {_name_of(value)}")

    def _functions(self, one: type) -> Iterator[Any]:
        # Of PyTorch's and the library's own bases only what a call passes through.
        through = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
        whole = ".models." in one.__module__ or one.__module__.startswith("esm_turbo.")
        for key, value in list(vars(one).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and (key in through or (whole and not key.startswith("__"))):
                self._add(one, key, getattr(one, key), f"{one.__module__}.{one.__qualname__}.{key}")
                yield function

    def _add(self, space: Any, key: str, value: Any, shown: str) -> None:
        if not isinstance(value, types.MethodType):
            self.watched.append((space, key, value))
        self.names.append(f"{shown} {_name_of(value)}")
        self._judge(value, shown)

    def _judge(self, value: Any, shown: str) -> None:
        if not self.foreign and not _is_known(value):
            self.foreign = f"{_name_of(value)}, as {shown},"


def _runs(one: type) -> bool:
    return issubclass(one, nn.Module) or one.__module__.startswith("esm_turbo.")


class _Namespace:
    """Globals of a module, as attributes."""

    def __init__(self, space: dict[str, Any]) -> None:
        self.__dict__ = space


def _name_of(value: Any) -> str:
    value = getattr(value, "func", value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def _called_names(function: Any) -> set[str]:
    """Global names in a function's code, and in that of functions within it or wrapped by it."""
    names: set[str] = set()
    codes = [getattr(one, "__code__", None) for one in (function, getattr(function, "__wrapped__", None))]
    pending = [code for code in codes if isinstance(code, types.CodeType)]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names


def _is_known(value: Any, depth: int = 8) -> bool:
    """True if what is called, with what it wraps, is code of the known libraries."""
    if isinstance(value, functools.partial):
        return all(_is_known(one, depth - 1) for one in (value.func, *value.args) if callable(one))
    if isinstance(value, types.MethodType):
        return _is_known(value.__func__, depth)
    if not isinstance(value, types.FunctionType):
        kind = value if isinstance(value, type | types.BuiltinFunctionType) else type(value)
        return (kind.__module__ or "builtins").partition(".")[0] in {*_LIBRARIES, *sys.stdlib_module_names}
    if not _is_library(value.__code__.co_filename):
        return False
    cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    inner = [one for one in cells if isinstance(one, types.FunctionType | types.MethodType | functools.partial)]
    return depth == 0 or all(_is_known(one, depth - 1) for one in inner)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _is_library(path: str) -> bool:
    """True if a file of code is of Python or of a known library."""
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    places = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    if path.startswith(tuple(os.path.join(place, "") for place in places)):
        return True
    inside = os.path.relpath(path, sysconfig.get_path("stdlib")).split(os.sep)
    return os.path.isabs(path) and inside[0] not in ("..", "site-packages", "dist-packages")


def _sampled_views(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Evenly spaced elements of every tensor, as views, by device and width."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        for _, plain in _plain_tensors("", tensor):
            # An odd step, so that a sample of a matrix does not stay in one column.
            step = plain.numel() // _SAMPLED | 1
            stored = plain.detach() if plain.is_contiguous() else plain.detach().movedim(-1, 0)
            # As integers, NaN is equal to itself, and autocast leaves them alone.
            bits = stored.reshape(-1).view(_INTEGERS[plain.element_size()])
            groups.setdefault((plain.device, bits.dtype), []).append(bits[step // 2 :: step])
    return list(groups.values())
