"""RoPE and the activation of an extension, in PyTorch: as the model computes them, and as a slow twin does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.esm import modeling_esm

from esm_turbo.ops import reference, torch_ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rotary_case(dtype: torch.dtype, head_dim: int = 24, rows: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys [2, 3, 5, D] that lie token by token, cosines and sines [rows, 5, D]."""
    generator = torch.Generator().manual_seed(head_dim)
    query, keys = torch.randn(2, 2, 5, 3, head_dim, generator=generator).to(dtype).transpose(2, 3)
    angle = torch.randn(rows, 5, head_dim // 2, generator=generator).mul(10).repeat(1, 1, 2)
    return query, keys, angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_rotation_is_the_models(dtype: torch.dtype, rows: int) -> None:
    query, keys, cos, sin = rotary_case(dtype, rows=rows)
    found = torch_ops.rotate(query, keys, cos, sin, 24**-0.5)
    expected = modeling_esm.apply_rotary_pos_emb(query * 24**-0.5, keys, cos, sin)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_rotation_is_multiplication_of_complex_numbers() -> None:
    """To 1e-6 of the largest: float32 against float64."""
    case = rotary_case(torch.float32)
    for fast, slow in zip(torch_ops.rotate(*case, 0.3), reference.rotate(*case, 0.3), strict=True):
        assert (fast - slow).abs().max() < 1e-6 * slow.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_is_the_models(dtype: torch.dtype) -> None:
    x = torch.linspace(-9, 9, 3001).to(dtype)
    assert torch.equal(torch_ops.gelu(x), modeling_esm.gelu(x))


def test_activation_is_the_normal_distributions() -> None:
    """To 1e-6: below -4 the model's formula loses what is left of it in float32."""
    x = torch.linspace(-9, 9, 3001)
    assert (torch_ops.gelu(x) - reference.gelu(x)).abs().max() < 1e-6
