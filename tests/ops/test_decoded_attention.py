"""Attention to decoded contexts against the slow reference, and its kernel for new tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec, PackedContext
from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.ops import decoded_attention, torch_ops
from tests.helpers import reference
from tests.helpers.triton_devices import DTYPES, on_devices, right_triton  # noqa: F401

# Each operand is rounded once; in float32, sums differ in order.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def softmax_over(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in float32 to tokens [B, H, L, D] that the mask [B, L] shows, and its log-sum-exp."""
    scores = (query @ keys.transpose(2, 3)).masked_fill(~mask[:, None, None], float("-inf"))
    weights = scores.softmax(dim=3).nan_to_num(0.0)
    return weights @ values, scores.logsumexp(dim=3)


@on_devices(
    "dtype, n, head_dim",
    cpu=itertools.product(("float32", "float16"), (1, 21, 70), (16, 24)),
    gpu=itertools.product(DTYPES, (1, 21, 32, 70), (16, 24, 64, 128)),
)
@torch.no_grad()
def test_new_tokens_continue_the_softmax_over_the_past(device: str, dtype: str, n: int, head_dim: int) -> None:
    shape = (3, 2, n, head_dim)
    query, keys, values = (normal(*shape, seed=seed) for seed in range(3))
    query *= head_dim**-0.5
    past_keys, past_values = (normal(3, 2, 9, head_dim, seed=seed) for seed in (3, 4))
    seen = torch.ones(3, 9, dtype=torch.bool)
    seen[1] = False
    mask = torch.arange(n) < torch.tensor([n, max(1, n - 1), max(1, n // 2)])[:, None]
    query, keys, values, past_keys, past_values = (
        x.to(DTYPES[dtype]).float() for x in (query, keys, values, past_keys, past_values)
    )
    past, lse = softmax_over(query, past_keys, past_values, seen)
    every_key, every_value = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
    expected, _ = softmax_over(query, every_key, every_value, torch.cat([seen, mask], dim=1))
    half = [x.to(device, DTYPES[dtype]) for x in (query, keys, values, past)]
    found = decoded_attention.attend_new(*half[:3], mask.to(device), half[3], lse.to(device))
    assert found.dtype == DTYPES[dtype]
    assert found.transpose(1, 2).is_contiguous()
    error = (found.cpu().float() - expected).abs().max()
    assert error <= TOLERANCES[found.dtype] * expected.abs().max()


@on_devices(cpu=((),), gpu=((),))
@torch.no_grad()
def test_rows_that_see_nothing_are_zero(device: str) -> None:
    x = normal(2, 1, 3, 16, seed=0).to(device)
    mask = torch.tensor([[False, False, False], [True, True, True]], device=device)
    past, lse = torch.full_like(x, float("nan")), torch.full((2, 1, 3), float("-inf"), device=device)
    found = decoded_attention.attend_new(x, x, x, mask, past, lse)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert torch.isfinite(found[1]).all()
    assert found[1].abs().max() > 0


@on_devices(cpu=((),), gpu=((),))
@torch.no_grad()
def test_a_past_that_is_not_a_number_is_no_empty_past(device: str) -> None:
    x = normal(1, 1, 3, 16, seed=0).to(device)
    past, lse = torch.full_like(x, torch.nan), torch.full((1, 1, 3), torch.nan, device=device)
    assert decoded_attention.attend_new(x, x, x, None, past, lse).isnan().all()


def case_of_shared(
    n: int,
    head_dim: int,
    lengths: list[int],
    dtype: torch.dtype,
    device: str,
    *,
    rows: int = 7,
    index: list[int] | None = None,
    visible: int = 0,
) -> list[Tensor | None]:
    """Arguments of `attend_shared`: numbers beyond the contexts' lengths are NaN, and new tokens not seen are large.

    `visible` is the number of rows of a mask of columns, 0 for none.
    """
    rows = rows if index is None else len(index)
    heads, columns = 2, max(lengths) + 3
    query, keys, values = (normal(rows, n, heads, head_dim, seed=seed).transpose(1, 2) for seed in range(3))
    query = query * head_dim**-0.5
    past = [normal(len(lengths), heads, columns, head_dim, seed=seed) for seed in (3, 4)]
    for context, length in enumerate(lengths):
        for x in past:
            x[context, :, length:] = float("nan")
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(rows, n, generator=generator) < 0.7
    for x in (keys, values):
        x[~mask[:, None].expand(-1, heads, -1)] = 100.0
    hidden = (torch.rand(visible, columns, generator=generator) < 0.6).to(device) if visible else None
    tiles = None
    if index is not None:
        tiles = RowIndex(np.array(index)).tiles(n, decoded_attention.queries_per_tile(n), torch.device(device))
    new = [x.to(device, dtype) for x in (query, keys, values)]
    past = [x.to(device, dtype) for x in past]
    return [*new, mask.to(device), *past, torch.tensor(lengths, device=device), hidden, tiles]


def assert_as_reference(arguments: list[Tensor | None]) -> None:
    found = decoded_attention.attend_shared(*arguments)
    expected = reference.attend_shared(*(x if x is None else x.cpu() for x in in_float(arguments)))
    assert found.dtype == arguments[0].dtype
    assert found.transpose(1, 2).is_contiguous()
    error = (found.cpu().float() - expected).abs().max()
    assert error <= TOLERANCES[found.dtype] * expected.abs().max()


def in_float(arguments: list[Tensor | None]) -> list[Tensor | None]:
    return [x.float() if x is not None and x.is_floating_point() else x for x in arguments]


@on_devices(
    "dtype, n, head_dim, length",
    cpu=[
        ("float16", 1, 16, 70), ("float16", 21, 24, 64), ("float16", 21, 16, 1), ("float16", 70, 32, 129),
        ("float16", 40, 16, 0), ("float16", 130, 16, 63), ("float16", 5, 128, 33),
    ],
    gpu=itertools.product(("float16", "bfloat16"), (1, 21, 70, 300), (16, 24, 64, 128), (0, 63, 501)),
)  # fmt: skip
@torch.no_grad()
def test_rows_that_share_a_context(device: str, dtype: str, n: int, head_dim: int, length: int) -> None:
    rows = 7 if n < 100 else 2
    assert_as_reference(case_of_shared(n, head_dim, [length], DTYPES[dtype], device, rows=rows))


@on_devices(
    "dtype, n, head_dim",
    cpu=[("float16", 1, 16), ("float16", 21, 24), ("float16", 70, 16)],
    gpu=itertools.product(("float16", "bfloat16"), (1, 21, 70, 200), (16, 24, 64, 128)),
)
@torch.no_grad()
def test_rows_that_share_several_contexts(device: str, dtype: str, n: int, head_dim: int) -> None:
    """Of random lengths, in any order, some of them read by many rows, and others by none."""
    generator = np.random.default_rng(n)
    lengths = generator.integers(0, 140, 5).tolist()
    index = np.repeat([3, 0, 4, 1], generator.integers(1, 9 if n < 70 else 3, 4)).tolist()
    assert_as_reference(case_of_shared(n, head_dim, lengths, DTYPES[dtype], device, index=index))


@on_devices(
    "dtype, n, head_dim, visible",
    cpu=[("float16", 1, 16, 4), ("float16", 21, 24, 1), ("float16", 70, 16, 0)],
    gpu=itertools.product(("float16", "bfloat16"), (1, 21, 70), (16, 24, 64, 128), (0, 1, 4)),
)
@torch.no_grad()
def test_rows_with_contexts_of_their_own(device: str, dtype: str, n: int, head_dim: int, visible: int) -> None:
    assert_as_reference(case_of_shared(n, head_dim, [70, 0, 129, 64], DTYPES[dtype], device, rows=4, visible=visible))


@on_devices(
    "dtype, n, head_dim, visible, named",
    cpu=[("float16", 1, 16, 7, False), ("float16", 21, 24, 1, False), ("float16", 21, 16, 7, True)],
    gpu=itertools.product(("float16", "bfloat16"), (1, 21, 70), (16, 24, 64, 128), (1, 7), (False, True)),
)
@torch.no_grad()
def test_columns_of_shared_contexts_are_hidden(
    device: str, dtype: str, n: int, head_dim: int, visible: int, named: bool
) -> None:
    index = [1, 1, 0, 0, 0, 2, 2] if named else None
    lengths = [70, 130, 64] if named else [130]
    assert_as_reference(case_of_shared(n, head_dim, lengths, DTYPES[dtype], device, index=index, visible=visible))


@on_devices(cpu=((),), gpu=((),))
@torch.no_grad()
def test_contexts_lie_in_memory_in_any_order(device: str) -> None:
    arguments = case_of_shared(5, 24, [9, 70], torch.float16, device, index=[1, 0, 0])
    expected = decoded_attention.attend_shared(*arguments)
    for change in (
        lambda x: into_buffer(x, x.shape[2] + 5),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.nn.functional.pad(x, (0, 3))[..., :24],
    ):
        past = [change(arguments[4]), change(arguments[5])]
        assert torch.equal(decoded_attention.attend_shared(*arguments[:4], *past, *arguments[6:]), expected)


@on_devices(cpu=((),), gpu=((),))
@torch.no_grad()
def test_a_row_depends_on_no_other(device: str) -> None:
    """Bit for bit, whatever the other rows of its tile hold; a row that sees nothing is zero."""
    arguments = case_of_shared(21, 16, [70], torch.float16, device)
    found = decoded_attention.attend_shared(*arguments)
    for row in (0, 5, 6):
        others = [x.clone() for x in arguments[:4]]
        for x in others[:3]:
            x[torch.arange(len(x)) != row] *= -2
        assert torch.equal(decoded_attention.attend_shared(*others, *arguments[4:])[row], found[row])
    arguments[3][2] = False
    nothing = torch.zeros_like(arguments[6])
    hidden = decoded_attention.attend_shared(*arguments[:6], nothing, None, None)
    assert torch.equal(hidden[2], torch.zeros_like(hidden[2]))
    assert torch.isfinite(hidden).all()
    assert hidden.abs().amax(dim=(1, 2, 3)).count_nonzero() == len(hidden) - 1


@on_devices(cpu=((),), gpu=((),))
@torch.no_grad()
def test_several_contexts_must_be_named(device: str) -> None:
    arguments = case_of_shared(3, 16, [9, 8], torch.float16, device)
    with pytest.raises(ValueError, match="7 rows must name the contexts that they read, or share one; got 2"):
        decoded_attention.attend_shared(*arguments)


@on_devices(cpu=((),), gpu=((),))
@torch.no_grad()
def test_the_operator_is_registered(device: str) -> None:
    arguments = case_of_shared(5, 16, [9, 20], torch.float16, device, index=[1, 0, 0], visible=3)
    torch.library.opcheck(torch.ops.esm_turbo.attend_shared.default, tuple(arguments))


def packed_context(
    codec: KVCodec, layer_idx: int, lengths: list[int], protects: bool
) -> tuple[PackedContext, list[Tensor]]:
    """A context of random keys and values, and the decoded ones as stored."""
    geometry = codec.geometry
    shape = (len(lengths), geometry.num_heads, max(lengths), geometry.head_dim)
    keys, values = normal(*shape, seed=5), normal(*shape, seed=6)
    counts = torch.tensor(lengths)
    columns = torch.tensor([[0, -1]] * len(lengths)) if protects else None
    packed, protected, rows = torch_ops.encode(codec, layer_idx, keys, values, counts=counts, protected=columns)
    context = PackedContext(
        packed, None, protected, None, rows, counts, None if columns is None else columns.to(torch.int32)
    )
    return context, [keys, values]


@pytest.mark.parametrize("preset", ["exact", "paper", "turbo2", "turbo4"])
@torch.no_grad()
def test_decoded_contexts_hold_protected_tokens(tiny_model, preset: str) -> None:
    model = tiny_model(preset=preset)
    codec = model.esm.codec(model.esm.turbo_config)
    protects = preset != "exact"
    context, given = packed_context(codec, 1, [70, 70], protects)
    decoded = decoded_attention.decode(codec, 1, context, torch.float32)
    plain = codec.decode(1, context.packed | context.rows)
    for found, stored, exact in zip(decoded, plain, given, strict=True):
        assert torch.equal(found[:, :, 1:], stored[:, :, 1:])
        # Protected tokens are stored in bfloat16.
        error = (found[:, :, 0] - exact[:, :, 0]).abs().max()
        assert error <= 2.0**-6 * exact.abs().max()
        if protects:
            assert error < (stored[:, :, 0] - exact[:, :, 0]).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("preset", ["exact", "paper", "turbo3"])
@pytest.mark.parametrize("case", ["shared", "masked", "rows"])
@torch.no_grad()
def test_attention_to_a_decoded_context(tiny_model, preset: str, dtype: str, case: str) -> None:
    model = tiny_model(preset=preset, layers=2, head_dim=32).to("cuda")
    codec = model.esm.codec(model.esm.turbo_config)
    lengths = [70, 66, 33, 1] if case == "rows" else [69]
    context, _ = packed_context_on(codec, lengths, preset != "exact")
    shape = (4, codec.geometry.num_heads, 21, codec.geometry.head_dim)
    query, keys, values = (normal(*shape, seed=seed).to("cuda", DTYPES[dtype]) for seed in range(3))
    query *= shape[3] ** -0.5
    mask = torch.arange(21, device="cuda") < torch.tensor([21, 20, 8, 1], device="cuda")[:, None]
    visible = None
    if case == "masked":
        columns = torch.arange(70, device="cuda")
        visible = (columns // 7 != torch.tensor([1, 2, 3, 0], device="cuda")[:, None])[:, : max(lengths)]
    context = with_masks(context, visible, 4)
    found = decoded_attention.extend_attention(query, keys, values, mask, context, codec, 0)
    expected = torch_ops.extend_attention(query.float(), keys.float(), values.float(), mask, context, codec, 0)
    assert found.dtype == DTYPES[dtype]
    error = (found.float() - expected)[mask[:, None, :, None].expand_as(found)].abs().max()
    assert error <= 2 * TOLERANCES[found.dtype] * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("preset", ["exact", "paper", "turbo3"])
@pytest.mark.parametrize("spare", [0, 16])
@torch.no_grad()
def test_rows_name_decoded_contexts(tiny_model, preset: str, dtype: str, spare: int) -> None:
    """Contexts of any lengths, in a cache with spare columns or without, of which some are not read."""
    model = tiny_model(preset=preset, layers=2, head_dim=32).to("cuda")
    codec = model.esm.codec(model.esm.turbo_config)
    context, _ = packed_context_on(codec, [70, 66, 33, 1, 9], preset != "exact")
    index = RowIndex(np.array([3, 0, 0, 0, 4, 2, 2]))
    packed = {name: into_buffer(x, 70 + spare) for name, x in context.packed.items()}
    context = replace(context, packed=packed, index=index)
    shape = (7, codec.geometry.num_heads, 21, codec.geometry.head_dim)
    query, keys, values = (normal(*shape, seed=seed).to("cuda", DTYPES[dtype]) for seed in range(3))
    query *= shape[3] ** -0.5
    mask = torch.arange(21, device="cuda") < torch.tensor([21, 20, 8, 1, 21, 3, 2], device="cuda")[:, None]
    assert decoded_attention.pays(query, context, codec) == (preset == "exact")
    found = decoded_attention.extend_attention(query, keys, values, mask, context, codec, 0)
    rows = [
        torch_ops.extend_attention(
            query[[row]].float(), keys[[row]].float(), values[[row]].float(), mask[[row]],
            with_masks(context.of(torch.tensor([own], device="cuda")), None, 1), codec, 0,
        )
        for row, own in enumerate(index.contexts)
    ]  # fmt: skip
    expected = torch.cat(rows)
    error = (found.float() - expected)[mask[:, None, :, None].expand_as(found)].abs().max()
    assert error <= 2 * TOLERANCES[found.dtype] * expected.abs().max()


def into_buffer(x: Tensor, columns: int) -> Tensor:
    """The same numbers at the beginning of a buffer with more columns."""
    return torch.nn.functional.pad(x, (0, 0, 0, columns - x.shape[2]))[:, :, : x.shape[2]]


def packed_context_on(codec, lengths: list[int], protects: bool) -> tuple[PackedContext, list[Tensor]]:
    context, given = packed_context(codec, 0, lengths, protects)
    tensors = {
        name: {key: x.cuda() for key, x in getattr(context, name).items()} for name in ("packed", "protected", "rows")
    }
    own = {name: getattr(context, name) for name in ("lengths", "protected_columns")}
    own = {name: None if x is None else x.cuda() for name, x in own.items()}
    return replace(context, **tensors, **own), given


def with_masks(context: PackedContext, visible: Tensor | None, batch_size: int) -> PackedContext:
    """The masks that a session derives from lengths, protected columns and visible columns."""
    columns = next(iter(context.packed.values())).shape[2]
    steps = torch.arange(columns, device="cuda")
    mask = (steps < context.lengths[:, None]).expand(batch_size, -1)
    mask = mask if visible is None else mask & visible
    if not context.protected:
        return replace(context, mask=mask, visible=visible)
    at = context.protected_columns.long().expand(batch_size, -1)
    shown = mask.gather(1, at.clamp_min(0)) & (at >= 0)
    for slot in at.unbind(1):
        mask = mask & (steps != slot[:, None])
    return replace(context, mask=mask, visible=visible, protected_mask=shown)
