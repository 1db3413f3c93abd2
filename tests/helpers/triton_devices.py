"""Devices for tests of Triton kernels: the CPU in Triton's interpreter, and a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def on_devices(names: str = "", *, cpu: Iterable[object] = ((),), gpu: Iterable[object] = ((),)) -> Callable:
    """Parametrises a test by `device` and other parameters.

    Args:
        names: other parameters, as in `pytest.mark.parametrize`.
        cpu: their values in the interpreter, few and small; one tuple per case where there are several parameters.
        gpu: their values on a GPU.
    """
    argnames = ["device", *names.replace(",", " ").split()]
    params = []
    for device, marker, rows in (("cpu", pytest.mark.interpreter, cpu), ("cuda", pytest.mark.gpu, gpu)):
        for row in rows:
            values = row if isinstance(row, tuple) else (row,)
            label = "-".join([device, *map(str, values)])
            params.append(pytest.param(device, *values, marks=marker, id=label))
    return pytest.mark.parametrize(argnames, params)


class RecordedCalls(TorchDispatchMode):
    """Records the arguments of every call of a custom operation of the package.

    Attributes:
        calls: the arguments.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = f"esm_turbo::{name}"
        self.calls: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == self.name:
            assert not kwargs
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def right_triton(request: pytest.FixtureRequest) -> None:
    """A process interprets kernels or compiles them: a test in the wrong kind of process fails; it is not skipped."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.node.get_closest_marker("interpreter") and not interpreted:
        pytest.fail("interpreter tests need TRITON_INTERPRET=1: run `make test-interpreter`")
    if request.node.get_closest_marker("gpu") and interpreted:
        pytest.fail("GPU tests run without TRITON_INTERPRET: run `make test-gpu`")
