"""Models whose layers lie on several devices, since they are larger than one.

accelerate decides where layers lie, and the library loads them there. Everything else of a model, some megabytes, lies
with its embeddings: at home, where inputs are given and outputs are returned, and where the token ids and lengths of
caches lie. accelerate's hooks, which move what every linear layer is given, are then replaced by one for each layer, so
that operations are fused as on one device. Weights stay where they are: none is copied from a CPU or a disk when used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esm_turbo.files.extras import install_hint
from esm_turbo.files.families import encoder_of, family_of
from esm_turbo.files.model_contents import refuse_offloaded

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Of accelerate, see `plan`."""


class ToWeights:
    """Moves the tensors that a module is given to the device of its weights; a forward pre-hook."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = next(module.parameters()).device
        return _moved(args, device), {name: _moved(value, device) for name, value in kwargs.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    # Sessions, which are not tuples, have tensors on every device.
    return tuple(_moved(part, device) for part in value) if type(value) is tuple else value


def to_weight_device(weight: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors on the device of a weight; as they are if they are there."""
    device = weight.device
    return tensors if tensors[0].device == device else tuple(tensor.to(device) for tensor in tensors)


def needs_accelerate() -> None:
    """Check that accelerate is installed.

    Raises:
        ImportError: it is not.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(f"device_map needs accelerate: {install_hint('large')}")


def plan(
    model: nn.Module,
    device_map: str | Mapping[str, Any],
    max_memory: Mapping[int | str, int | str] | None,
    dtype: torch.dtype,
) -> dict[str, torch.device]:
    """Decide where the parts of a model lie.

    Args:
        model: a model of this package on the meta device.
        device_map: one of `STRATEGIES`, or devices by name of a layer or of any other module.
        max_memory: bytes that may be used by device, see accelerate's `infer_auto_device_map`; None for what is free.
        dtype: in which the model is loaded.

    Returns:
        The device of every layer, and of each module beside them: that of the embeddings.

    Raises:
        ImportError: accelerate is missing, which shares layers out.
        ValueError: the map names what the model does not have, or leaves out a part of it; a device cannot be used; or
            weights would have to stay on the CPU or on a disk.
    """
    if isinstance(device_map, str):
        needs_accelerate()
        given, more = _by_strategy(model, device_map, max_memory, dtype), " use more devices or raise `max_memory`, or"
    else:
        if max_memory is not None:
            raise ValueError("`max_memory` is for a strategy, such as device_map='auto': this map names the devices")
        given, more = {str(name): device for name, device in device_map.items()}, ""
        _check_names(model, given)
    devices = {name: _device(value, name) for name, value in given.items()}
    layers = list(_layer_names(model))
    parameters = [name for name, _ in model.named_parameters()]
    # Of a layer whose parts are given several devices, that of the first.
    found = {layer: _find(devices, next(name for name in parameters if _holds(layer, name))) for layer in layers}
    home = _find(devices, parameters[0])
    found |= dict.fromkeys(_beside_layers(model, layers), home)
    placed = {name: device for name, device in found.items() if device is not None}
    absent = [name for name, device in found.items() if device is None or device.type == "cpu"]
    if (absent and {device.type for device in placed.values()} != {"cpu"}) or len(placed) < len(found):
        raise ValueError(
            f"`device_map` leaves {len(absent)} parts of the model, such as {absent[0]!r}, on the CPU or a disk, from"
            f" where every use would copy them:{more} run all of it on the CPU"
        )
    return placed


def _by_strategy(
    model: nn.Module, strategy: str, max_memory: Mapping[int | str, int | str] | None, dtype: torch.dtype
) -> dict[str, Any]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    model.tie_weights()  # type: ignore[operator]
    whole: dict[str, Any] = {"no_split_module_classes": sorted(model._no_split_modules or ()), "dtype": dtype}  # type: ignore[arg-type]
    memory = get_max_memory(None if max_memory is None else dict(max_memory))
    if strategy != "sequential":
        memory = get_balanced_memory(model, memory, low_zero=strategy == "balanced_low_0", **whole)
    found: dict[str, Any] = infer_auto_device_map(model, memory, **whole)
    return found


def _check_names(model: nn.Module, given: Collection[str]) -> None:
    """Check that every name of a map is a module's, and that they cover all parameters."""
    modules = {name for name, _ in model.named_modules()}
    unknown = [name for name in given if name not in modules]
    if unknown:
        first, *_, last = _layer_names(model)
        raise ValueError(
            f"`device_map` names {unknown[0]!r}, which the model does not have; its layers are {first!r} to {last!r}"
        )
    missing = [name for name, _ in model.named_parameters() if not any(_holds(one, name) for one in given)]
    if missing:
        raise ValueError(
            f"`device_map` gives no device for {len(missing)} weights of the model, such as {missing[0]!r}"
        )


def _device(value: Any, name: str) -> torch.device | None:
    """A device of a map; None for a disk.

    Raises:
        ValueError: it cannot be used here.
    """
    if value == "disk":
        return None
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
        torch.empty(0, device=device)
    # A torch build without support for a device type raises an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"`device_map` puts {name!r} on {value!r}, which cannot be used here: {reason}") from None
    return device


def _holds(module: str, name: str) -> bool:
    return module in ("", name) or name.startswith(f"{module}.")


def _find(devices: Mapping[str, torch.device | None], parameter: str) -> torch.device | None:
    """The device of a parameter: that of the longest name that holds it."""
    return devices[max((name for name in devices if _holds(name, parameter)), key=len)]


def _layer_names(model: Any) -> Iterator[str]:
    family = family_of(model.config.model_type, type(model).__name__)
    encoder = encoder_of(model)
    path = family.layers if encoder is model else f"{family.attribute}.{family.layers}"
    return (f"{path}.{index}" for index in range(len(encoder.get_submodule(family.layers))))


def _beside_layers(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Names of the largest modules with weights or buffers that have no layer in them, nor are in one."""
    layers = set(layers)
    above = {"", *(name.rpartition(".")[0] for name in layers)}
    while more := {name.rpartition(".")[0] for name in above} - above:
        above |= more
    found: list[str] = []
    for name, module in model.named_modules():
        inside = name in above or name in layers or name.rpartition(".")[0] not in above
        if not inside and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
            found.append(name)
    return found


def finalize_dispatch(model: Any) -> None:
    """Make a model whose layers have been loaded to several devices run there; nothing changes for one device.

    Raises:
        ValueError: weights lie on no device.
    """
    refuse_offloaded(model.named_parameters())
    if hasattr(model, "hf_device_map"):
        from accelerate.hooks import remove_hook_from_submodules

        remove_hook_from_submodules(model)
        for module in model.modules():
            # What is left is the forward of its class, but looks like another one.
            if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
                del module.forward
    layers = list(_layer_names(model))
    devices = {next(model.get_submodule(name).parameters()).device for name in layers}
    home = next(model.parameters()).device
    if devices == {home}:
        return
    for name in _beside_layers(model, layers):
        move_module(model.get_submodule(name), home)
    for name in (*layers, *_beside_layers(model, layers)):
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()):
            module.register_forward_pre_hook(ToWeights(), with_kwargs=True)
    encoder_of(model).is_spread = True


def move_module(module: nn.Module, device: torch.device) -> None:
    """Put the tensors of a module on a device; other modules that share them keep theirs where they are."""
    for own in module.modules():
        for name, parameter in own._parameters.items():
            if parameter is not None and parameter.device != device:
                own._parameters[name] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in own._buffers.items():
            if buffer is not None:
                own._buffers[name] = buffer.to(device)


def layer_devices(encoder: Any) -> list[torch.device]:
    """The device of every layer of an encoder whose keys and values are stored."""
    layers = zip(encoder.get_submodule(encoder.family.layers), encoder.layer_kinds, strict=True)
    return [next(layer.parameters()).device for layer, kind in layers if kind.stored]
