"""Encoding, RoPE and activation in PyTorch, compared with the model and with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.esm import modeling_esm

from esm_turbo.codecs import KVCodec
from esm_turbo.config import TurboConfig
from esm_turbo.ops import reference, torch_ops
from tests.helpers.attention_cases import LAYER, Case, codec_of, codec_with_gains, hiding_everything_from, make_case
from tests.helpers.codec_samples import certain_tokens

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
    """To 6 * 2^-24 of x: a quotient, an error function, a sum and a product are rounded, each by 2^-23 at most.

    Below -4 that is more than the value itself, which the model's formula loses.
    """
    x = torch.linspace(-9, 9, 3001)
    assert ((torch_ops.gelu(x) - reference.gelu(x)).abs() <= 6 * 2.0**-24 * x.abs()).all()


ENCODED = {name: TurboConfig.from_preset(name) for name in ("exact", "paper", "turbo3", "turbo1", "kivi2", "int8")}


@pytest.mark.parametrize("summarize", [True, False])
@pytest.mark.parametrize("preset", ENCODED)
def test_encoding_is_the_reference(preset: str, summarize: bool, tiny_model: Callable[..., object]) -> None:
    """Ragged rows in any order, some tokens protected: the same codes, and floats to two roundings to bfloat16.

    One multiplies row by row and the other all at once, so the tokens are those whose codes no rounding changes.
    """
    codec = tiny_model(preset=preset).esm.codec(ENCODED[preset])
    generator = torch.Generator().manual_seed(0)
    start = None if preset.startswith("kivi") else torch.tensor([0, 5, 130])
    ordered = certain_tokens(codec, 1, 3, 70, generator, start)
    order = torch.stack([torch.randperm(70, generator=generator) for _ in range(3)])
    # As a model makes them: heads of a token beside each other.
    keys, values = torch.zeros_like(ordered).scatter(3, order[None, :, None, :, None].expand_as(ordered), ordered)
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    options = {
        "order": order,
        "start": start,
        "columns": 200,
        "counts": torch.tensor([70, 33, 1]),
        "protected": torch.tensor([[0, 69], [12, -1], [-1, -1]]),
        "summarize": summarize,
    }
    found = torch_ops.encode(codec, 1, keys, values, **options)
    expected = reference.encode(codec, 1, keys, values, **options)
    for fast, slow in zip(found, expected, strict=True):
        assert fast.keys() == slow.keys()
        for name, x in slow.items():
            assert fast[name].dtype == x.dtype
            if x.is_floating_point():
                torch.testing.assert_close(fast[name], x, rtol=2**-7, atol=1e-5)
            else:
                assert torch.equal(fast[name], x), name
    assert bool(found[2]) == (summarize and preset not in ("exact", "paper", "int8"))


def test_tokens_are_encoded_in_order_without_options(tiny_model: Callable[..., object]) -> None:
    """Only the transform and the codes, at columns from 0 on."""
    codec = tiny_model(preset="turbo3").esm.codec(ENCODED["turbo3"])
    keys, values = torch.randn(2, 2, 4, 9, 16, generator=torch.Generator().manual_seed(1))
    packed, apart, rows = torch_ops.encode(codec, 0, keys, values, summarize=False)
    assert apart == rows == {}
    by_hand = codec.encode(0, keys, values)
    assert packed.keys() == by_hand.keys()
    assert all(torch.equal(packed[name], x) for name, x in by_hand.items())
    shifted, _, _ = torch_ops.encode(codec, 0, keys, values, start=torch.tensor([64, 64]), columns=73, summarize=False)
    assert not all(torch.equal(shifted[name], x) for name, x in by_hand.items())


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of `make_case`: contexts of any lengths, of a row each, of all rows, or named by rows in runs."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    case: dict[str, object] = {
        "lengths": tuple(lengths),
        "columns": max(lengths) + draw(st.integers(0, 5)),
        "batch": len(lengths),
        "n": draw(st.integers(1, 5)),
        "slots": draw(st.integers(0, 3)),
        "masked": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 5)),
    }
    how = draw(st.sampled_from(["own", "shared", "named"]))
    if how == "shared":
        case |= {"lengths": tuple(lengths[:1]), "shared": True}
    elif how == "named":
        named = draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, max_size=4, unique=True))
        case["index"] = tuple(context for context in named for _ in range(draw(st.integers(1, 3))))
    return case


# Of the largest output: a few roundings in float32, and the last bit of the others.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}


def check_against_float64(codec: KVCodec, made: Case) -> Tensor:
    expected, dtype = made.expected(), made.query.dtype
    for module in (reference, torch_ops):
        found = module.extend_attention(*made.arguments, codec, LAYER)
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max().clamp_min(1e-30)
    return found


@pytest.mark.parametrize("preset", ["exact", "turbo3", "turbo1", "paper"])
@settings(max_examples=25)
@given(case=cases())
def test_attention_is_one_softmax_over_all_that_a_row_sees(preset: str, case: dict[str, object]) -> None:
    """Slice by slice, one context after another, or row by row as in the reference."""
    codec = codec_of(preset, 16)
    check_against_float64(codec, make_case(codec, **case))


@settings(max_examples=15)
@given(case=cases())
def test_components_have_gains(case: dict[str, object]) -> None:
    """As they have for exact contexts, where no token is protected."""
    codec = codec_with_gains("turbo3", 16)
    check_against_float64(codec, make_case(codec, **case | {"slots": 0}))


@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_queries_of_any_size(scale: float) -> None:
    """Tiny ones weight all columns equally, huge ones select a single column."""
    codec = codec_of("turbo3", 32)
    check_against_float64(codec, make_case(codec, scale=scale, slots=1, masked=True))


@pytest.mark.parametrize("block", [16, 32, 100])
def test_slices_of_any_size_give_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of("turbo3", 16)
    monkeypatch.setattr(torch_ops, "_SLICE_ELEMENTS", block * 2 * 2 * 16)
    for columns in (block - 1, block, block + 1, 2 * block, 3 * block + 1, 1000):
        check_against_float64(codec, make_case(codec, columns=columns, slots=1, masked=True))


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_that_sees_nothing_is_zero(shared: bool) -> None:
    codec = codec_of("turbo3", 16)
    case = hiding_everything_from(make_case(codec, batch=3, shared=shared, slots=2), 1)
    output = check_against_float64(codec, case)
    assert (output[1] == 0).all() and (output[[0, 2]] != 0).all()


@pytest.mark.parametrize("preset", ["exact", "turbo3", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        {"shared": True, "batch": 40},
        {"shared": True, "batch": 1, "n": 130},
        {"batch": 2, "n": 150},
        {"batch": 2, "n": 130, "masked": True},
    ],
    ids=["shared", "one", "own", "masked"],
)
def test_many_queries_of_a_context(preset: str, dtype: torch.dtype, case: dict[str, int]) -> None:
    """As few. Some new tokens are hidden."""
    made = make_case(codec_of(preset, 16), **{"n": 5, "columns": 150, "dtype": dtype} | case)
    made = replace(made, mask=torch.arange(made.query.shape[2]).expand(len(made.query), -1) > 2)
    made = replace(made, seen=torch.cat([made.seen[:, : -made.query.shape[2]], made.mask], dim=1))
    check_against_float64(codec_of(preset, 16), made)
