"""Backends: which one runs where, which are refused, and that each does all of its work itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esm_turbo import TurboEsmForMaskedLM, triton_kernels
from esm_turbo.config import Backend
from esm_turbo.files.extras import install_hint
from esm_turbo.ops import backends, reference, torch_ops, triton_launch
from esm_turbo.ops.backends import ReferenceBackend, TorchBackend, TritonBackend, resolve_backend
from tests.helpers.models import random_ids

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
MPS = torch.device("mps")
BACKENDS = (TritonBackend, TorchBackend, ReferenceBackend)


@pytest.fixture
def machine(monkeypatch):
    """A machine with triton and an H200; `machine(installed=..., hip=..., capability=..., interpreter=...)` another."""

    def be(*, installed=True, hip=None, capability=(9, 0), interpreter=None):
        monkeypatch.setattr(backends, "_TRITON_IS_INSTALLED", installed)
        monkeypatch.setattr(torch.version, "hip", hip)
        properties = SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if interpreter is not None:
            monkeypatch.setenv("TRITON_INTERPRET", interpreter)

    be()
    return be


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("backend", ["auto", Backend.AUTO, "torch", Backend.TORCH])
@pytest.mark.parametrize("device", [CPU, "cpu", MPS])
def test_pytorch_runs_where_there_is_no_cuda(backend, device, installed, machine):
    machine(installed=installed, interpreter="1")
    assert isinstance(resolve_backend(backend, device), TorchBackend)


@pytest.mark.parametrize("backend", ["auto", Backend.AUTO, "triton", Backend.TRITON])
@pytest.mark.parametrize("device", [CUDA, "cuda", "cuda:1"])
def test_triton_runs_on_cuda(backend, device, machine):
    assert isinstance(resolve_backend(backend, device), TritonBackend)


CANNOT = {
    "no triton": ({"installed": False}, rf"triton is not installed \({re.escape(install_hint('triton'))}\)"),
    "not NVIDIA": ({"hip": "7.0"}, "needs an NVIDIA GPU, the model is on cuda:0"),
    "too old": ({"capability": (7, 5)}, r"compute capability 8.0 or newer, cuda:0 has 7.5"),
}


@pytest.mark.parametrize(("options", "message"), CANNOT.values(), ids=CANNOT)
def test_only_auto_falls_back_on_cuda(options, message, machine):
    machine(**options)
    assert isinstance(resolve_backend("auto", CUDA), TorchBackend)
    assert TritonBackend().obstacle(CUDA) is not None
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run: .*{message}.*use 'auto' or 'torch'"):
        resolve_backend("triton", CUDA)


@pytest.mark.parametrize("interpreter", [None, "0", ""])
def test_triton_needs_the_interpreter_on_the_cpu(interpreter, machine):
    machine(interpreter=interpreter)
    with pytest.raises(ValueError, match="backend 'triton' cannot run: it needs an NVIDIA GPU, the model is on cpu"):
        resolve_backend("triton", CPU)
    machine(interpreter="1")
    assert isinstance(resolve_backend("triton", CPU), TritonBackend)
    machine(interpreter="1", installed=False)
    with pytest.raises(ValueError, match="triton is not installed"):
        resolve_backend("triton", CPU)


def test_triton_never_falls_back(machine):
    for interpreter in (None, "1"):
        machine(interpreter=interpreter)
        with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .* the model is on mps"):
            resolve_backend("triton", MPS)


@pytest.mark.parametrize("backend", ["reference", Backend.REFERENCE])
def test_reference_runs_on_the_cpu_only(backend):
    assert isinstance(resolve_backend(backend, "cpu"), ReferenceBackend)
    with pytest.raises(ValueError, match=r"'reference' cannot run: it runs on the CPU only.*cuda:0"):
        resolve_backend(backend, CUDA)


@pytest.mark.parametrize("backend", ["", "Torch", "numpy", "cuda", None, 0])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match=r"`backend` must be one of .*'auto'.*'torch'.*got"):
        resolve_backend(backend, CPU)


@pytest.mark.parametrize("operation", ["encode", "extend_attention", "rotate", "gelu"])
def test_backends_have_one_signature(operation):
    expected = inspect.signature(getattr(torch_ops, operation))
    implementations = [*BACKENDS, reference, triton_kernels]
    for implementation in implementations:
        actual = inspect.signature(getattr(implementation, operation))
        assert actual == expected, implementation


class _OwnOperations(TorchDispatchMode):
    """Records the names of the package's custom operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "esm_turbo":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def use_a_cache(model: TurboEsmForMaskedLM) -> set[str]:
    """Prefill, extension and append, ragged and masked; returns the package's custom operations that were called."""
    ids, mask = (x.to(model.device) for x in random_ids([21, 9], eos=True))
    new_ids, new_mask = (x.to(model.device) for x in random_ids([4, 2], seed=1, cls=False))
    with _OwnOperations() as called:
        cache = model(ids, mask, use_cache=True).past_key_values
        model(new_ids, new_mask, past_key_values=cache)
        model(new_ids, new_mask, past_key_values=cache, use_cache=True)
        cache.crop(torch.tensor([0, 5]))
        model(new_ids, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [4, 9]
    return set(called.names)


OPERATIONS = {"encode_packed", "attend_packed", "rotate", "gelu"}


@pytest.mark.interpreter
@pytest.mark.usefixtures("modes_only_watch")
@pytest.mark.parametrize(("backend", "expected"), [("triton", OPERATIONS), ("torch", set()), ("reference", set())])
def test_operations_are_those_of_the_backend(
    backend: str, expected: set[str], tiny_model: Callable[..., TurboEsmForMaskedLM]
) -> None:
    assert resolve_backend("triton", CPU).obstacle(CPU) is None
    assert use_a_cache(tiny_model(preset="turbo3", heads=2, backend=backend)) == expected


@pytest.mark.interpreter
@pytest.mark.usefixtures("modes_only_watch")
def test_codecs_without_kernels_run_in_pytorch(tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    assert use_a_cache(tiny_model(preset="exact", heads=2, backend="triton")) == {"rotate", "gelu"}


@pytest.mark.gpu
@pytest.mark.usefixtures("modes_only_watch")
@pytest.mark.parametrize(("backend", "expected"), [("auto", OPERATIONS), ("triton", OPERATIONS), ("torch", set())])
@pytest.mark.parametrize("preset", ["turbo3", "paper"])
def test_operations_on_a_gpu_are_those_of_the_backend(
    preset: str,
    backend: str,
    expected: set[str],
    tiny_model: Callable[..., TurboEsmForMaskedLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches are also counted where all kernels are launched, below the custom operations."""
    launched = []
    run = triton_launch._run

    def counted(variant, grid, *args):
        launched.append(grid)
        run(variant, grid, *args)

    monkeypatch.setattr(triton_launch, "_run", counted)
    model = tiny_model(preset=preset).to("cuda")
    model.esm.kv.backend = backend
    # Contexts that graphs decode are read by other operations.
    model.esm.captures = False
    # Which kernels to compile is found by calling every operation.
    model.esm.warmup()
    launched.clear()
    assert use_a_cache(model) == expected
    assert bool(launched) == bool(expected)
