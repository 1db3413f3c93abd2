"""Compilation of the Triton kernels for GPUs, without one: the interpreter accepts code that the compiler rejects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from esm_turbo.ops import (
    decoded_attention,
    triton_attention,
    triton_encode,
    triton_encoder,
    triton_launch,
    triton_layer,
)
from esm_turbo.ops.triton_launch import recorded
from tests.helpers.attention_cases import LAYER, codec_of, make_case
from tests.ops.test_torch_ops import rotary_case

triton = pytest.importorskip("triton")

# Limit per program in bytes, by compute capability: Ampere, the oldest one supported, and Hopper.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
Compile = Callable[..., dict[str, Any]]


def compiled(capability: int, *calls: Callable[[], object]) -> dict[str, Any]:
    """Compiles what calls launch, for a device of some capability, and runs nothing; kernels by name."""
    if triton.knobs.runtime.interpret:
        pytest.fail("these tests compile kernels: run without TRITON_INTERPRET")
    with torch.no_grad(), recorded(capability) as variants:
        for call in calls:
            call()
    return {variant.name: variant.compile() for variant in variants}


@pytest.fixture(params=SHARED_MEMORY, ids=lambda capability: f"sm{capability}")
def compile_for(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Compiles the kernels that calls launch: all must fit the GPU, and compute nothing in float64."""

    def compile_checked(*calls: Callable[[], object]) -> dict[str, Any]:
        kernels = compiled(request.param, *calls)
        assert kernels
        for name, kernel in kernels.items():
            assert kernel.asm["cubin"]
            assert kernel.metadata.shared <= SHARED_MEMORY[request.param], name
            assert "f64" not in kernel.asm["ttgir"], name
        return kernels

    return compile_checked


def use_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program reads all contexts, so that it has tiles to prefetch."""
    monkeypatch.setattr(triton_attention, "DEFAULT_TUNING", replace(triton_attention.DEFAULT_TUNING, programs=1))


@pytest.mark.parametrize(
    ("preset", "head_dim", "dtype", "n", "options"),
    [
        ("turbo3", 64, torch.bfloat16, 1, {"slots": 2}),
        ("turbo4", 64, torch.bfloat16, 16, {}),
        ("turbo1", 16, torch.float16, 3, {"shared": True, "masked": True, "slots": 1}),
        ("turbo2", 24, torch.float32, 5, {"masked": True, "slots": 2}),
        ("turbo4", 128, torch.float32, 17, {"masked": True}),
        ("paper", 64, torch.bfloat16, 1, {}),
    ],
)
def test_attention(
    compile_for: Compile,
    preset: str,
    head_dim: int,
    dtype: torch.dtype,
    n: int,
    options: dict[str, Any],
) -> None:
    codec = codec_of(preset, head_dim)
    case = make_case(codec, n=n, dtype=dtype, **options)
    kernels = compile_for(partial(triton_attention.extend_attention, *case.arguments, codec, LAYER))
    assert kernels.keys() == {"attend_context", "merge"}


@pytest.mark.parametrize(
    ("preset", "n", "dtype", "limit"),
    [
        ("turbo4", 1, torch.bfloat16, 168),
        ("turbo1", 8, torch.float16, 168),
        ("turbo4", 16, torch.bfloat16, None),
        ("turbo4", 1, torch.float32, None),
    ],
)
def test_long_contexts(
    compile_for: Compile,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    n: int,
    dtype: torch.dtype,
    limit: int | None,
) -> None:
    """With few queries words are prefetched, and registers are limited with up to eight in half precision."""
    use_one_program(monkeypatch)
    codec = codec_of(preset, 64)
    case = make_case(codec, n=n, columns=700, dtype=dtype)
    kernels = compile_for(partial(triton_attention.extend_attention, *case.arguments, codec, LAYER))
    attend = kernels["attend_context"]
    assert ("prefetch.global.L2" in attend.asm["ptx"]) == (n == 1)
    assert attend.metadata.maxnreg == limit


def test_operands_shared_by_all_tiles_stay_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of queries and weights is converted once per group of tiles, not once per tile."""
    use_one_program(monkeypatch)
    codec = codec_of("turbo2", 64)
    case = make_case(codec, n=1, columns=700, dtype=torch.bfloat16)
    kernels = compiled(90, partial(triton_attention.extend_attention, *case.arguments, codec, LAYER))
    code = kernels["attend_context"].asm["ttgir"]
    tiles = re.findall(r"scf\.while .*?^ +} do {(.*?)^ +scf\.yield", code, flags=re.DOTALL | re.MULTILINE)
    assert len(tiles) == 2
    for tile in tiles:
        assert "tt.dot" in tile
        # The second operands are queries and weights, because products of eight rows are transposed.
        assert not [line for line in tile.splitlines() if "local_load" in line and "opIdx = 1" in line]


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_that_share_a_context(compile_for: Compile, head_dim: int, dtype: torch.dtype) -> None:
    """Tiles are multiplied by warpgroups on devices that have them."""
    new = torch.randn(3, 2, 21, head_dim).to(dtype)
    past = torch.randn(1, 2, 70, head_dim).to(dtype)
    attend = partial(decoded_attention.attend_shared, new, new, new, None, past, past, torch.tensor([70]), None, None)
    [kernel] = compile_for(attend).values()
    assert ("wgmma.mma_async" in kernel.asm["ptx"]) == (kernel.metadata.target.arch == 90)


@pytest.mark.parametrize(
    ("preset", "head_dim", "dtype"),
    [("turbo3", 64, torch.bfloat16), ("turbo4", 128, torch.float32), ("paper", 24, torch.float16)],
)
def test_encoding(compile_for: Compile, preset: str, head_dim: int, dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 2, 2, 70, head_dim).to(dtype)
    protected = torch.tensor([[0, 5], [3, -1]])
    encode = partial(triton_encode.encode, codec_of(preset, head_dim), LAYER, keys, values, protected=protected)
    assert compile_for(encode).keys() == {"encode_context"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_activation(compile_for: Compile, dtype: torch.dtype) -> None:
    case = rotary_case(dtype)
    kernels = compile_for(partial(triton_layer.rotate, *case, 0.5), partial(triton_layer.gelu, case[0]))
    assert kernels.keys() == {"rotate", "gelu"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_encoder(compile_for: Compile, dtype: torch.dtype) -> None:
    x = torch.randn(5, 320).to(dtype)
    angles = torch.randn(5, 8)
    wide, halves = torch.randn(2560).to(dtype), torch.randn(5, 32)
    qkv = torch.randn(5, 3, 40, 64).to(dtype)
    kernels = compile_for(
        partial(triton_encoder.add_layer_norm, x, x, x[0], x[0], 1e-5),
        partial(triton_encoder.add_rms_norm, x, x, x[0], 1e-5),
        partial(triton_encoder.rotate_, torch.randn(5, 3, 20, 16).to(dtype), angles, angles, 0.25),
        partial(triton_encoder.rotate_, torch.randn(5, 3, 20, 16).to(dtype), angles, angles, 0.25, 8.0),
        partial(triton_encoder.gelu_, x),
        partial(triton_encoder.norm_rotate_, qkv, wide, wide, 1e-5, halves, halves, 0.125),
        partial(triton_encoder.swiglu, x),
        partial(triton_encoder.linear, x, torch.randn(960, 320).to(dtype), x[0]),
    )
    assert kernels.keys() == {"add_layer_norm", "rotate_", "gelu_", "norm_rotate_", "swiglu", "linear"}


@pytest.mark.parametrize("size", [320, 640, 1152, 1280, 2560])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_layers_of_few_tokens(compile_for: Compile, dtype: torch.dtype, size: int) -> None:
    """Weights go from memory to the registers that multiply them, not through shared memory or other lanes."""
    x, weight = torch.empty(3, size).to(dtype), torch.empty(size, size).to(dtype)
    [kernel] = compile_for(partial(triton_encoder.linear, x, weight, x[0])).values()
    before_products = kernel.asm["ptx"].split("mma.sync")[0]
    assert "st.shared" not in before_products
    assert "ld.shared" not in before_products
    assert "shfl" not in before_products
    assert "ld.global.v4" in before_products


def test_overlapping_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel launched early waits for its predecessor, and a kernel with a successor lets it launch early."""
    for module in (triton_encode, triton_encoder, triton_layer, triton_attention):
        monkeypatch.setattr(module, "overlaps", lambda device: True)
    for name in ("_add_layer_norm", "_rotate_", "_linear"):
        # Without their caches, which have launches that do not overlap.
        monkeypatch.setattr(triton_encoder, name, getattr(triton_encoder, name).__wrapped__)
    codec = codec_of("turbo3", 64)
    x, angles = torch.empty(5, 320).to(torch.bfloat16), torch.empty(5, 8)
    kernels = compiled(
        90,
        partial(triton_encode.encode, codec, LAYER, *torch.randn(2, 2, 2, 70, 64)),
        partial(triton_layer.rotate, *rotary_case(torch.bfloat16), 0.5),
        partial(triton_attention.extend_attention, *make_case(codec, dtype=torch.bfloat16).arguments, codec, LAYER),
        partial(triton_encoder.add_layer_norm, x, None, x[0], x[0], 1e-5),
        partial(triton_encoder.rotate_, torch.empty(5, 3, 20, 16).to(x.dtype), angles, angles, 0.25),
        partial(triton_encoder.linear, x, torch.empty(320, 320).to(x.dtype), x[0]),
    )
    found = {
        name: [part in kernel.asm["ptx"] for part in ("griddepcontrol.wait", "griddepcontrol.launch_dependents")]
        for name, kernel in kernels.items()
    }
    assert found == {
        "encode_context": [True, True],
        "rotate": [False, True],
        "attend_context": [True, True],
        "merge": [True, True],
        "add_layer_norm": [True, True],
        "rotate_": [True, True],
        "linear": [True, True],
    }
    early = [name for name in found if kernels[name].metadata.launch_pdl]
    assert early == ["encode_context", "attend_context", "merge", "add_layer_norm", "rotate_", "linear"]
    # All weights are on their way before the wait.
    before, after = kernels["linear"].asm["ptx"].split("griddepcontrol.wait")
    assert before.count("ld.global.v4") == 10
    assert after.count("ld.global.v4") == 10


@pytest.mark.parametrize(
    ("capability", "allowed", "expected"), [((9, 0), True, True), ((8, 9), True, False), ((9, 0), False, False)]
)
def test_devices_on_which_kernels_overlap(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], allowed: bool, expected: bool
) -> None:
    monkeypatch.setattr(triton_launch, "capability_of", lambda device: capability)
    monkeypatch.setattr(triton_launch, "OVERLAP", allowed)
    assert triton_launch.overlaps(torch.device("cuda")) is expected
    assert not triton_launch.overlaps(torch.device("cpu"))
