"""Which module runs the packed attention, and what is refused."""

import inspect

import pytest
import torch

from esm_turbo import reference, torch_ops
from esm_turbo.backends import resolve_backend
from esm_turbo.config import Backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("backend", ["auto", Backend.AUTO, "torch", Backend.TORCH])
@pytest.mark.parametrize("device", [CPU, "cpu", torch.device("mps")])
def test_pytorch_runs_where_there_is_no_cuda(backend, device):
    assert resolve_backend(backend, device) is torch_ops


def test_pytorch_can_be_asked_for_on_cuda():
    assert resolve_backend("torch", CUDA) is torch_ops


@pytest.mark.parametrize("backend", ["reference", Backend.REFERENCE])
def test_reference_runs_on_the_cpu_only(backend):
    assert resolve_backend(backend, "cpu") is reference
    with pytest.raises(ValueError, match=r"'reference' runs on the CPU only.*cuda:0"):
        resolve_backend(backend, CUDA)


@pytest.mark.parametrize("device", [CPU, torch.device("mps")])
def test_triton_never_falls_back(device):
    with pytest.raises(ValueError, match="backend 'triton'"):
        resolve_backend("triton", device)


@pytest.mark.parametrize("backend", ["", "Torch", "numpy", "cuda", None, 0])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match=r"`backend` must be one of .*'auto'.*'torch'.*got"):
        resolve_backend(backend, CPU)


def test_backends_have_one_signature():
    expected = inspect.signature(torch_ops.extend_attention)
    names = list(expected.parameters)
    assert names == ["query", "keys", "values", "mask", "context", "codec", "layer_idx"]
    actual = inspect.signature(reference.extend_attention)
    assert list(actual.parameters) == names
    assert [p.default for p in actual.parameters.values()] == [p.default for p in expected.parameters.values()]
