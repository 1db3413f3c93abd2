"""The code that runs in a model's forward: its names, and whether known libraries are its authors."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from esm_turbo.files.model_contents import OWN_OF_MODULE

__all__ = ["GLOBAL_HOOKS", "HOOKS", "ForwardCode", "is_recorder"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where modules have hooks."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
"""Where PyTorch has those of all modules."""
# Whose code is what its version says.
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "esm_turbo")


def is_recorder(hook: Any) -> bool:
    """True if a hook is the library's own, which records hidden states while a forward asks for them."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.utils.")


class ForwardCode:
    """Classes and functions that a forward runs.

    Attributes:
        names: of classes, of their functions and of what these call in their own modules.
        watched: class or module, name and value of each of those functions.
        foreign: the first of them that is not of a known library, for a message; empty for none.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.names: list[str] = []
        self.watched: list[tuple[Any, str, Any]] = []
        self.foreign = ""
        if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
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
        for hook in (hook for hooks in HOOKS for hook in own[hooks].values()):
            if not is_recorder(hook):
                self._name_own(name, hook)
                self._judge(hook, f"a hook of {name or 'the model'}")
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            self.foreign = self.foreign or f"{kind.__module__}.{kind.__qualname__} ({name})"
        for key, value in own.items():
            if key not in OWN_OF_MODULE and callable(value) and not isinstance(value, nn.Module):
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
