"""Contents of an encoder's modules: tensors, plain values, and what cannot be read of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = [
    "MODEL_ID",
    "OWN_OF_MODULE",
    "VERSION",
    "changed_values",
    "containers",
    "dropping_module",
    "held_tensors",
    "is_inside",
    "is_moved_by_forwards",
    "is_plain",
    "leaves",
    "modules_inside",
    "options",
    "own_configs",
    "plain_values",
    "rates_of_dropout",
    "refuse_offloaded",
    "refuse_packed",
    "steps_of",
    "version_of",
    "versions_of",
    "watched_values",
]

VERSION = Tensor._version.__get__  # type: ignore[attr-defined]
"""Reads `_version` as `operator.attrgetter` would, but without a search in the classes of each tensor."""
MODEL_ID = "model_id"
"""Attribute of an encoder by which a user names what runs, where it cannot be identified."""
OWN_OF_MODULE = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""
# Modules that have no influence on keys and values.
_OUTSIDE = ("pooler", "contact_head")
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
    "_is_hf_initialized",
    # Of this package: made of what is here, and made again when that changes.
    "_packed_layers",
    "_tree",
    "all_tied_weights_keys",
    # What the weight of an eight-bit product was before it was rounded.
    "described",
    "gradient_checkpointing",
    "hf_device_map",
    "is_spread",
    "kernel_config",
    "loss_type",
    "name_or_path",
}
# Buffers that no forward writes.
_CONSTANT = {"inv_freq", "original_inv_freq", "position_ids"}
# Plain values that no forward reads: they are left out where every call looks.
_SHAPES = {"in_features", "out_features", "num_embeddings", "embedding_dim", "elementwise_affine"}


def modules_inside(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of an encoder that decide keys and values, by name; one in several places under each of its names."""
    return [(name, module) for name, module in model.named_modules(remove_duplicate=False) if is_inside(name)]


def is_inside(name: str) -> bool:
    """True if a module or tensor of this name decides keys and values."""
    return name.partition(".")[0] not in _OUTSIDE


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


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; an inference tensor counts none but those by optimizers."""
    return _STEPS.get(id(tensor), 0) + (0 if tensor.is_inference() else tensor._version)


def versions_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[int | None]]:
    """As `version_of`, of many tensors in C: numbers of in-place changes, and of those by optimizers."""
    try:
        # Another model's first step is none of these.
        return [*map(VERSION, tensors)], steps_of(tensors) or [None] * len(tensors)
    except RuntimeError:
        return [*map(version_of, tensors)], []


def steps_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """Number of beginnings and ends of steps that write each tensor; empty while there were none at all."""
    return [*map(_STEPS.get, map(id, tensors))] if _STEPS else []


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers write weights without counting it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _STEPS[id(parameter)] = _STEPS.get(id(parameter), 0) + 1


_STEPS: dict[int, int] = {}
# Both, so that neither what began before the step nor what began within it takes the weights for unchanged.
register_optimizer_step_pre_hook(_note_step)
register_optimizer_step_post_hook(_note_step)


def refuse_packed(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that modules hold their weights as tensors, and their code as that of their classes.

    Raises:
        ValueError: one does not, as those of `torch.ao.quantization.quantize_dynamic` and of `torch.jit`.
    """
    for name, module in named:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name} is compiled by TorchScript, so that nothing tells what it computes: put the module itself in"
                " its place"
            )
        if type(module).__module__.startswith(("torch.ao.", "torch.nn.quantized")):
            raise ValueError(
                f"{name} is {type(module).__qualname__} of {type(module).__module__}, whose weights are packed: a model"
                " quantised that way cannot run here; load it in float32, bfloat16 or float16"
            )


def held_tensors(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and other tensors that modules hold, also in collections, by name.

    Raises:
        ValueError: one is a view that negates what it views, so that its own bits do not tell its values.
    """
    for name, module in named:
        for key, value in leaves(module):
            if isinstance(value, Tensor):
                if value.is_neg():
                    raise ValueError(f"{name}.{key} is a negated view: put its `resolve_neg()` in its place")
                yield f"{name}.{key}", value


def leaves(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds besides modules and hooks, by name: tensors, and the contents of collections."""
    own = module.__dict__
    pending = [*own["_parameters"].items(), *own["_buffers"].items(), *_own_values(module)]
    while pending:
        key, value = pending.pop(0)
        if isinstance(value, Mapping):
            pending += [(f"{key}.{inner}", one) for inner, one in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            pending += [(f"{key}.{index}", one) for index, one in enumerate(value)]
        else:
            yield key, value


def _own_values(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (key, value) for key, value in module.__dict__.items() if not (key in OWN_OF_MODULE or key in _INERT_VALUES)
    ]


def _decides(module: nn.Module, key: str) -> bool:
    """True if a forward may read a plain value: what models keep in private is about loading and saving."""
    return not (key.startswith("_") and hasattr(module, "base_model_prefix"))


def containers(module: nn.Module) -> Iterator[dict[Any, Any] | list[Any] | set[Any]]:
    """Collections that a module holds and that can change in place."""
    pending = [value for key, value in _own_values(module) if _decides(module, key)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list | set):
            yield value
        if isinstance(value, dict | list | tuple):
            pending += value.values() if isinstance(value, dict) else value


def is_plain(value: Any, *others: type) -> bool:
    """True for JSON's values and their collections, sets and tuples among them, and for values of other types."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(is_plain(one, *others) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(one, *others) for one in value)
    return value is None or isinstance(value, (bool, int, float, str, *others))


def plain_values(module: nn.Module) -> dict[str, Any]:
    """Plain values that a module carries, except for those that decide nothing."""
    return {
        key: sorted(value, key=str) if isinstance(value, set | frozenset) else value
        for key, value in _own_values(module)
        if _decides(module, key) and is_plain(value, torch.dtype)
    }


def changed_values(module: nn.Module, made: nn.Module) -> list[str]:
    """Names of plain values that a module as made has otherwise, but for dropout rates and its place in the model."""
    own, usual = plain_values(module), plain_values(made)
    # The library's own layers of ESM-2 have no number.
    shared = (own.keys() & usual.keys()) - {"layer_idx", *rates_of_dropout(own)}
    return sorted(key for key in shared if own[key] != usual[key])


def watched_values(module: nn.Module) -> list[str]:
    """Names of those values of a module at which every call looks."""
    names = [key for key, _ in _own_values(module) if key not in _SHAPES and _decides(module, key)]
    return [*names, "training"] if _drops(module) else names


def dropping_module(named: Iterable[tuple[str, nn.Module]]) -> str:
    """Name of the first module that drops values at random, as in training; empty for none."""
    return next((name for name, module in named if module.training and _drops(module)), "")


def is_moved_by_forwards(modules: Iterable[nn.Module]) -> bool:
    """True if a forward draws values or changes what modules hold: in training mode, or where embeddings are scaled."""
    return any(
        (module.training and (_drops(module) or module._buffers.keys() - _CONSTANT))
        or getattr(module, "max_norm", None) is not None
        for module in modules
    )


def _drops(module: nn.Module) -> bool:
    return any(rates_of_dropout(module.__dict__).values())


def rates_of_dropout(own: Mapping[str, Any]) -> dict[str, float]:
    """Those among a module's values, and slopes that PyTorch's `RReLU` draws."""
    rates = {}
    for key, value in own.items():
        if key in ("p", "upper") or "drop" in key:
            # PEFT holds one for each adapter.
            held = value.values() if isinstance(value, dict) else [value]
            if numbers := [x for x in held if isinstance(x, int | float) and not isinstance(x, bool)]:
                rates[key] = max(numbers)
    return rates


def options(config: Any, named: Iterable[tuple[str, nn.Module]]) -> list[Any]:
    """What decides numbers in a configuration, and in plain values of modules."""
    configs = {"": config} | dict(own_configs(config, named))
    chosen = {
        name: {key: value for key, value in one.to_dict().items() if key not in _INERT_OPTIONS}
        for name, one in configs.items()
    }
    return [chosen, [(name, plain_values(module)) for name, module in named]]


def own_configs(config: Any, named: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    """Configurations of modules that are not the model's."""
    found = ((name, module.__dict__.get("config")) for name, module in named)
    return [(name, one) for name, one in found if one is not None and one is not config and hasattr(one, "to_dict")]
