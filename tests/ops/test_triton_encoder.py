"""The Triton kernels of the packed encoder against their PyTorch reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo.ops import float8, reference, triton_encoder
from esm_turbo.ops.float8 import Quantized
from tests.helpers import torch_encoder
from tests.helpers.triton_devices import DTYPES, on_devices, right_triton  # noqa: F401

# The interpreter truncates to bfloat16 instead of rounding.
CPU_DTYPES = ("float32", "float16")
# Models with eight-bit products are never in float32.
HALF = ("float16", "bfloat16")
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
    "dtype, size", cpu=itertools.product(CPU_DTYPES, SIZES), gpu=itertools.product(DTYPES, (*SIZES, 1280, 5120))
)
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm(device: str, dtype: str, size: int, adds: bool) -> None:
    x, delta = (normal(7, size, device=device, dtype=DTYPES[dtype], seed=seed) + 1 for seed in (0, 1))
    weight = normal(size, device=device, dtype=DTYPES[dtype], seed=2)
    total, normed = triton_encoder.add_rms_norm(x, delta if adds else None, weight, 1e-5)
    expected_total, expected = torch_encoder.add_rms_norm(x, delta if adds else None, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected)


@on_devices("parts", cpu=(1, 4), gpu=(1, 4))
def test_add_layer_norm_of_parts(device: str, parts: int) -> None:
    x = normal(3, 320, device=device, dtype=torch.float16) * 3 + 5
    delta = normal(parts, 3, 320, device=device, seed=1)
    weight, bias = (normal(320, device=device, dtype=torch.float16, seed=seed) for seed in (2, 3))
    total, normed = triton_encoder.add_layer_norm(x, delta, weight, bias, 1e-5)
    expected_total, expected = torch_encoder.add_layer_norm(x, delta, weight, bias, 1e-5)
    assert_close(total, expected_total)
    assert_close(normed, expected)


def linear_case(
    tokens: int, outputs: int, inputs: int, device: str, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    x = normal(tokens, inputs, device=device, dtype=dtype)
    weight = (normal(outputs, inputs, device=device, seed=1) * inputs**-0.5).to(dtype)
    return x, weight, normal(outputs, device=device, dtype=dtype, seed=2)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.double() @ weight.double().T + bias.double()


def is_launched(call: Callable[[], object]) -> bool:
    """Whether a call launches the kernel for few tokens."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_encoder, "_linear", lambda *shapes: lambda **tensors: calls.append(shapes))
        call()
    return bool(calls)


# Rows, and then outputs and inputs as in models of 320 to 5,120.
LINEAR_CASES = [(1, 192, 64), (3, 64, 64), (16, 256, 64), (9, 128, 128), (15, 384, 128), (1, 640, 320), (4, 192, 192)]
LARGE_LINEAR_CASES = [
    (tokens, *sizes)
    for tokens in (1, 3, 8, 9, 16)
    for sizes in ((3840, 1280), (1280, 1280), (5120, 1280), (7680, 2560), (960, 320), (3456, 1152))
]


@on_devices(
    "tokens, outputs, inputs, dtype",
    cpu=[(*case, "float16") for case in LINEAR_CASES],
    gpu=[(*case, dtype) for case in LINEAR_CASES + LARGE_LINEAR_CASES for dtype in ("float16", "bfloat16")],
)
@pytest.mark.parametrize("activates", [False, True])
def test_linear_layer_of_few_tokens(
    device: str, tokens: int, outputs: int, inputs: int, dtype: str, activates: bool
) -> None:
    """Rounded once, after the activation."""
    case = linear_case(tokens, outputs, inputs, device, DTYPES[dtype])
    assert is_launched(partial(triton_encoder.linear, *case))
    found = triton_encoder.linear(*case, activates=activates)
    expected = exact_linear(*case)
    if activates:
        expected = torch.nn.functional.gelu(expected)
    assert found.dtype == case[0].dtype
    assert ((found - expected).abs() <= TOLERANCE[found.dtype] * (expected.abs() + 1e-3)).all()


@on_devices(
    "tokens, outputs, inputs",
    cpu=[(1, 64, 64), (3, 64, 256), (16, 64, 128)],
    gpu=[
        (tokens, *sizes) for tokens in (1, 9, 16) for sizes in ((320, 1280), (1280, 1280), (1280, 5120), (2560, 10240))
    ],
)
def test_parts_of_a_linear_layer(device: str, tokens: int, outputs: int, inputs: int) -> None:
    case = linear_case(tokens, outputs, inputs, device)
    parts = triton_encoder.linear_parts(*case)
    assert parts.dtype == torch.float32
    assert parts.shape == (inputs // outputs, tokens, outputs)
    expected = exact_linear(*case)
    assert (parts.sum(0) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(parts, triton_encoder.linear_parts(*case))


# More tokens or none, and sizes that cannot be divided.
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(17, 64, 64), (0, 64, 64), (2, 480, 480), (2, 72, 72), (2, 72, 480), (2, 480, 72)]
)
def test_pytorch_multiplies_all_others(tokens: int, outputs: int, inputs: int) -> None:
    x, weight, bias = (x.float() for x in linear_case(tokens, outputs, inputs, "cpu"))
    assert not is_launched(partial(triton_encoder.linear, x, weight, bias))
    assert not is_launched(partial(triton_encoder.linear_parts, x, weight, bias))
    expected = torch_encoder.linear(x, weight, bias)
    assert torch.equal(triton_encoder.linear(x, weight, bias), expected)
    assert torch.equal(triton_encoder.linear_parts(x, weight, bias), expected)


@pytest.mark.parametrize("inputs", [72, 32, 320, 512])
def test_sums_of_other_or_too_many_parts_are_left_to_pytorch(inputs: int) -> None:
    x, weight, bias = (x.float() for x in linear_case(2, 64, inputs, "cpu"))
    assert not is_launched(partial(triton_encoder.linear_parts, x, weight, bias))
    assert torch.equal(triton_encoder.linear_parts(x, weight, bias), torch_encoder.linear(x, weight, bias))


@on_devices()
def test_operands_that_lie_otherwise_are_left_to_pytorch(device: str) -> None:
    x, weight, bias = linear_case(2, 64, 64, device)
    unaligned = torch.empty(2 * 64 + 1, dtype=x.dtype, device=device)[1:].view(2, 64).copy_(x)
    transposed = weight.T.contiguous().T
    strided = torch.stack([bias, bias], dim=1)[:, 0]
    for case in (
        (unaligned, weight, bias),
        (x, transposed, bias),
        (x[:, :32], weight[:, :32], bias),
        (x, weight, strided),
    ):
        assert not is_launched(partial(triton_encoder.linear, *case))
    assert is_launched(partial(triton_encoder.linear, x, weight, bias))


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


@on_devices("dtype, heads", cpu=itertools.product(CPU_DTYPES, (4, 5)), gpu=itertools.product(DTYPES, (4, 5, 20)))
def test_rotation_clamps_before(device: str, dtype: str, heads: int) -> None:
    """Values as well, which are not rotated."""
    qkv = normal(9, 3, heads, 16, device=device, dtype=DTYPES[dtype])
    angle = torch.rand(9, 8, generator=torch.Generator().manual_seed(1)).to(device) * 6
    expected = qkv.clone()
    torch_encoder.rotate_(expected, angle.cos(), angle.sin(), 0.3, 0.5)
    triton_encoder.rotate_(qkv, angle.cos(), angle.sin(), 0.3, 0.5)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, 2], expected[:, 2]) and expected[:, 2].abs().max() == 0.5


@on_devices(cpu=((),), gpu=((),))
def test_clamping_keeps_nan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the larger of NaN and a number is the number, unless it is told otherwise."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        monkeypatch.setattr(
            InterpreterBuilder, name, lambda self, one, other, function=function: self.binary_op(one, other, function)
        )
    qkv = normal(2, 3, 4, 16, device=device)
    qkv[0] = torch.nan
    cos, sin = (torch.full((2, 8), x, device=device) for x in (1.0, 0.0))
    triton_encoder.rotate_(qkv, cos, sin, 1.0, 0.5)
    assert qkv[0].isnan().all() and qkv[1].isfinite().all()


@on_devices(
    "dtype, count", cpu=itertools.product(CPU_DTYPES, (1, 4099)), gpu=itertools.product(DTYPES, (1, 4099, 70_001))
)
def test_activation_in_place(device: str, dtype: str, count: int) -> None:
    x = torch.linspace(9, -9, count).to(DTYPES[dtype]).to(device)
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


def assert_same_rounding(found: Quantized, expected: Quantized) -> None:
    """To the bit on a GPU. The interpreter rounds ties and subnormal numbers otherwise, and drops carries."""
    assert torch.equal(found.scales, expected.scales)
    codes, wanted = (x.codes.view(torch.uint8).int() for x in (found, expected))
    if found.codes.is_cuda:
        assert torch.equal(codes, wanted)
        return
    compared = ((wanted & 0b111) != 0) & ((wanted & 0b1111000) != 0)
    assert compared.float().mean() > 0.2
    assert ((codes - wanted).abs() <= 1)[compared].all()
    assert (codes == wanted)[compared].float().mean() > 0.9


QUANTIZE_SIZES = {"cpu": (64, 320, 1000, 2500), "gpu": (64, 320, 1000, 1280, 2560, 5120, 6912, 20480)}


@on_devices(
    "dtype, size",
    cpu=itertools.product(CPU_DTYPES, QUANTIZE_SIZES["cpu"]),
    gpu=itertools.product(DTYPES, QUANTIZE_SIZES["gpu"]),
)
def test_rounding_to_eight_bits(device: str, dtype: str, size: int) -> None:
    x = normal(7, size, device=device, dtype=DTYPES[dtype]) * 3
    # Zeros; one large number; the smallest ones.
    x[1], x[2, 3], x[3] = 0, 2000, x[3] * 2.0**-20
    assert_same_rounding(triton_encoder.quantize(x), float8.quantize(x))


@on_devices(
    "dtype, size",
    cpu=itertools.product(CPU_DTYPES, QUANTIZE_SIZES["cpu"]),
    gpu=itertools.product(DTYPES, QUANTIZE_SIZES["gpu"]),
)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activation_in_eight_bits(device: str, dtype: str, size: int, activation: str) -> None:
    """That of the activation as it is stored otherwise, to which a float32's last bit can make a difference."""
    x = normal(7, 2 * size if activation == "swiglu" else size, device=device, dtype=DTYPES[dtype]) * 4
    if activation == "gelu":
        stored = x.clone()
        triton_encoder.gelu_(stored)
    else:
        stored = triton_encoder.swiglu(x)
    assert_same_rounding(triton_encoder.quantize(x, activation), float8.quantize(stored))


@on_devices("dtype, size", cpu=itertools.product(CPU_DTYPES, SIZES), gpu=itertools.product(HALF, (*SIZES, 1280, 5120)))
@pytest.mark.parametrize("adds", [False, True])
def test_norm_in_eight_bits(device: str, dtype: str, size: int, adds: bool) -> None:
    x, delta = (normal(7, size, device=device, dtype=DTYPES[dtype], seed=seed) * 3 + 5 for seed in (0, 1))
    weight, bias = (normal(size, device=device, dtype=DTYPES[dtype], seed=seed) for seed in (2, 3))
    arguments = (x, delta if adds else None, weight, bias, 1e-5)
    expected_total, normed = triton_encoder.add_layer_norm(*arguments, factor=0.3)
    assert_close(expected_total, torch_encoder.add_layer_norm(*arguments, factor=0.3)[0])
    total, found = triton_encoder.add_layer_norm(*arguments, factor=0.3, quantizes=True)
    assert torch.equal(total, expected_total)
    assert_same_rounding(found, float8.quantize(normed))


@pytest.mark.gpu
def test_rows_that_are_not_finite_stay_so() -> None:
    x = normal(4, 1280, device="cuda", dtype=torch.bfloat16)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    weight, scales = float8.quantize(normal(1280, 1280, device="cuda"))
    output = float8.float8_linear(triton_encoder.quantize(x), weight, scales, None)
    assert output.isfinite().all(dim=1).tolist() == [True, False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 17, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 320), (3840, 1280), (1280, 5120), (2560, 6912)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_eight_bits(tokens: int, outputs: int, inputs: int, has_bias: bool) -> None:
    x = float8.quantize(normal(tokens, inputs, device="cuda"))
    weight, scales = float8.quantize(normal(outputs, inputs, device="cuda", seed=1) * inputs**-0.5)
    bias = normal(outputs, device="cuda", dtype=torch.bfloat16, seed=2) if has_bias else None
    found = triton_encoder.linear(x, weight, bias, scales)
    expected = reference.float8_linear(x, weight, scales, bias)
    assert found.dtype == expected.dtype == torch.bfloat16
    # Tensor cores add up products of codes with some 14 bits.
    assert (found.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()


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
