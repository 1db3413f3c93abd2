"""The Triton kernels for RoPE and GELU against PyTorch's operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from esm_turbo.ops import torch_ops, triton_layer
from tests.helpers.triton_devices import DTYPES, on_devices, right_triton  # noqa: F401
from tests.ops.test_torch_ops import rotary_case

HEAD_DIMS = (16, 24, 32, 64, 128)
# The interpreter truncates to bfloat16 instead of rounding.
ROUNDED = ("float32", "float16")
# Relative to the largest number: a sum may be rounded the other way.
TOLERANCE = {torch.float32: 3e-7, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@on_devices("dtype, head_dim", cpu=itertools.product(ROUNDED, HEAD_DIMS), gpu=itertools.product(DTYPES, HEAD_DIMS))
@pytest.mark.parametrize("rows", [1, 2])
def test_rotation(device: str, dtype: str, head_dim: int, rows: int) -> None:
    case = [x.to(device) for x in rotary_case(DTYPES[dtype], head_dim, rows)]
    found = triton_layer.rotate(*case, head_dim**-0.5)
    expected = torch_ops.rotate(*case, head_dim**-0.5)
    for fast, plain in zip(found, expected, strict=True):
        assert fast.dtype == plain.dtype
        assert fast.shape == plain.shape
        assert fast.transpose(1, 2).is_contiguous()
        assert (fast - plain).abs().max() <= TOLERANCE[DTYPES[dtype]] * plain.abs().max()


@on_devices()
def test_rotation_of_any_strides(device: str) -> None:
    """Queries contiguous by head, keys with strided components, and strided angles."""
    query, keys, cos, sin = (x.to(device) for x in rotary_case(torch.float32))
    expected = torch_ops.rotate(query, keys, cos, sin, 0.5)
    cos = cos.repeat_interleave(2, 1)[:, ::2]
    found = triton_layer.rotate(query.contiguous(), keys.mT.contiguous().mT, cos, sin, 0.5)
    for fast, plain in zip(found, expected, strict=True):
        assert (fast - plain).abs().max() <= TOLERANCE[torch.float32] * plain.abs().max()


@on_devices("dtype, count", cpu=itertools.product(ROUNDED, (1, 1025)), gpu=itertools.product(DTYPES, (1, 1025, 70_000)))
def test_activation(device: str, dtype: str, count: int) -> None:
    """Equal to PyTorch except where erf is rounded the other way."""
    x = torch.linspace(-9, 9, count).to(DTYPES[dtype]).to(device)
    found = triton_layer.gelu(x.view(1, -1))
    expected = torch_ops.gelu(x)
    assert found.shape == (1, count)
    unit = torch.finfo(DTYPES[dtype]).eps
    assert ((found[0] - expected).abs() <= unit * x.abs()).all()


@on_devices()
def test_gelu_of_nan_and_infinity(device: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), 0.0], device=device)
    assert triton_layer.gelu(x).isnan().tolist() == [True, False, False]
    assert triton_layer.gelu(x)[1] == float("inf")


@on_devices()
def test_opcheck(device: str) -> None:
    case = [x.to(device) for x in rotary_case(torch.float32)]
    for operation, arguments in (
        (torch.ops.esm_turbo.rotate.default, (*case, 0.5)),
        (torch.ops.esm_turbo.gelu.default, (case[0],)),
    ):
        checks = torch.library.opcheck(operation, arguments)
        assert set(checks.values()) == {"SUCCESS"}


@on_devices()
def test_eager_inference_launches_without_the_dispatcher(device: str) -> None:
    x = torch.linspace(-3, 3, 40, device=device)

    def events() -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            triton_layer.gelu(x)
        return {event.name for event in profile.events()}

    assert "esm_turbo::gelu" in events()
    with torch.no_grad():
        direct = events()
        assert "aten::empty_like" in direct
        assert "esm_turbo::gelu" not in direct
        # What watches operators still sees it.
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(triton_layer.gelu(x), FakeTensor)
