"""The code that runs in a model's forward: its names, and whether known libraries are its authors."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from esm_turbo.files.model_contents import OWN_OF_MODULE, changed_values, is_plain, leaves

__all__ = [
    "GLOBAL_HOOKS",
    "HOOKS",
    "ForwardCode",
    "active_modes",
    "changes_no_number",
    "has_global_hooks",
    "is_recorder",
]

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where modules have hooks."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
"""Where PyTorch has those of all modules."""
# Whose code is what its version says.
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "esm_turbo")
# Where modelling code finds PyTorch's functions and methods by name.
_TORCH = (torch, nn.functional, Tensor)
# What code calls by operators, which it does not name, and rotary embeddings of this package, which are not followed.
_UNNAMED = frozenset(
    f"__{kind}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul", "and", "or")
    for kind in ("", "r", "i")
) | {"__neg__", "__invert__", "__getitem__", "__setitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_UNNAMED |= {"cat", "cos", "sin"}
# What a call of a module passes through, and how lists of modules give them.
_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getitem__", "__iter__")
# What is not written in Python, and holds nothing; a function of this kind may be bound.
_BUILTINS = (
    type,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    # What it holds are functions, which are judged by themselves.
    property,
    functools._lru_cache_wrapper,
)
_OWN = "esm_turbo."
# Modules of this package that are the attention of its own models.
_OWN_ATTENTION = (f"{_OWN}model.plan", f"{_OWN}model.sequences")
# The attention that modules of the library's models call if no other is registered.
_EAGER = "eager_attention_forward"
# What makes their masks.
_MASKS = re.compile("create_.*_mask")
# These move tensors between devices or record them, and compute nothing.
_INERT = ("accelerate.", _OWN, "transformers.utils.", "torch._dynamo.")


def has_global_hooks() -> bool:
    """True if there are hooks of all modules."""
    return any(getattr(torch_module, name) for name in GLOBAL_HOOKS)


def is_recorder(hook: Any) -> bool:
    """True if a hook is the library's own, which records hidden states while a forward asks for them."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.utils.")


def changes_no_number(hook: Any) -> bool:
    """True if a hook is the library's own, and only records, or lets gradients reach embeddings for checkpointing."""
    from transformers import PreTrainedModel

    if is_recorder(hook):
        return True
    known = PreTrainedModel.enable_input_require_grads.__code__.co_consts
    is_whole = isinstance(hook, types.FunctionType) and not (hook.__closure__ or hook.__defaults__)
    return is_whole and hook.__code__ in known and is_known(hook)


def active_modes() -> str:
    """Classes of PyTorch's modes that see every operation of this thread, other than PyTorch's own; empty for none.

    Among them is that in which parametrized weights are not computed anew when they change.
    """
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    if parametrize._cache_enabled:
        return "torch.nn.utils.parametrize.cached"
    if not functions and not dispatches:
        return ""
    modes = [torch._C._get_function_stack_at(index) for index in range(functions)]
    modes += [torch._C._get_dispatch_stack_at(index) for index in range(dispatches)]
    return ", ".join(_name_of(type(mode)) for mode in modes if not _is_of_library(type(mode)))


class ForwardCode:
    """Classes and functions that a forward runs.

    Attributes:
        names: of classes, of their functions and of what these call in their own modules, and digests of the files of
            the library's models.
        watched: class or module, name and value of each of those functions.
        classes: whose functions these are.
        foreign: the first of them that is not of a known library, for a message; empty for none.
        attention: likewise, what makes the attention of the library's models another one than they define: a function
            of `foreign`, or an option of a module that its class sets otherwise.
        replaces: whether a name of the library's models, or a method of a class or module, stands for something else
            than their file defines, be it of a known library; kernels that compute what the file says do not compute
            that.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]], configs: Sequence[Any]) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention = getattr(configs[0], "_attn_implementation", None)
        self.names: list[str] = []
        self.watched: list[tuple[Any, str, Any]] = []
        self.foreign, self.replaces = "", False
        self._inside = {id(module) for _, module in named}
        self._known: set[tuple[str, str]] = set()
        self._called: set[str] = set()
        self.classes = dict.fromkeys(one for _, module in named for one in type(module).__mro__ if _runs(one))
        # Functions of the modules in which classes are defined, which these call.
        self._modules = {one.__module__ for one in self.classes if not one.__module__.startswith("torch.")}
        places = [vars(sys.modules[name]) for name in self._modules if ".models." in name]
        if attention is not None and attention in ALL_ATTENTION_FUNCTIONS:
            # Those of the library differ by rounding.
            attends = [ALL_ATTENTION_FUNCTIONS[attention]]
            self._add(_Entries(ALL_ATTENTION_FUNCTIONS), attention, attends[0], "attention", named=False)
            # None of them has other defaults of its own.
            arguments = inspect.signature(attends[0]).parameters.values()
            self.names += [str(one) for one in arguments if one.default not in (one.empty, None, 0)]
        else:
            attends = [space[_EAGER] for space in places if _EAGER in space]
            for attend in attends:
                self._judge(attend, _EAGER)
        masks = {key: value for space in places for key, value in space.items() if _MASKS.fullmatch(key)}
        for key, value in masks.items():
            self._judge(value, key)
        if attention is not None and attention in ALL_MASK_ATTENTION_FUNCTIONS:
            masks["mask"] = ALL_MASK_ATTENTION_FUNCTIONS[attention]
            self._add(_Entries(ALL_MASK_ATTENTION_FUNCTIONS), attention, masks["mask"], "mask")
        self._follow(attends)
        # Watched, but part of no digest, as in files of earlier versions.
        self._follow([*masks.values()], named=False)
        for own in filter(None, map(sys.modules.get, _OWN_ATTENTION)):
            for key, value in list(vars(own).items()):
                if key.islower() and callable(value):
                    self._add(own, key, value, f"{own.__name__}.{key}", named=False)
        attends_by_name = any("is_causal" in vars(module) for _, module in named)
        self.attention = (self.foreign or _changed_option(named, attention)) if attends_by_name else ""
        if has_global_hooks():
            self._blame("a global forward hook")
        for kind in dict.fromkeys(one for config in configs for one in type(config).__mro__):
            self._add_configuration(kind)
        for name, module in named:
            self._add_module(name, module)
        self.names += [f"{name} {_file_digest(name)}" for name in sorted(self._modules) if ".models." in name]
        self._follow([function for one in self.classes for function in self._functions(one)], _UNNAMED)

    def _follow(self, pending: list[Any], called: Set[str] = frozenset(), *, named: bool = True) -> None:
        """Add what functions call, and those of PyTorch's that are called by name, `called` among them."""
        modules, known = self._modules, self._known
        called = set(called)
        # Each function finds names in its own module: of a decorated one, that of the decorator is another.
        pending = [inner for function in pending for inner in _with_wrapped(function)]
        while pending:
            function = pending.pop()
            space = function.__globals__
            own = _called_names(function)
            called |= own
            for key in own:
                place = space.get("__name__", ""), key
                if place in known or key not in space:
                    continue
                value = space[key]
                if place[0].startswith(_OWN) and (isinstance(value, type) or not callable(value)):
                    continue
                known.add(place)
                if ".models." in place[0] and place[0] in modules and key in _definitions(space["__file__"]):
                    self.replaces |= not _is_defined_as(value, *place)
                self._add(_Namespace(space), key, value, f"{place[0]}.{key}", named=named and place[0] in modules)
                if isinstance(value, types.FunctionType) and value.__module__ in modules:
                    pending += _with_wrapped(value)
        called -= self._called
        if named:
            self._called |= called
        for library in _TORCH:
            for key in called:
                value = getattr(library, key, None)
                # What a class makes anew at each access, such as `Tensor.__call__`, cannot be replaced in the module.
                if value is not None and value is getattr(library, key):
                    self._add(library, key, value, f"{library.__name__}.{key}", named=named)

    def _add_module(self, name: str, module: nn.Module) -> None:
        kind = type(module)
        self.names.append(f"{name} {kind.__module__}.{kind.__qualname__}")
        if not _is_of_library(kind):
            self._blame(f"{kind.__module__}.{kind.__qualname__} ({name})")
        for hook in (hook for hooks in HOOKS for hook in module.__dict__[hooks].values()):
            if not changes_no_number(hook):
                self._add_own(name, hook, f"a hook of {name or 'the model'}", module)
        for key, value in leaves(module):
            if isinstance(value, Tensor):
                if not _is_of_library(type(value)):
                    self._blame(f"{_name_of(type(value))}, the class of {name}.{key},")
            elif isinstance(value, nn.Module):
                if id(value) not in self._inside:
                    self._blame(f"{_name_of(type(value))}, as {name}.{key},")
            elif not is_plain(value, torch.dtype) and not _is_checkpointing(value):
                self._add_own(f"{name}.{key}", value, f"{name}.{key}", module)
                self.replaces |= isinstance(getattr(kind, key, None), types.FunctionType)

    def _add_configuration(self, kind: type) -> None:
        """What a class of configurations computes, if it is not of another library."""
        for key, value in list(vars(kind).items()):
            shown = f"{kind.__module__}.{kind.__qualname__}.{key}"
            if key.startswith("__") or not _runs_when_used(value):
                continue
            if not _is_of_library(kind):
                self._blame(f"{shown}, of a configuration,")
            elif kind.__module__.startswith(_OWN):
                self._add(kind, key, value, shown)
                self._judge(getattr(value, "fget", value), shown)

    def _add_own(self, name: str, value: Any, shown: str, module: nn.Module) -> None:
        """What one module has of its own: of a function, only that of the library itself is known."""
        if callable(value) and not _name_of(value).startswith(_INERT):
            self.names.append(f"{name} {_name_of(value)} {_plain_state(value)}")
        if not _is_known_own(value, module):
            self._blame(f"{_name_of(value)}, as {shown},")

    def _functions(self, one: type) -> Iterator[Any]:
        whole = ".models." in one.__module__ or one.__module__.startswith(_OWN)
        for key, value in list(vars(one).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            shown = f"{one.__module__}.{one.__qualname__}.{key}"
            is_method = isinstance(function, types.FunctionType) and not key.startswith("__")
            if ".models." in one.__module__ and (is_method or key == "forward"):
                self.replaces |= not _is_defined_as(function, one.__module__, f"{one.__qualname__}.{key}")
            if isinstance(function, types.FunctionType):
                # Of PyTorch's and the library's own bases only what a call passes through.
                if key in _CALLS or (whole and not key.startswith("__")):
                    self._add(one, key, getattr(one, key), shown)
                    yield function
                self._judge(function, shown)
                continue
            is_option = whole and not key.startswith("_") and isinstance(value, bool | int | float | str)
            if is_option or (not key.startswith("__") and _runs_when_used(value)):
                self._add(one, key, value, shown)

    def _add(self, space: Any, key: str, value: Any, shown: str, *, named: bool = True) -> None:
        if not isinstance(value, types.MethodType):
            self.watched.append((space, key, value))
        for inner in _with_wrapped(value) if isinstance(value, types.FunctionType) else ():
            self.watched += [(inner, name, getattr(inner, name)) for name in ("__code__", "__defaults__")]
            cells = filter(_is_filled, inner.__closure__ or ())
            self.watched += [(cell, "cell_contents", cell.cell_contents) for cell in cells]
        # This package may rename what computes the same.
        if named and not _name_of(value).startswith(_OWN):
            self.names.append(f"{shown} {_described(value)}")
        self._judge(value, shown)

    def _judge(self, value: Any, shown: str) -> None:
        if not self.foreign and not is_known(value):
            self._blame(f"{_name_of(value)}, as {shown},")

    def _blame(self, what: str) -> None:
        self.foreign = self.foreign or what


def _changed_option(named: Sequence[tuple[str, nn.Module]], attention: str | None) -> str:
    """The first option of attention or rotary modules that their class, or the model, sets otherwise; empty for none.

    Args:
        named: all modules.
        attention: the model's implementation of it.
    """
    made: dict[type, nn.Module] = {}
    for name, module in named:
        if vars(module).get("attention_scaling", 1.0) != 1.0:
            return f"{name}.attention_scaling"
        if "is_causal" not in vars(module):
            continue
        own = getattr(module, "config", None)
        if getattr(own, "is_causal", None):
            return "config.is_causal"
        if getattr(own, "_attn_implementation", attention) != attention:
            return f"{name}.config._attn_implementation"
        kind = type(module)
        if _is_of_library(kind) and kind not in made:
            with torch.device("meta"):
                made[kind] = kind(module.config, layer_idx=module.layer_idx)
        if kind in made and (changed := changed_values(module, made[kind])):
            return f"{name}.{changed[0]}"
    return ""


def misplaced_layer(model: Any) -> str:
    """The first attention whose `layer_idx` is not its place among the layers of the model; empty for none.

    Layers that were exchanged, or stand in a model twice, would read and write the contexts of another layer, and those
    that were added may attend in another way.
    """
    count = model.config.num_hidden_layers
    layers = [(n, m.layer_idx) for n, m in model.named_modules(remove_duplicate=False) if "layer_idx" in vars(m)]
    return next((f"{name}.layer_idx" for place, (name, own) in enumerate(layers) if own != place or own >= count), "")


def _runs(one: type) -> bool:
    return issubclass(one, nn.Module) or one.__module__.startswith(_OWN)


class _Namespace:
    """Globals of a module, as attributes."""

    def __init__(self, space: dict[str, Any]) -> None:
        self.__dict__ = space


class _Entries:
    """Entries of another mapping, as attributes."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.space = space

    def __getattr__(self, name: str) -> Any:
        return self.space.get(name)


def _name_of(value: Any) -> str:
    value = getattr(value, "func", value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def _described(value: Any) -> str:
    """What stands for a value in digests: its name, with the values that it computes with."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType):
        values = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_cells(value)]
        plain = [one for one in values if isinstance(one, bool | int | float | str)]
        return f"{_name_of(value)} {value.__code__.co_qualname} {plain}"
    # Sets have no order.
    return repr(value) if is_plain(value) and not isinstance(value, set | frozenset) else _name_of(value)


def _with_wrapped(function: Any) -> Iterator[types.FunctionType]:
    """A function, and those that it wraps, one within the other."""
    while function is not None:
        if isinstance(function, types.FunctionType):
            yield function
        function = getattr(function, "__wrapped__", None)


def _called_names(function: types.FunctionType) -> set[str]:
    """Global names in a function's code, and in that of functions within it."""
    names: set[str] = set()
    pending: list[Any] = [function.__code__]
    while pending:
        code = pending.pop()
        if isinstance(code, types.CodeType):
            names.update(code.co_names)
            pending += code.co_consts
    return names


def _is_known_own(value: Any, module: nn.Module) -> bool:
    """True if what a module or its hook holds is the library's, and holds nothing else itself."""
    if isinstance(value, functools.partial):
        # accelerate's forward, which moves tensors; its hooks are judged by themselves.
        return _name_of(value).startswith("accelerate.hooks.") and value.args == (module,)
    if isinstance(value, types.MethodType):
        # A method of another module computes with the weights of that one.
        inert = _name_of(value).startswith(_INERT) and not isinstance(value.__self__, nn.Module)
        return (value.__self__ is module or inert) and is_known(value.__func__)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return is_known(value) and (_is_found_by_name(value) or _name_of(value).startswith(_INERT))
    if isinstance(value, type):
        return _is_of_library(value)
    # accelerate joins hooks to one.
    parts = [value, *getattr(value, "hooks", ())]
    return not (isinstance(value, nn.Module) or (callable(value) and _plain_state(value) is None)) and all(
        _is_of_library(type(one)) for one in parts
    )


def _is_checkpointing(value: Any) -> bool:
    """True of what computes the same layer again for gradients, with plain options."""
    function, options = getattr(value, "func", value), getattr(value, "keywords", {})
    return function is checkpoint and not getattr(value, "args", ()) and is_plain(options)


def _plain_state(value: Any) -> list[tuple[str, Any]] | None:
    """What an object holds, such as a hook that prunes; None where that is more than plain values."""
    state = getattr(value, "__dict__", None)
    return sorted(state.items()) if is_plain(state) and state is not None else None


def _runs_when_used(value: Any) -> bool:
    """True for what is called, and for members of a class that compute what an instance seems to hold."""
    return callable(value) or hasattr(type(value), "__get__")


def _is_found_by_name(value: Any) -> bool:
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def is_known(value: Any, depth: int = 8) -> bool:
    """True if what a class or a module of code holds is of the known libraries, with what it wraps."""
    if isinstance(value, types.MethodType):
        owner = value.__self__
        known = isinstance(owner, type) or (_is_of_library(type(owner)) and not isinstance(owner, nn.Module | Tensor))
        return known and is_known(value.__func__, depth)
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType | type | None)
    if not isinstance(value, types.FunctionType):
        if isinstance(value, functools.partial) or depth == 0:
            return False
        if _runs_when_used(value) and not isinstance(value, _BUILTINS) and _holds(value):
            return False
        wrapped = getattr(value, "__wrapped__", None) if not isinstance(value, types.ModuleType) else None
        return (wrapped is None or is_known(wrapped, depth - 1)) and (
            is_plain(value) or _is_of_library(value if isinstance(value, type) else type(value), stdlib=True)
        )
    if not (_is_library(value.__code__.co_filename) and _is_in_file(value.__code__)):
        return False
    return depth == 0 or all(_is_known_cell(one, depth - 1) for one in _cells(value))


def _is_known_cell(value: Any, depth: int) -> bool:
    """True if what a function closes over is known: not an object, which decorators keep, whose state is its own."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return is_known(value, depth)
    if isinstance(value, list | tuple):
        return all(_is_known_cell(one, depth) for one in value)
    if isinstance(value, contextlib._GeneratorContextManager):
        return is_known(value.func, depth) and is_plain([*value.args, value.kwds])
    if type(value).__module__ == parametrize.__name__:
        # The module itself, whose parametrized weight this is.
        return True
    return is_plain(value, torch.dtype, types.ModuleType, types.BuiltinFunctionType, *_BUILTINS)


def _holds(value: Any) -> bool:
    """Whether a callable object has anything of its own, so that its class does not tell what it computes."""
    state = getattr(value, "__dict__", None)
    return state is None or bool(state.keys() - OWN_OF_MODULE or any(state[key] for key in state.keys() - {"training"}))


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function closes over."""
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_of_library(kind: type, *, stdlib: bool = False) -> bool:
    """True if a class is of a known library, or of Python."""
    module = kind.__module__ or "builtins"
    root = module.partition(".")[0]
    if module.startswith("torch.jit"):
        # Compiled from anybody's code.
        return False
    # Of what modules hold, values of Python's collections have been looked into.
    return root in _LIBRARIES or root in ("collections", "builtins") or (stdlib and root in sys.stdlib_module_names)


@functools.lru_cache(maxsize=1024)
def _is_library(path: str) -> bool:
    """True if a file of code is of Python or of a known library."""
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    places = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    if path.startswith(tuple(os.path.join(place, "") for place in places)):
        return True
    inside = os.path.relpath(path, sysconfig.get_path("stdlib")).split(os.sep)
    return os.path.isabs(path) and inside[0] not in ("..", "site-packages", "dist-packages")


def _file_digest(module: str) -> str:
    """Hash of the file of a library's models, which people edit; that of the first look, as Python has loaded it."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return "" if path is None else hashlib.sha256(_source(path)).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _source(path: str) -> bytes:
    return Path(path).read_bytes()


@functools.lru_cache(maxsize=64)
def _definitions(path: str) -> frozenset[str]:
    """Names of the functions and classes that a file defines."""
    tree = ast.parse(_source(path))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))


def _is_defined_as(value: Any, module: str, name: str) -> bool:
    return (getattr(value, "__module__", None), getattr(value, "__qualname__", None)) == (module, name)


def _is_in_file(code: types.CodeType) -> bool:
    """True if code of a library's models is that of its file, and not loaded again, or compiled under its name."""
    return f"{os.sep}models{os.sep}" not in code.co_filename or code in _codes_of(code.co_filename)


@functools.lru_cache(maxsize=64)
def _codes_of(path: str) -> frozenset[types.CodeType]:
    """The code of all functions in a file, as of the first look."""
    found, pending = set[types.CodeType](), [compile(_source(path), path, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        found.add(code)
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(found)
