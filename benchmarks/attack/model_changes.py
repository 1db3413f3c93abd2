"""Changes that people make to a model between making contexts and reading them: its weights, options and code.

Each takes a masked language model of the ESM-2 architecture and a stack that undoes what lies outside of the model.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.modules import linear
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm import modeling_esm

__all__ = ["CHANGES", "UNSEEN_IN_MEMORY", "adapt"]

Change = Callable[[Any, ExitStack], None]


def _layer(model: Any, index: int = 0) -> Any:
    return model.esm.encoder.layer[index]


def _scaled(x: Tensor) -> Tensor:
    return 1.2 * x


# Weights.


def feed_forward(model: Any, undo: ExitStack) -> None:
    weight = _layer(model).intermediate.dense.weight
    with torch.no_grad():
        # What moves 16-bit weights, too.
        weight.add_(weight.abs().clamp_min(3e-4) * weight.sign(), alpha=0.02)


def by_numpy(model: Any, undo: ExitStack) -> None:
    weight = _layer(model).intermediate.dense.weight.detach()
    weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()]).numpy()[3] ^= 1


def transposed(model: Any, undo: ExitStack) -> None:
    weight = _layer(model).attention.self.value.weight
    weight.data = weight.data.T


def swapped(model: Any, undo: ExitStack) -> None:
    layers = model.esm.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


def tied(model: Any, undo: ExitStack) -> None:
    _layer(model).attention.self.value.weight = _layer(model, 1).attention.self.value.weight


def put_back(model: Any, undo: ExitStack) -> None:
    """Behind the other layer, under its name."""
    layers = model.esm.encoder.layer._modules
    layers["0"] = layers.pop("0")


def passing_buffer(model: Any, undo: ExitStack) -> None:
    rotary = model.esm.rotary_embeddings
    rotary.register_buffer("inv_freq", rotary.inv_freq * 1.5, persistent=False)


def half_a_layer(model: Any, undo: ExitStack) -> None:
    _layer(model).output.to(torch.bfloat16 if model.dtype == torch.float32 else torch.float32)
    # PyTorch's norms take no bfloat16 beside weights in float16.
    undo.enter_context(torch.autocast("cpu", torch.float16 if model.dtype == torch.float16 else torch.bfloat16))


def product_precision(model: Any, undo: ExitStack) -> None:
    undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium")


# Options and plain values.


def own_configuration(model: Any, undo: ExitStack) -> None:
    own = copy.deepcopy(model.config)
    own.hidden_size *= 2
    _layer(model).attention.self.config = own


def training(model: Any, undo: ExitStack) -> None:
    model.esm.embeddings.dropout.p = 0.1
    model.train()


# Code.


def code_object(model: Any, undo: ExitStack) -> None:
    undo.callback(setattr, modeling_esm.rotate_half, "__code__", modeling_esm.rotate_half.__code__)
    modeling_esm.rotate_half.__code__ = (lambda x: x).__code__


def recompiled(model: Any, undo: ExitStack) -> None:
    """As by a library that rewrites source, or by `importlib.reload` after an edit."""
    source = inspect.getsource(modeling_esm.rotate_half).replace("-x2", "x2")
    undo.callback(setattr, modeling_esm, "rotate_half", modeling_esm.rotate_half)
    exec(compile(source, str(modeling_esm.__file__), "exec"), vars(modeling_esm))


class _Steered(modeling_esm.EsmOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden_states, input_tensor)
        return output.roll(1, -1)


def wrapped_code(model: Any, undo: ExitStack) -> None:
    """Of the function that is wrapped most deeply."""
    function = modeling_esm.EsmRotaryEmbedding.forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__

    def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        angle = (position_ids[..., None] * self.inv_freq.repeat(2)).to(x.dtype)
        return angle.cos(), angle.cos()

    undo.callback(setattr, function, "__code__", function.__code__)
    function.__code__ = forward.__code__


def attention_default(model: Any, undo: ExitStack) -> None:
    """Causal."""
    dropout, scaling, _, *others = sdpa_attention_forward.__defaults__
    undo.callback(setattr, sdpa_attention_forward, "__defaults__", sdpa_attention_forward.__defaults__)
    sdpa_attention_forward.__defaults__ = (dropout, scaling, True, *others)


def instance_forward(model: Any, undo: ExitStack) -> None:
    dense = _layer(model).output.dense
    dense.forward = lambda x: 2 * nn.functional.linear(x, dense.weight)


def partial_forward(model: Any, undo: ExitStack) -> None:
    dense = _layer(model).output.dense
    dense.forward = functools.partial(nn.functional.linear, weight=2 * dense.weight.detach())


def borrowed_forward(model: Any, undo: ExitStack) -> None:
    _layer(model).output.dense.forward = _layer(model, 1).output.dense.forward


def global_hook(model: Any, undo: ExitStack) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    undo.callback(handle.remove)


class _Modules:
    """A module in which one function is another."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__ = {**vars(module), **others}


class _Descriptor:
    """Gives layers that seem to hold others than they do."""

    def __get__(self, owner: Any, kind: Any) -> Any:
        return self if owner is None else nn.Sequential(owner._modules["dense"], nn.Tanh())

    def __set__(self, owner: Any, value: Any) -> None:
        owner._modules["dense"] = value


class _Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is nn.functional.linear else result


def attention_function(model: Any, undo: ExitStack) -> None:
    name = model.config._attn_implementation
    library = ALL_ATTENTION_FUNCTIONS[name]

    def attend(*args: Any, **options: Any) -> Any:
        output, weights = library(*args, **options)
        return 1.5 * output, weights

    undo.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, {name: attend}))


def own_attention(model: Any, undo: ExitStack) -> None:
    name = model.config._attn_implementation
    undo.enter_context(
        mock.patch.dict(
            ALL_ATTENTION_FUNCTIONS._local_mapping,
            {"mine": lambda *args, **options: (1.5 * ALL_ATTENTION_FUNCTIONS[name](*args, **options)[0], None)},
        )
    )
    model.config._attn_implementation = "mine"


# Modules and adapters.


def replaced(model: Any, undo: ExitStack) -> None:
    _layer(model).output.dense = nn.Sequential(_layer(model).output.dense, nn.Tanh())


class _Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class _Tensor(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return 2 * result if func is nn.functional.linear else result


def kernel(model: Any, undo: ExitStack) -> None:
    """Put another kernel in place of PyTorch's own, as compilers and makers of devices do."""
    library = torch.library.Library("aten", "IMPL")
    undo.callback(library._destroy)
    library.impl("erf", lambda x: -torch.tanh(x), "CPU")


def tensor_class(model: Any, undo: ExitStack) -> None:
    dense = _layer(model).output.dense
    dense.weight = nn.Parameter(dense.weight.detach().as_subclass(_Tensor))


def adapt(model: Any) -> None:
    """Add two adapters to the values of all layers, of which the first is active."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for name in ("default", "other"):
            options = LoraConfig(r=2, target_modules=["value"], init_lora_weights=False)
            inject_adapter_in_model(options, model.esm, adapter_name=name)
    for layer in model.esm.encoder.layer:
        layer.attention.self.value.set_adapter("default")
    model.to(model.dtype).eval()


def adapter_scaled_twice(model: Any, undo: ExitStack) -> None:
    """The second number may lie where the first did."""
    for layer in model.esm.encoder.layer:
        layer.attention.self.value.scale_layer(2.0)
        layer.attention.self.value.scale_layer(2.0)


# What needs no more than a line.


def _set(path: str, value: object) -> Change:
    """Set an attribute, named from the model on."""
    owner, _, name = path.rpartition(".")
    return lambda model, undo: setattr(attrgetter(owner)(model), name, value)


def _patch(owner: Any, name: str, new: object, **options: Any) -> Change:
    """Put something in place of an attribute of a module or class."""

    def change(model: Any, undo: ExitStack) -> None:
        undo.enter_context(mock.patch.object(owner, name, new, **options))

    return change


def _hook(register: str, path: str, function: Callable[..., Any]) -> Change:
    """Register a hook on a submodule of the first layer."""

    def change(model: Any, undo: ExitStack) -> None:
        getattr(_layer(model).get_submodule(path), register)(function)

    return change


def _write(path: str, write: Callable[[Any], object]) -> Change:
    """Change a submodule of the first layer by a call, in which weights may be written."""

    def change(model: Any, undo: ExitStack) -> None:
        with torch.no_grad():
            write(_layer(model).get_submodule(path))

    return change


_adapter = functools.partial(_write, "attention.self.value")
_BIAS = "esm.encoder.layer.0.attention.self.key.bias"
_forward, _divide = modeling_esm.EsmIntermediate.forward, Tensor.__truediv__


_FUNCTIONS = (
    feed_forward,
    by_numpy,
    transposed,
    swapped,
    tied,
    put_back,
    passing_buffer,
    half_a_layer,
    product_precision,
    own_configuration,
    training,
    code_object,
    recompiled,
    wrapped_code,
    attention_default,
    instance_forward,
    partial_forward,
    borrowed_forward,
    global_hook,
    attention_function,
    own_attention,
    replaced,
    kernel,
    tensor_class,
    adapter_scaled_twice,
)
CHANGES: dict[str, Change] = {change.__name__: change for change in _FUNCTIONS} | {
    "element": _write("intermediate.dense", lambda dense: dense.weight.data.view(-1)[7].add_(1)),
    "part": _write("output.dense", lambda dense: dense.weight.data[:4].mul_(1.5)),
    "negated": _write("output.dense", lambda dense: setattr(dense.weight, "data", torch._neg_view(dense.weight.data))),
    # Those that are the highest bits of words of eight bytes.
    "signs": _write("intermediate.dense", lambda dense: dense.weight[:, 3::4].neg_()),
    "buffer": lambda model, undo: model.esm.rotary_embeddings.inv_freq.mul_(1.01),
    "state_dict": lambda model, undo: model.load_state_dict({_BIAS: model.state_dict()[_BIAS] + 0.5}, strict=False),
    "other_dtype": lambda model, undo: model.to({torch.bfloat16: torch.float32}.get(model.dtype, torch.bfloat16)),
    "whole_dropout": _set("esm.encoder.layer.0.output.dropout", nn.Dropout(1)),
    "parametrization": _write(
        "output.dense", lambda dense: parametrize.register_parametrization(dense, "weight", _Half(), unsafe=True)
    ),
    "eps": _set("esm.encoder.layer.1.attention.LayerNorm.eps", 1e-2),
    "token_dropout": _set("esm.embeddings.token_dropout", False),
    "mask_token": _set("esm.embeddings.mask_token_id", 4),
    "attention_scaling": _set("esm.rotary_embeddings.attention_scaling", 1.5),
    "configuration": _set("esm.config.layer_norm_eps", 1e-2),
    "scaling": _set("esm.encoder.layer.0.attention.self.scaling", 2.0),
    "other_class": _set("esm.encoder.layer.0.output.__class__", _Steered),
    "function_mode": lambda model, undo: undo.enter_context(_Doubled()),
    "tensor_method": _patch(Tensor, "masked_fill", lambda x, *_: 0.5 * x),
    "wrapped_method": _patch(Tensor, "cos", Tensor.sin),
    "operator_method": _patch(Tensor, "__truediv__", lambda x, y: 1.2 * _divide(x, y)),
    "class_forward": _patch(modeling_esm.EsmIntermediate, "forward", lambda self, x: 1.1 * _forward(self, x)),
    "wrapped_class": _patch(
        modeling_esm.EsmIntermediate,
        "forward",
        torch.no_grad()(functools.wraps(_forward)(lambda self, x: 1.1 * _forward(self, x))),
    ),
    "function": _patch(modeling_esm, "gelu", relu),
    "inner_function": _patch(modeling_esm, "rotate_half", lambda x: x),
    "partial_function": _patch(modeling_esm, "rotate_half", functools.partial(torch.roll, shifts=1)),
    "cached_function": _patch(modeling_esm, "rotate_half", functools.lru_cache(_scaled)),
    "functional": _patch(nn.functional, "linear", lambda x, w, b=None: x @ w.T),
    "library_functional": _patch(nn.functional, "gelu", relu),
    "module_of_functions": _patch(linear, "F", _Modules(nn.functional, linear=lambda x, w, b=None: x @ w.T)),
    "class_descriptor": _patch(modeling_esm.EsmIntermediate, "dense", _Descriptor(), create=True),
    "class_property": _patch(modeling_esm.EsmEmbeddings, "mask_token_id", property(lambda self: 4), create=True),
    "hook": _hook("register_forward_hook", "", lambda *_: None),
    "steering_hook": _hook("register_forward_hook", "output", lambda module, args, output: output.roll(1, -1)),
    "pre_hook": _hook("register_forward_pre_hook", "attention", lambda *_: None),
    "hook_of_library": _hook("register_forward_hook", "intermediate", nn.Sequential(nn.Identity())),
    "adapter": lambda model, undo: adapt(model),
    "adapter_written": _adapter(lambda values: values.lora_B["default"].weight.mul_(2)),
    "adapter_scaled": _adapter(lambda values: values.scaling.update(default=4 * values.scaling["default"])),
    "adapter_disabled": _adapter(lambda values: values.enable_adapters(False)),
    "adapter_switched": _adapter(lambda values: values.set_adapter("other")),
    "adapter_added": _adapter(lambda values: values._active_adapter.append("other")),
    "adapter_merged": _adapter(lambda values: values.merge()),
}
"""Each is refused, or leaves results as they are to 1e-3; those that begin with `adapter_` are of models that `adapt`
has changed."""
UNSEEN_IN_MEMORY = ("element", "by_numpy", "kernel")
"""Of these a cache in memory knows nothing: writes through `.data` or NumPy to few elements, kernels of PyTorch."""
