"""Which module runs the packed attention, and what is refused."""

import importlib.metadata
import inspect
from types import SimpleNamespace

import pytest
import torch

from esm_turbo.config import Backend
from esm_turbo.ops import backends, reference, torch_ops
from esm_turbo.ops import triton_attention as triton_kernels
from esm_turbo.ops.backends import resolve_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
MPS = torch.device("mps")
# Before the fixture below says otherwise.
FOUND = backends._TRITON_IS_INSTALLED


@pytest.fixture(autouse=True)
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
    assert resolve_backend(backend, device) is torch_ops


def test_pytorch_can_be_asked_for_on_cuda():
    assert resolve_backend("torch", CUDA) is torch_ops


@pytest.mark.parametrize("backend", ["auto", Backend.AUTO, "triton", Backend.TRITON])
@pytest.mark.parametrize("device", [CUDA, "cuda", "cuda:1"])
def test_triton_runs_on_cuda(backend, device):
    assert resolve_backend(backend, device) is triton_kernels


CANNOT = {
    "no triton": ({"installed": False}, r"triton is not installed \(pip install 'esm-turbo\[triton\]'\)"),
    "not NVIDIA": ({"hip": "7.0"}, "needs an NVIDIA GPU, the model is on cuda:0"),
    "too old": ({"capability": (7, 5)}, r"compute capability 8.0 or newer, cuda:0 has 7.5"),
}


@pytest.mark.parametrize(("options", "message"), CANNOT.values(), ids=CANNOT)
def test_only_auto_falls_back_on_cuda(options, message, machine):
    machine(**options)
    assert resolve_backend("auto", CUDA) is torch_ops
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run: .*{message}.*use 'auto' or 'torch'"):
        resolve_backend("triton", CUDA)


@pytest.mark.parametrize("interpreter", [None, "0", ""])
def test_triton_needs_the_interpreter_on_the_cpu(interpreter, machine):
    machine(interpreter=interpreter)
    with pytest.raises(ValueError, match="backend 'triton' cannot run: it needs an NVIDIA GPU, the model is on cpu"):
        resolve_backend("triton", CPU)
    machine(interpreter="1")
    assert resolve_backend("triton", CPU) is triton_kernels
    machine(interpreter="1", installed=False)
    with pytest.raises(ValueError, match="triton is not installed"):
        resolve_backend("triton", CPU)


def test_triton_never_falls_back(machine):
    for interpreter in (None, "1"):
        machine(interpreter=interpreter)
        with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .* the model is on mps"):
            resolve_backend("triton", MPS)


def test_triton_is_found_where_it_is_installed():
    distributions = {distribution.name for distribution in importlib.metadata.distributions()}
    assert FOUND is ("triton" in distributions)


@pytest.mark.parametrize("backend", ["reference", Backend.REFERENCE])
def test_reference_runs_on_the_cpu_only(backend):
    assert resolve_backend(backend, "cpu") is reference
    with pytest.raises(ValueError, match=r"'reference' runs on the CPU only.*cuda:0"):
        resolve_backend(backend, CUDA)


@pytest.mark.parametrize("backend", ["", "Torch", "numpy", "cuda", None, 0])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match=r"`backend` must be one of .*'auto'.*'torch'.*got"):
        resolve_backend(backend, CPU)


@pytest.mark.parametrize("module", [reference, triton_kernels], ids=lambda module: module.__name__)
def test_backends_have_one_signature(module):
    expected = inspect.signature(torch_ops.extend_attention)
    names = list(expected.parameters)
    assert names == ["query", "keys", "values", "mask", "context", "codec", "layer_idx"]
    actual = inspect.signature(module.extend_attention)
    assert list(actual.parameters) == names
    assert [p.default for p in actual.parameters.values()] == [p.default for p in expected.parameters.values()]
