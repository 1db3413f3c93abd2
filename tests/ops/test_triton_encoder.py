"""The Triton kernels of the packed encoder against their PyTorch reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from esm_turbo.ops import torch_encoder, triton_encoder
from tests.helpers.triton_devices import DTYPES, on_devices, right_triton  # noqa: F401

# The interpreter truncates to bfloat16 instead of rounding.
CPU_DTYPES = ("float32", "float16")
SIZES = (64, 320, 640)
# Sums of float32 differ in order; half precision may round the other way.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).abs().max() <= TOLERANCE[found.dtype] * expected.float().abs().max()


@on_devices(
    "dtype, size", cpu=itertools.product(CPU_DTYPES, SIZES), gpu=itertools.product(DTYPES, (*SIZES, 1280, 5120))
)
@pytest.mark.parametrize("adds", [False, True])
def test_add_layer_norm(device: str, dtype: str, size: int, adds: bool) -> None:
    # A mean far from zero would show cancellation in the variance.
    x = normal(7, size, device=device, dtype=DTYPES[dtype]) * 3 + 5
    delta = normal(7, size, device=device, dtype=DTYPES[dtype], seed=1) if adds else None
    weight, bias = (normal(size, device=device, dtype=DTYPES[dtype], seed=seed) for seed in (2, 3))
    before = x.clone()
    total, normed = triton_encoder.add_layer_norm(x, delta, weight, bias, 1e-5)
    expected_total, expected = torch_encoder.add_layer_norm(x, delta, weight, bias, 1e-5)
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before)
    assert_close(normed, expected)


@on_devices(
    "dtype, head_dim",
    cpu=itertools.product(CPU_DTYPES, (16, 24, 64)),
    gpu=itertools.product(DTYPES, (16, 24, 32, 64, 128)),
)
def test_rotation_in_place(device: str, dtype: str, head_dim: int) -> None:
    qkv = normal(9, 3, 5, head_dim, device=device, dtype=DTYPES[dtype])
    angle = torch.rand(9, head_dim // 2, generator=torch.Generator().manual_seed(1)).to(device) * 6
    expected = qkv.clone()
    torch_encoder.rotate_(expected, angle.cos(), angle.sin(), 0.3)
    values = qkv[:, 2].clone()
    triton_encoder.rotate_(qkv, angle.cos(), angle.sin(), 0.3)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, 2], values)


@on_devices(
    "dtype, count", cpu=itertools.product(CPU_DTYPES, (1, 4099)), gpu=itertools.product(DTYPES, (1, 4099, 70_001))
)
def test_activation_in_place(device: str, dtype: str, count: int) -> None:
    x = torch.linspace(-9, 9, count).to(DTYPES[dtype]).to(device)
    expected = x.clone()
    torch_encoder.gelu_(expected)
    triton_encoder.gelu_(x)
    assert_close(x, expected)


@on_devices(
    "dtype, heads, head_dim",
    cpu=itertools.product(CPU_DTYPES, (5,), (16, 24)),
    gpu=itertools.product(DTYPES, (3, 15, 18, 40), (16, 24, 64)),
)
def test_norm_and_rotation_in_place(device: str, dtype: str, heads: int, head_dim: int) -> None:
    # A mean far from zero would show cancellation in the variance.
    qkv = (normal(9, 3, heads, head_dim, device=device) * 3 + 5).to(DTYPES[dtype])
    query_weight, key_weight = (normal(heads * head_dim, device=device, dtype=DTYPES[dtype], seed=s) for s in (2, 3))
    angle = torch.rand(9, head_dim // 2, generator=torch.Generator().manual_seed(1)).to(device) * 6
    expected = qkv.clone()
    torch_encoder.norm_rotate_(expected, query_weight, key_weight, 1e-5, angle.cos(), angle.sin(), 0.3)
    values = qkv[:, 2].clone()
    triton_encoder.norm_rotate_(qkv, query_weight, key_weight, 1e-5, angle.cos(), angle.sin(), 0.3)
    assert_close(qkv[:, :2], expected[:, :2])
    assert torch.equal(qkv[:, 2], values)


@on_devices(
    "dtype, size", cpu=itertools.product(CPU_DTYPES, (24, 704)), gpu=itertools.product(DTYPES, (24, 704, 2560, 6912))
)
def test_gated_activation(device: str, dtype: str, size: int) -> None:
    gate_up = normal(7, 2 * size, device=device, dtype=DTYPES[dtype]) * 4
    assert_close(triton_encoder.swiglu(gate_up), torch_encoder.swiglu(gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 128])
def test_attention_of_packed_rows(dtype: str, head_dim: int) -> None:
    lengths = [1, 17, 63, 70]
    qkv = normal(sum(lengths), 3, 4, head_dim, device="cuda", dtype=DTYPES[dtype])
    qkv[:, 0] *= head_dim**-0.5
    offsets = torch.tensor([0, 1, 18, 81, 151], dtype=torch.int32, device="cuda")
    found = triton_encoder.attend(qkv, offsets, max(lengths))
    expected = torch_encoder.attend(qkv.float(), offsets, max(lengths))
    # Weights and the output are each rounded once.
    assert (found - expected).abs().max() <= 4 * TOLERANCE[DTYPES[dtype]] * expected.abs().max()
