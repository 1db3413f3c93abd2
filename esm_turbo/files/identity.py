"""The identity of a model: what decides its keys and values, to the bit.

Contexts are read by the model that made them, and by no other. A model is identified by digests of the bits of all
parameters and buffers, of its options (the configuration, and the plain values that modules carry), and of what runs
(classes of modules, functions of the classes, and what these call in their own modules), and by its precision. Where
something else runs than the code of known libraries, such as a hook, nothing can be said of its results: contexts are
then used within the call that computes them, unless the user names the model (`model_id`).

Digests see any change of what they are made of, and no list of what a forward runs is complete. So each identity has a
second lock, a few outputs of the model for a fixed input: it sees changes of whatever runs, if they are larger than
rounding. A tolerance thus refuses models, and admits none.

`exact_identity` reads all of it. `model_identity` is for every call: it reads no tensor, but what changes with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from esm_turbo.files.forward_code import GLOBAL_HOOKS, HOOKS, ForwardCode, active_modes, misplaced_layer
from esm_turbo.files.model_contents import (
    MODEL_ID,
    VERSION,
    containers,
    dropping_module,
    held_tensors,
    is_moved_by_forwards,
    modules_inside,
    options,
    own_configs,
    refuse_offloaded,
    refuse_packed,
    steps_of,
    watched_values,
)
from esm_turbo.files.tensor_digests import sampled_views, tensors_digest

__all__ = [
    "OTHER_OUTPUTS",
    "UNKNOWN_MODEL",
    "Gather",
    "ModelIdentity",
    "agree",
    "exact_identity",
    "forget_identity",
    "kept_digest",
    "lasting_identity",
    "model_identity",
    "owned",
    "probed_identity",
    "rounding",
    "same_outputs",
    "seen_attention",
    "seen_code",
    "seen_foreign",
    "seen_identity",
    "watch",
]

_KEPT_AS = "_seen_model"
_OWNED = weakref.WeakSet[Any]()


class Gathered(Protocol):
    """Elements of many tensors, see `Gatherer`."""

    def begin(self) -> Callable[[Tensor], bool]:
        """See `Gatherer.begin`."""


Gather = Callable[[Sequence[Tensor]], Gathered]
"""Given views of tensors, [elements] each, what reads them, one after the other."""


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
        probe: some outputs for a fixed input, float32, and their checksum, hexadecimal; empty where unknown code runs,
            in training mode and of a model that is not of this package.
        owner: gives the model, or None where it does not exist any more, or in another process; None for an identity
            from a file, which was checked when it was written.
    """

    precision: str
    weights: str
    options: str
    forward: str
    foreign: str = ""
    dropout: str = ""
    probe: str = field(default="", compare=False)
    owner: Callable[[], Any] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> Any:
        """Copies and pickles have no model."""
        owner = None if self.owner is None else _nobody
        return ModelIdentity, (*(getattr(self, name) for name in (*_LASTING, "foreign", "dropout", "probe")), owner)

    @property
    def digest(self) -> str:
        """Short hash of the whole, hexadecimal."""
        exact = {name: getattr(self, name) for name in _LASTING}
        return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, str]:
        """JSON values of a lasting identity."""
        return {name: getattr(self, name) for name in (*_LASTING, "probe")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelIdentity:
        """The identity of `to_dict`.

        Raises:
            KeyError: a value is missing.
            TypeError: a value is no string.
        """
        # Files of earlier versions have no probe.
        own = {name: values[name] for name in _LASTING} | {"probe": values.get("probe", "")}
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
        if random := self.dropout or model.dropout:
            return f"dropout is active in {random}"
        if self.foreign:
            return "it was copied"
        return "" if same_outputs(self.probe, model.probe, self.precision) else OTHER_OUTPUTS

    def check_determinate(self) -> None:
        """Make sure that the model computes the same each time.

        Raises:
            ValueError: dropout is active.
        """
        if self.dropout:
            raise ValueError(
                f"the model is in training mode, with dropout in {self.dropout}: what it computes is random; call"
                " .eval() on the model first"
            )

    def check_lasting(self) -> None:
        """Make sure that what the model computes may be used after the call that computed it.

        Raises:
            ValueError: as of `check_determinate`, or unknown code runs.
        """
        self.check_determinate()
        if self.foreign:
            raise ValueError(
                f"{self.foreign} is not code of a known library, so that nothing tells whether contexts are of the"
                " model as it is: they can be used within one call, such as `score`, and cannot be kept. To keep them,"
                f" name what runs by `{MODEL_ID}`, and change the name whenever it changes"
            )

    def check_unchanged(self) -> None:
        """Make sure that the model is what it was seen as.

        Raises:
            ValueError: it is not, or does not exist here, or as of `check_lasting`.
        """
        self.check_lasting()
        if self.owner is None:
            return
        if (model := self.owner()) is None:
            raise ValueError(
                "the model that computed this does not exist here any more, so that nothing tells whether it was"
                " changed before: save it in the same process, while the model exists"
            )
        if difference := self.difference(probed_identity(model)):
            raise ValueError(
                f"the model has changed since it computed this: {difference}; compute it again before it is saved"
            )


def _nobody() -> None:
    """The model of a copied identity."""


_LASTING = ("precision", "weights", "options", "forward")
OTHER_OUTPUTS = "the same weights and code give other outputs"
"""How models differ whose probes differ."""
UNKNOWN_MODEL = ModelIdentity("", "", "", "")
"""Of caches that no model made."""


def same_outputs(probe: str, other: str, precision: str) -> bool:
    """True if two probes agree as far as devices and threads round alike, or one of them is empty.

    Args:
        probe: see `ModelIdentity`, as is `other`.
        precision: in which both were computed.
    """
    if not (probe and other):
        return True
    a, b = map(_outputs_of, (probe, other))
    return a.shape == b.shape and a.numel() > 0 and agree(a, b, precision)


def _as_probe(outputs: Tensor) -> str:
    """Outputs as text, with a checksum: of damage, a tolerance lets much through."""
    data = outputs.cpu().numpy().astype("<f4").tobytes()
    return (data + zlib.crc32(data).to_bytes(4, "little")).hex()


def _outputs_of(probe: str) -> Tensor:
    """The outputs of `_as_probe`, float32 [n]; none if the text was damaged."""
    try:
        data, checksum = (whole := bytes.fromhex(probe))[:-4], whole[-4:]
    except ValueError:
        data, checksum = b"", b""
    is_whole = zlib.crc32(data).to_bytes(4, "little") == checksum
    return torch.from_numpy(np.frombuffer(data if is_whole else b"", "<f4").copy())


def agree(outputs: Tensor, other: Tensor, precision: str, bound: float = 1e-3) -> bool:
    """True if outputs of one shape differ by no more than rounding, by the largest of them.

    Args:
        outputs: of a forward, as is `other`.
        precision: in which both were computed, see `ModelIdentity`.
        bound: for the difference in float32, as a part of the largest output; on one device, rounding is below 1e-5.
    """
    # With random weights, devices differ by 2e-6 in float32, and by 2e-2 in bfloat16, or 1e-1 where attention is sharp.
    tolerance = bound if {*precision.split("+")} <= {"float32", "float64"} else 0.15
    return not bool((outputs - other).abs().max() > tolerance * outputs.abs().max())


def model_identity(model: Any, *, sampled: bool | None = None) -> ModelIdentity:
    """The identity of an encoder; the same object while nothing changes.

    Changes are noticed by counters of in-place writes, by addresses, and by the identity of modules, tensors, hooks,
    functions and plain values. A write through `.data` or numpy moves none of these: it is noticed by a sample of
    evenly spaced elements, if it covers at least one part in 32 of a tensor's storage in a row.

    Args:
        model: the encoder.
        sampled: whether to compare the sample as well, for which a device must be waited for; None for on the CPU only.

    Raises:
        ValueError: weights are offloaded to the CPU or a disk, or packed by PyTorch's quantisation.
    """
    seen: _Seen | None = model.__dict__.get(_KEPT_AS)
    if seen is None or not seen.is_current(model, sampled):
        seen = _look(model)
    return seen.identity(model)


def seen_identity(model: Any) -> ModelIdentity | None:
    """The identity of an encoder if nothing has changed since it was last seen, which is not looked at."""
    seen: _Seen | None = model.__dict__.get(_KEPT_AS)
    return None if seen is None else seen.identity(model)


def watch(model: Any, gather: Gather | None = None) -> Callable[[], bool]:
    """Begin to look for changes of an encoder, as `model_identity` does with its sample.

    The sample is read as the model is now, and a device need not be waited for until later.

    Args:
        model: the encoder.
        gather: how the sample is read; None for PyTorch, which takes the host several times as long as one launch.

    Returns:
        Tells whether the model has changed since it was last seen, and then sees it anew.
    """
    seen: _Seen = model.__dict__.get(_KEPT_AS) or _look(model)
    same = seen.begin_sample(gather)

    def changed() -> bool:
        if seen.is_current(model, False) and same():
            return False
        _look(model)
        return True

    return changed


def exact_identity(model: Any) -> ModelIdentity:
    """The identity of an encoder, or of a model with a head, for which every tensor is read.

    Raises:
        ValueError: as of `model_identity`.
    """
    return model_identity(model) if model in _OWNED else _look(model).identity(model)


@contextlib.contextmanager
def owned(model: Any) -> Iterator[None]:
    """Within the block, nothing but the caller reaches the model: it is read once, and later looked at as by each call.

    Args:
        model: as of `exact_identity`.
    """
    exact_identity(model)
    _OWNED.add(model)
    try:
        yield
    finally:
        _OWNED.discard(model)


def probed_identity(model: Any) -> ModelIdentity:
    """As `exact_identity`; the probe is made again, which `exact_identity` does where it sees a change."""
    identity = exact_identity(model)
    if identity.probe and not same_outputs(identity.probe, _probe(model), identity.precision):
        forget_identity(model)
        identity = _look(model).identity(model)
    return identity


def forget_identity(model: Any) -> None:
    """Have a model seen anew at its next look."""
    model.__dict__[_KEPT_AS] = None


@contextlib.contextmanager
def seen_as_before(model: Any) -> Iterator[None]:
    """After the block, which puts back all that it changes in a model, that has been seen as it was before."""
    seen = model.__dict__.get(_KEPT_AS)
    try:
        yield
    finally:
        model.__dict__[_KEPT_AS] = seen


def lasting_identity(model: Any, known: ModelIdentity | None = None) -> ModelIdentity:
    """See `probed_identity`, for what is kept in a file.

    Args:
        model: as of `exact_identity`.
        known: an identity that this has given before: the model is probed again if it is another one now.

    Raises:
        ValueError: as of `ModelIdentity.check_lasting`.
    """
    is_known = known is not None and model_identity(model) is known
    identity = exact_identity(model) if is_known else probed_identity(model)
    identity.check_lasting()
    return identity


def kept_digest(model: Any) -> str:
    """Digest by which results are found again; of a model that cannot be identified, another one each time."""
    identity = exact_identity(model)
    return uuid.uuid4().hex[:16] if identity.foreign or identity.dropout else identity.digest


def seen_code(model: Any) -> tuple[str, int]:
    """Digest of the code that `model_identity` last saw, and one of the options.

    The former is empty where some of the code is unknown, or not what the library's files define, or drops values at
    random.
    """
    seen: _Seen | None = model.__dict__.get(_KEPT_AS)
    if seen is None:
        return "", 0
    return seen.names if seen.is_plain and not active_modes() else "", int(seen.described["options"], 16)


def seen_foreign(model: Any) -> str:
    """The unknown code that `model_identity` last saw, also of a model that has a name for it; empty for none."""
    seen: _Seen | None = model.__dict__.get(_KEPT_AS)
    return "" if seen is None else seen.foreign


def seen_attention(model: Any) -> str:
    """What changed the attention of the code that `model_identity` last saw, see `ForwardCode`; empty for nothing."""
    seen: _Seen | None = model.__dict__.get(_KEPT_AS)
    return "" if seen is None else seen.attention


def _look(model: Any) -> _Seen:
    # There before values are counted, so that the first call is not followed by a second look.
    before: _Seen | None = model.__dict__.setdefault(_KEPT_AS, None)
    model.__dict__.setdefault("_tree", None)
    # Autocast would go on to use copies of the weights that there were before.
    torch.clear_autocast_cache()
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
        named = modules_inside(model)
        refuse_packed(named)
        own = [module.__dict__ for _, module in named]
        entered = ("_modules", "_parameters", "_buffers", *HOOKS)
        groups = [values[kind] for values in own for kind in entered]
        groups += [getattr(torch_module, name) for name in GLOBAL_HOOKS]
        # Most have no entries, which one look into all of them tells.
        self.filled, self.empty = [one for one in groups if one], [one for one in groups if not one]
        self.configs = [model.config, *(config for _, config in own_configs(model.config, named))]
        modules = [module for _, module in named]
        self.modules = modules
        # A list of modules runs them in the order in which they were put there.
        self.lists = [module._modules for module in modules if isinstance(module, nn.ModuleList | nn.Sequential)]
        self.containers = [one for module in modules for one in containers(module)]
        held = [one for config in self.configs for one in vars(config).values()]
        self.containers += [one for one in held if isinstance(one, dict | list)]
        watched = [(group, key, value) for group in self.filled for key, value in group.items()]
        watched += [(values, kind, values[kind]) for values in own for kind in entered if values[kind]]
        watched += [
            (module.__dict__, key, module.__dict__.get(key)) for module in modules for key in watched_values(module)
        ]
        self.places = [group for group, _, _ in watched], [key for _, key, _ in watched]
        self.entries = [value for _, _, value in watched]
        # Some libraries put other mappings in place of a module's dictionaries.
        plain = all(isinstance(group, dict) for group, _, _ in watched)
        self.look_up: Callable[..., Any] = dict.get if plain else _entry
        code = ForwardCode(named, self.configs)
        self.spaces = [vars(one) for one in code.classes]
        self.code = [[*column] for column in zip(*code.watched, strict=True)]
        self.own = own
        tensors = dict(held_tensors(named))
        self.tensors = list({id(tensor): tensor for tensor in tensors.values()}.values())
        # Inference tensors count no writes.
        self.counting = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors)
        self.traces = self._traces(model)
        self.strides = [*map(Tensor.stride, self.tensors)]
        self.views = sampled_views(self.tensors)
        self.sample = self._sample()
        self.gathered: list[Gathered] | None = None
        self.dtypes = "+".join(sorted({_short(parameter.dtype) for parameter in model.parameters()}))
        self.foreign = code.foreign
        self.names, self.attention = _digest(sorted(code.names)), code.attention or misplaced_layer(model)
        dropout = dropping_module(named)
        self.is_plain = not (code.foreign or code.replaces or self.attention or dropout)
        self.described = {
            # Not in the order of registration, which pruning and other parametrizations leave changed.
            "weights": tensors_digest(sorted(tensors.items(), key=operator.itemgetter(0))),
            "options": _digest(options(model.config, named)),
            "forward": _digest([self.names, getattr(model, MODEL_ID, None)]),
            "foreign": "" if getattr(model, MODEL_ID, None) else code.foreign,
            "dropout": dropout,
        }
        self.identities: dict[tuple[str, str], ModelIdentity] = {}

    def __reduce__(self) -> Any:
        """Copies and pickles of a model have not been seen."""
        return type(None), ()

    def identity(self, model: Any) -> ModelIdentity:
        precision, modes = self.dtypes + rounding(model), active_modes()
        if (precision, modes) not in self.identities:
            described = self.described
            if modes and not getattr(model, MODEL_ID, None):
                described = described | {"foreign": described["foreign"] or f"the mode {modes}"}
            # Code that is not known may count its calls.
            probe = "" if self.foreign or modes or is_moved_by_forwards(self.modules) else _probe(model)
            owner = weakref.ref(model)
            self.identities[precision, modes] = ModelIdentity(precision, **described, probe=probe, owner=owner)
        return self.identities[precision, modes]

    def is_current(self, model: Any, sampled: bool | None) -> bool:
        """True if nothing has changed, see `model_identity`."""
        # Every call comes here: loops over all modules run in C.
        if not all(map(operator.is_, map(self.look_up, *self.places), self.entries)):
            return False
        spaces, keys, functions = self.code
        if not all(map(operator.is_, map(getattr, spaces, keys), functions)) or self._traces(model) != self.traces:
            return False
        return not (self.on_cpu if sampled is None else sampled) or self.begin_sample(None)()

    def begin_sample(self, gather: Gather | None) -> Callable[[], bool]:
        """Begin to compare the sample with the model as it is now; the result waits for a device."""
        if gather is None:
            found = self._sample()
            return lambda: self._has_layout() and all(map(torch.equal, self.sample, found))
        if self.gathered is None:
            self.gathered = [gather(views) for views in self.views]
        begun = [found.begin() for found in self.gathered]
        return lambda: self._has_layout() and all(same(before) for before, same in zip(self.sample, begun, strict=True))

    def _has_layout(self) -> bool:
        return [*map(Tensor.stride, self.tensors)] == self.strides and not any(map(Tensor.is_neg, self.tensors))

    def _traces(self, model: Any) -> tuple[Any, ...]:
        """What differs after a change, without reading any tensor's elements."""
        return (
            any(self.empty),
            [*map(len, self.filled)],
            [*map(len, self.own)],
            [*map(len, self.spaces)],
            [*map(VERSION, self.counting)],
            steps_of(self.tensors),
            [*map(Tensor.data_ptr, self.tensors)],
            [*map(type, self.modules), *map(type, self.configs)],
            [*map(list, self.lists)],
            [_Same(one.values() if isinstance(one, dict) else one) for one in self.containers],
            [[*vars(config).values()] for config in self.configs],
            getattr(model, MODEL_ID, None),
        )

    def _sample(self) -> list[Tensor]:
        """Bits of the sampled elements, one tensor for each device and width."""
        return [torch.cat(views) for views in self.views]


class _Same(list[Any]):
    """Objects that only equal themselves. They are kept, as those that follow freed ones may have their addresses."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and len(self) == len(other) and all(map(operator.is_, self, other))

    __hash__ = None


def _probe(model: Any) -> str:
    executor = getattr(getattr(model, "base_model", None), "executor", None)
    return "" if executor is None else _as_probe(executor.sampled_outputs())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rounding(model: Any) -> str:
    """What rounds the products of a model besides its dtype."""
    device = model.device.type
    rounding = f"-autocast-{_short(torch.get_autocast_dtype(device))}" if torch.is_autocast_enabled(device) else ""
    if device == "cuda" and torch._C._get_cublas_allow_fp16_accumulation():
        rounding += "-fp16-sums"
    library = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device)
    # The older names of this raise an error where it was set by the newer one.
    products = "ieee" if library is None else library.matmul.fp32_precision
    return rounding + ("" if products in ("ieee", "none") else f"-{products}")


def _entry(group: Mapping[str, Any], name: str) -> Any:
    return group.get(name)
