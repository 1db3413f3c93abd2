"""Launches that bypass Triton's own, and which arguments make another variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esm_turbo.ops.triton_launch import Options, PreparedLaunch, launch, placeholder, recorded, strides
from esm_turbo.ops.variants import Variant

CPU = torch.device("cpu")


def arguments(x: Tensor, count: int) -> dict[str, Any]:
    return {"x_ptr": x, "count": count, "BLOCK": 256}


def variant(x: Tensor, count: int, **options: Any) -> Variant:
    from esm_turbo.ops.kernels import encoder

    with recorded(90) as variants:
        launch(encoder.gelu_, (1, 1, 1), CPU, Options(num_warps=4, **options), **arguments(x, count))
    (found,) = variants
    return found


def test_variants_differ_by_dtype_alignment_constants_and_options() -> None:
    x = torch.zeros(1024)
    plain = variant(x, 1024)
    assert plain.signature == ("*fp32", "i64", "constexpr")
    assert plain.constants == (256,)
    assert plain.aligned == ((0,), (1,))
    assert plain == variant(torch.ones(1024), 16)
    # A number is not a constant because it is 1.
    assert variant(x, 1) == variant(x, 17)
    different = {plain, variant(x, 17), variant(x[1:], 16), variant(x.half(), 16), variant(x, 16, launch_pdl=True)}
    assert len(different) == 5


def test_tensors_that_are_not_read_have_the_type_of_those_that_are() -> None:
    assert placeholder(torch.uint8, CPU) is placeholder(torch.uint8, CPU)
    assert placeholder(torch.uint8, CPU).dtype == torch.uint8
    with torch.inference_mode():
        assert not placeholder(torch.int16, CPU).is_inference()


def test_dimensions_of_size_one_have_no_stride() -> None:
    x = torch.empty(1, 2, 1, 8).as_strided((1, 2, 1, 8), (1, 8, 3, 1))
    assert strides(x=x) == {"stride_xb": 0, "stride_xh": 8, "stride_xn": 0}


def test_prepared_launches_are_listed_with_all_others() -> None:
    from esm_turbo.ops.kernels import encoder

    x = torch.zeros(1024)
    prepared = PreparedLaunch(encoder.gelu_, (1, 1, 1), CPU, Options(num_warps=4), count=1024, BLOCK=256)
    with recorded(90) as variants:
        prepared(x_ptr=x)
    assert variants == [variant(x, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "count"), [(0, 4096), (0, 1), (0, 1000), (1, 1000)])
def test_launches_compute_what_triton_launches_do(dtype: torch.dtype, first: int, count: int) -> None:
    from esm_turbo.ops.kernels import encoder

    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8192, device=device).to(dtype)
    expected, found = x.clone(), x.clone()
    grid = (-(-count // 256), 1, 1)
    encoder.gelu_[grid](**arguments(expected[first:], count), num_warps=4)
    launch(encoder.gelu_, grid, device, Options(num_warps=4), **arguments(found[first:], count))
    assert torch.equal(found, expected)
    assert not torch.equal(found[first : first + count], x[first : first + count])
    assert torch.equal(found[first + count :], x[first + count :])


@pytest.mark.gpu
def test_launches_follow_the_current_stream_and_are_captured() -> None:
    from esm_turbo.ops.kernels import encoder

    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(4096, device=device)
    expected = torch.nn.functional.gelu(x)

    def run(x: Tensor) -> None:
        launch(encoder.gelu_, (16, 1, 1), device, Options(num_warps=4), **arguments(x, 4096))

    run(x.clone())
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(static)
    # Nothing ran while it was captured.
    assert torch.equal(static, x)
    graph.replay()
    assert (static - expected).abs().max() < 1e-5


@pytest.mark.gpu
def test_launches_run_on_the_device_of_the_tensors() -> None:
    from esm_turbo.ops.kernels import encoder

    # Another device than the current one, where there are several.
    x = torch.randn(4096, device=f"cuda:{torch.cuda.device_count() - 1}")
    expected = torch.nn.functional.gelu(x)
    with torch.cuda.device(0):
        launch(encoder.gelu_, (16, 1, 1), x.device, Options(num_warps=4), **arguments(x, 4096))
        assert torch.cuda.current_device() == 0
    assert (x - expected).abs().max() < 1e-5
