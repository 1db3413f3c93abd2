"""The Triton kernel that encodes keys and values, tested alike in Triton's interpreter and on a GPU.

Where the transform is exact, the bytes equal those of the PyTorch path. Elsewhere both round in different orders, so a
number closer to a boundary than its rounding error may fall on either side; the number of such codes is limited.

The interpreter cannot find races, the tensor cores' rounding, or anything that depends on the layout of registers. It
truncates float32 to bfloat16 instead of rounding it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo import TurboConfig, TurboKVCache
from esm_turbo.codecs import ExactCodec, KVCodec, LutCodec, Packed, TurboCodec
from esm_turbo.codecs.base import rotate
from esm_turbo.codecs.packing import unpack_codes
from esm_turbo.config import Geometry
from esm_turbo.ops import torch_ops, triton_encode
from esm_turbo.ops.backends import KVBackend, TorchBackend, TritonBackend
from tests.helpers.attention_cases import LAYER, _statistics, codec_of, codec_with_gains
from tests.helpers.codec_samples import fitted
from tests.helpers.triton_devices import DTYPES, RecordedCalls, on_devices, right_triton  # noqa: F401 - the fixture

PRESETS = ("turbo4", "turbo3", "turbo2", "turbo1", "paper")
HEAD_DIMS = (16, 24, 32, 64, 128)
LENGTHS = (1, 17, 63, 64, 70, 1000)
CLS, RESIDUE, EOS = 0, 5, 2
# Of a transformed component, relative to the sum of the magnitudes of its products: up to 128 products of 22 bits.
ROUNDING = 2.0**-19
# Two nearly equal numbers, each rounded to bfloat16.
BFLOAT16 = 2.0**-7


@dataclass(frozen=True)
class Tokens:
    """Arguments of `triton_encode.encode` except codec and layer, on the CPU.

    Attributes:
        keys: [B, H, L, D].
        values: [B, H, L, D].
        order: int64 [B, L] or None, as are the others.
        start: int64 [B].
        counts: int64 [B].
        protected: int64 [B, P].
    """

    keys: Tensor
    values: Tensor
    order: Tensor | None = None
    start: Tensor | None = None
    counts: Tensor | None = None
    protected: Tensor | None = None

    def ordered(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values in order, of all tokens or of the ordered tokens `index` [B, n]."""
        order = torch.arange(self.keys.shape[2]).expand(len(self.keys), -1) if self.order is None else self.order
        order = order if index is None else order.gather(1, index)
        at = order[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
        return self.keys.gather(2, at), self.values.gather(2, at)

    @property
    def columns(self) -> Tensor:
        steps = torch.arange(self.keys.shape[2])
        return steps.expand(len(self.keys), -1) if self.start is None else self.start[:, None] + steps

    @property
    def read(self) -> Tensor:
        """Which ordered tokens are read from their codes, bool [B, L]."""
        steps = torch.arange(self.keys.shape[2])
        read = torch.ones(len(self.keys), len(steps)).bool()
        if self.counts is not None:
            read = read & (steps < self.counts[:, None])
        if self.protected is not None:
            read = read & ~(steps == self.protected[:, :, None]).any(1)
        return read


def random_tokens(
    codec: KVCodec, *, batch: int = 1, length: int = 70, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tokens:
    geometry, generator = codec.geometry, torch.Generator().manual_seed(seed)
    shape = (batch, length, geometry.num_heads, geometry.head_dim)
    # In a model's memory layout: the heads of a token are contiguous.
    return Tokens(*((torch.randn(shape, generator=generator) + 0.3).to(dtype).transpose(1, 2) for _ in range(2)))


def ragged_tokens(codec: KVCodec, *, length: int = 70, dtype: torch.dtype = torch.float32) -> Tokens:
    """Three rows in random order, which keep all tokens, half of them and one; two slots."""
    tokens = random_tokens(codec, batch=3, length=length, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(length, generator=generator) for _ in range(3)])
    counts = torch.tensor([length, length // 2, 1])
    protected = torch.tensor([[0, length - 1], [length // 3, -1], [-1, -1]])
    return replace(tokens, order=order, counts=counts, protected=protected)


def encode(
    tokens: Tokens, codec: KVCodec, device: str, layer: int = LAYER, **options: object
) -> tuple[Packed, Packed, Packed]:
    """Encodes tokens by the kernel; results are on the CPU."""
    arguments = {name: None if x is None else x.to(device) for name, x in vars(tokens).items()}
    if tokens.start is not None:
        options = {"columns": int(tokens.columns.max()) + 1, **options}
    output = triton_encode.encode(codec, layer, arguments.pop("keys"), arguments.pop("values"), **arguments, **options)
    return tuple({name: x.cpu() for name, x in tensors.items()} for tensors in output)  # type: ignore[return-value]


def in_pytorch(tokens: Tokens, codec: KVCodec) -> tuple[Packed, Packed]:
    """Encodes tokens without the kernel: packed tensors, and protected tokens before rounding."""
    packed = codec.quantize(LAYER, *codec.transform(LAYER, *tokens.ordered(), tokens.columns))
    protected: Packed = {}
    if tokens.protected is not None:
        slots = tokens.protected.clamp_min(0)
        special = codec.transform(LAYER, *tokens.ordered(slots), torch.zeros_like(slots))
        protected = dict(zip(("keys", "values"), special, strict=True))
    return packed, protected


def to_bfloat16(tensors: Packed, device: str) -> Packed:
    """Converts as the device does: the interpreter truncates instead of rounding."""
    if device == "cuda":
        return {name: x.bfloat16() for name, x in tensors.items()}
    return {name: (x.view(torch.int32) & -0x10000).view(torch.float32).bfloat16() for name, x in tensors.items()}


def ordinals(codec: KVCodec, packed: Packed, layer: int = LAYER) -> Tensor:
    """Codes of keys and of values in the order of the numbers they represent, int64 [2, B, H, L, D]."""
    codes = []
    for kind in ("key", "value"):
        slabs = codec.field_slabs(layer, kind)
        code = torch.zeros(*packed[slabs[0].name].shape[:3], codec.geometry.head_dim, dtype=torch.int64)
        for slab in slabs:
            fields = unpack_codes(packed[slab.name], slab.bits).long()
            code[..., list(slab.components)] += fields * torch.tensor(slab.weights).long()
        if isinstance(codec, LutCodec) and codec.state[f"{kind}_levels"].shape[-1] == 8:
            # Three bits of an index, and above them the sign of the residual.
            code = 2 * (code & 7) + (code >> 3)
        codes.append(code)
    return torch.stack(codes)


def transformed(tokens: Tokens, codec: KVCodec) -> tuple[Tensor, Tensor]:
    """Transformed keys and values in float64 and bounds of their rounding errors, [2, B, H, L, D] each."""
    state = codec.layer_state(LAYER, torch.device("cpu"))
    heads, head_dim = codec.geometry.num_heads, codec.geometry.head_dim
    found, margins = [], []
    for kind, x in zip(("key", "value"), tokens.ordered(), strict=True):
        x = x.double()
        if kind == "key" and codec.block_size is not None:
            start = tokens.columns // codec.block_size * codec.block_size
            # Both paths use these angles.
            x = rotate(x, -start[:, None, :, None] * state["inv_freq"])
        mean = state.get(f"{kind}_mean", torch.zeros(heads, head_dim)).double()[:, None]
        matrix = state.get(f"{kind}_map", torch.eye(head_dim).expand(heads, -1, -1)).double().transpose(1, 2)
        found.append((x - mean) @ matrix)
        margins.append(ROUNDING * ((x.abs() + mean.abs()) @ matrix.abs()))
    return torch.stack(found), torch.stack(margins)


def assert_same_codes(packed: Packed, tokens: Tokens, codec: KVCodec) -> None:
    """Codes are right up to rounding of the transformed numbers, and nearly all equal those of the PyTorch path."""
    expected, _ = in_pytorch(tokens, codec)
    assert {name: (x.shape, x.dtype) for name, x in packed.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }
    found, plain = ordinals(codec, packed), ordinals(codec, expected)
    x, margin = transformed(tokens, codec)
    lowest, highest = (ordinals(codec, codec.quantize(LAYER, *(x + sign * margin).float())) for sign in (-1, 1))
    assert ((lowest <= found) & (found <= highest)).all()
    differing = found != plain
    assert ((found - plain).abs() <= 1).all()
    assert int(differing.sum()) <= max(1, differing.numel() // 10_000)


def assert_same_residuals(rows: Packed, packed: Packed, tokens: Tokens, codec: KVCodec) -> None:
    """Mean residuals of these codes, up to rounding to bfloat16 and 1e-5 of the largest."""
    transformed = codec.transform(LAYER, *tokens.ordered(), tokens.columns)
    expected = codec.summarize(LAYER, *transformed, packed, tokens.read)
    assert rows.keys() == expected.keys()
    for name, x in expected.items():
        assert rows[name].dtype == x.dtype
        torch.testing.assert_close(rows[name].float(), x.float(), rtol=BFLOAT16, atol=1e-5 * float(x.abs().max()))


def assert_equal(found: Packed, expected: Packed) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name


def exact_codec(preset: str, head_dim: int) -> KVCodec:
    """A preset's codec whose maps permute components and multiply them by powers of two; keys are not rotated.

    Its means are multiples of half a step, its levels multiples of a quarter.
    """
    codec = codec_of(preset, head_dim)
    rng = np.random.default_rng(head_dim)
    state = dict(codec.state)
    shape = (*state["key_levels" if preset == "paper" else "key_mean"].shape[:2], head_dim)
    for kind in ("key", "value"):
        if f"{kind}_map" in state:
            scale = 2.0 ** rng.integers(-3, 4, shape)
            order = rng.permuted(np.broadcast_to(np.arange(head_dim), shape), axis=-1)
            matrix = np.eye(head_dim)[order] * scale[..., None]
            state[f"{kind}_map"] = torch.from_numpy(matrix).float()
            state[f"{kind}_inverse"] = torch.from_numpy(np.linalg.inv(matrix)).float()
        if f"{kind}_mean" in state:
            grid = 0.5 / np.abs(matrix).sum(-2)
            state[f"{kind}_mean"] = torch.from_numpy(grid * rng.integers(-4, 5, shape)).float()
            state[f"{kind}_steps"] = torch.ones_like(state[f"{kind}_steps"])
        if f"{kind}_levels" in state:
            levels = rng.integers(1, 6, state[f"{kind}_levels"].shape).cumsum(-1) - 12
            state[f"{kind}_levels"] = torch.from_numpy(levels / 4).float()
    if "inv_freq" in state:
        state["inv_freq"] = torch.zeros_like(state["inv_freq"])
    return type(codec)(codec.config, codec.geometry, state)


def exact_tokens(codec: KVCodec, tokens: Tokens) -> Tokens:
    """Tokens of the same shape that the codec transforms without rounding, half of them on a boundary or a level.

    Transformed, they are multiples of half a step, up to 128 of them, which bfloat16 can represent. In float32 they
    have twelve more bits.
    """
    state = codec.layer_state(LAYER, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    dtype, made = tokens.keys.dtype, []
    for kind in ("key", "value"):
        shape = tokens.keys.shape
        if isinstance(codec, LutCodec):
            numbers = torch.randint(-80, 81, shape, generator=generator) / 8
        else:
            limit = state[f"{kind}_highest"] + 1
            numbers = (torch.rand(shape, generator=generator) * (2 * limit + 1)).floor() - limit
            numbers = numbers / 2
        if dtype == torch.float32:
            fine = torch.randint(-1, 2, shape, generator=generator) * torch.rand(shape, generator=generator)
            numbers = numbers + (fine * 4096).floor() / 8192
        matrix = state.get(f"{kind}_map", torch.eye(shape[3]).expand(shape[1], -1, -1))
        mean = state.get(f"{kind}_mean", torch.zeros(shape[1], shape[3]))[:, None]
        inverse = torch.linalg.inv(matrix.double())
        x = (numbers.double() @ inverse.transpose(1, 2) + mean).to(dtype)
        made.append(x)
    return replace(tokens, keys=made[0], values=made[1])


@on_devices(
    "preset, head_dim, dtype",
    cpu=[
        *itertools.product(PRESETS, (64,), ("float32",)),
        *((preset, head_dim, "float16") for preset, head_dim in zip(PRESETS, HEAD_DIMS, strict=True)),
    ],
    gpu=itertools.product(PRESETS, HEAD_DIMS, DTYPES),
)
def test_same_bytes_for_the_same_transformed_numbers(device: str, preset: str, head_dim: int, dtype: str) -> None:
    codec = exact_codec(preset, head_dim)
    length = 70 if device == "cpu" else 1000
    tokens = exact_tokens(codec, ragged_tokens(codec, length=length, dtype=DTYPES[dtype]))
    if device == "cpu":
        tokens = Tokens(*(None if x is None else x[:1] for x in vars(tokens).values()))
    x, _ = transformed(tokens, codec)
    assert torch.equal(torch.stack(codec.transform(LAYER, *tokens.ordered(), tokens.columns)).double(), x)
    assert float((x * 8).frac().eq(0).double().mean()) > 0.3
    packed, protected = in_pytorch(tokens, codec)
    assert ordinals(codec, packed).unique().numel() >= (16 if isinstance(codec, LutCodec) else 4)
    found, found_protected, rows = encode(tokens, codec, device)
    assert_equal(found, packed)
    assert_equal(found_protected, to_bfloat16(protected, device))
    if isinstance(codec, TurboCodec):
        assert_same_residuals(rows, found, tokens, codec)


@on_devices("head_dim", cpu=[16, 64], gpu=HEAD_DIMS)
def test_gains_are_those_of_reading(device: str, head_dim: int) -> None:
    """They change no codes, and the mean residuals as in PyTorch."""
    codec, plain = codec_with_gains("turbo3", head_dim), codec_of("turbo3", head_dim)
    tokens = replace(ragged_tokens(codec), protected=None)
    found, _, rows = encode(tokens, codec, device)
    assert_equal(found, encode(tokens, plain, device)[0])
    assert_same_residuals(rows, found, tokens, codec)


SIZES = [*itertools.product(PRESETS, (16, 64)), ("turbo3", 24), ("turbo2", 32), ("turbo4", 128), ("paper", 128)]
IN_HALF = [("turbo3", 64, "float16"), ("turbo4", 24, "float16"), ("paper", 32, "float16"), ("turbo2", 64, "bfloat16")]


@on_devices(
    "preset, head_dim, dtype",
    cpu=[*((*size, "float32") for size in SIZES), *IN_HALF],
    gpu=itertools.product(PRESETS, HEAD_DIMS, DTYPES),
)
def test_every_format_head_size_and_dtype(device: str, preset: str, head_dim: int, dtype: str) -> None:
    """Inputs in half precision are encoded as precisely as in float32."""
    codec = codec_of(preset, head_dim)
    assert triton_encode.can_run(codec, LAYER)
    make, length = (random_tokens, 65) if device == "cpu" else (ragged_tokens, 1000)
    tokens = make(codec, length=length, dtype=DTYPES[dtype])
    packed, _, rows = encode(tokens, codec, device)
    assert_same_codes(packed, tokens, codec)
    if isinstance(codec, TurboCodec):
        assert_same_residuals(rows, packed, tokens, codec)
    else:
        assert rows == {}


@on_devices("head_dim", cpu=[16, 64], gpu=HEAD_DIMS)
@pytest.mark.parametrize("layer", [0, 1])
def test_slabs_of_all_sizes(device: str, layer: int, head_dim: int) -> None:
    """Fields of 8, 4, 2 and 1 bits, components without bits, and different widths in each layer."""
    codec = exact_codec("turbo3", head_dim)
    runs = codec.state["key_widths"].shape[1]
    widths = [[8, 7, 6, 2, 1, 1, 0, 0], [7, 4, 3, 3, 1, 1, 0, 0]]
    state = {
        f"{kind}_widths": torch.tensor([widths[(first + index) % 2][:runs] for index in range(2)])
        for first, kind in enumerate(("key", "value"))
    }
    codec = TurboCodec(codec.config, codec.geometry, codec.state | state)
    tokens = exact_tokens(codec, random_tokens(codec))
    packed, _, _ = encode(tokens, codec, device, layer)
    assert_equal(packed, codec.encode(layer, tokens.keys, tokens.values))
    names = {slab.name: slab.bits for kind in ("key", "value") for slab in codec.field_slabs(layer, kind)}
    assert packed.keys() == names.keys()
    assert set(names.values()) == {8, 4, 2, 1}


@on_devices("length", cpu=[0, 1, 17, 63, 64], gpu=[0, *LENGTHS])
def test_lengths(device: str, length: int) -> None:
    codec = codec_of("turbo3", 32)
    tokens = random_tokens(codec, length=length)
    packed, protected, rows = encode(tokens, codec, device)
    assert protected == {}
    if length:
        assert_same_codes(packed, tokens, codec)
        assert_same_residuals(rows, packed, tokens, codec)
    else:
        assert_equal(packed, in_pytorch(tokens, codec)[0])
        assert all((x == 0).all() for x in rows.values())


@on_devices(cpu=["turbo3", "paper"], gpu=PRESETS, names="preset")
def test_order_counts_and_protected_tokens(device: str, preset: str) -> None:
    codec = codec_of(preset, 16)
    tokens = ragged_tokens(codec)
    packed, protected, rows = encode(tokens, codec, device)
    assert_same_codes(packed, tokens, codec)
    _, expected = in_pytorch(tokens, codec)
    assert protected.keys() == expected.keys()
    for name, x in expected.items():
        assert protected[name].dtype == torch.bfloat16
        torch.testing.assert_close(protected[name].float(), x, rtol=BFLOAT16, atol=1e-5)
    if isinstance(codec, TurboCodec):
        assert_same_residuals(rows, packed, tokens, codec)
        # The third row keeps a single token, the first all but two.
        everything = replace(tokens, counts=None, protected=None)
        other = encode(everything, codec, device)[2]
        assert all((rows[name][row] != other[name][row]).any() for name in rows for row in range(3))


@on_devices("length", cpu=[70], gpu=[1, 63, 64, 70, 1000])
def test_rows_that_begin_inside_a_block(device: str, length: int) -> None:
    """Keys are relative to the block of their column, protected ones to the first block."""
    codec = codec_of("turbo2", 32)
    tokens = ragged_tokens(codec, length=length)
    tokens = replace(tokens, start=torch.tensor([5, 64, 191]))
    packed, protected, _ = encode(tokens, codec, device, summarize=False)
    assert_same_codes(packed, tokens, codec)
    elsewhere = ordinals(codec, in_pytorch(replace(tokens, start=None), codec)[0])
    key_differs, value_differs = (elsewhere != ordinals(codec, packed)).float().mean(dim=(1, 2, 3, 4))
    assert key_differs > 0.1
    assert value_differs < 1e-3
    for name, x in in_pytorch(tokens, codec)[1].items():
        torch.testing.assert_close(protected[name].float(), x, rtol=BFLOAT16, atol=1e-5)


@on_devices(cpu=[64], gpu=[1, 3, 64], names="slots")
def test_up_to_the_maximum_of_protected_tokens(device: str, slots: int) -> None:
    codec = exact_codec("turbo1", 16)
    tokens = exact_tokens(codec, random_tokens(codec))
    tokens = replace(tokens, protected=torch.randperm(70, generator=torch.Generator().manual_seed(0))[None, :slots])
    packed, protected, rows = encode(tokens, codec, device)
    expected, expected_protected = in_pytorch(tokens, codec)
    assert_equal(packed, expected)
    assert_equal(protected, to_bfloat16(expected_protected, device))
    assert_same_residuals(rows, packed, tokens, codec)


@on_devices("programs", cpu=[1, 12], gpu=[1, 12, 100, 5000])
def test_any_number_of_programs(device: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program processes all tiles of a row, or several do and the last one sums their residuals."""
    monkeypatch.setattr(triton_encode, "DEFAULT_TUNING", replace(triton_encode.DEFAULT_TUNING, programs=programs))
    codec = codec_of("turbo3", 16)
    tokens = random_tokens(codec, length=200 if device == "cpu" else 2500)
    packed, _, rows = encode(tokens, codec, device)
    assert_same_codes(packed, tokens, codec)
    assert_same_residuals(rows, packed, tokens, codec)


@on_devices()
def test_counters_are_reusable(device: str) -> None:
    codec = codec_of("turbo3", 16)
    counters = triton_encode.new_counters(2, 1, codec.geometry.num_heads, torch.device(device))
    first = encode(random_tokens(codec, length=130), codec, device, counters=counters[1])
    assert (counters == 0).all()
    again = encode(random_tokens(codec, length=130), codec, device, counters=counters[1])
    for one, other in zip(first, again, strict=True):
        assert_equal(one, other)
    assert_equal(encode(random_tokens(codec, length=130), codec, device)[2], first[2])


ODD_NUMBERS = [float("nan"), float("inf"), float("-inf"), 60000.0, -60000.0]


@on_devices(
    "preset, dtype",
    cpu=[("turbo3", "float16"), ("paper", "float32")],
    gpu=itertools.product(PRESETS, DTYPES),
)
def test_nan_and_infinity(device: str, preset: str, dtype: str) -> None:
    """NaN and infinities get the codes that PyTorch gives them, and affect no other token."""
    codec = codec_of(preset, 32)
    tokens = ragged_tokens(codec, dtype=DTYPES[dtype])
    # Rows in different blocks: the first block's angles (sine 0) turn infinities into NaN.
    tokens = replace(tokens, start=torch.tensor([0, 60, 128]))
    clean, _, clean_rows = encode(tokens, codec, device)
    keys, values = tokens.keys.clone(), tokens.values.clone()
    spoilt = torch.zeros(3, 70).bool()
    for row, (index, number) in itertools.product(range(3), enumerate(ODD_NUMBERS)):
        # Of the ordered tokens from 40 on, only the first row keeps any.
        token = tokens.order[row, 40 + 3 * index]
        keys[row, :, token, 3 + index] = number
        values[row, :, token, 9 - index] = number
        spoilt[row, 40 + 3 * index] = True
    # Two infinities in one key, so that some component is their difference.
    keys[1, :, tokens.order[1, 43], 20] = float("inf")
    odd = replace(tokens, keys=keys, values=values)
    packed, _, rows = encode(odd, codec, device)
    found, expected = ordinals(codec, packed), ordinals(codec, in_pytorch(odd, codec)[0])
    where = spoilt[None, :, None, :, None].expand_as(found)
    assert torch.equal(found[where], expected[where])
    assert torch.equal(found[~where], ordinals(codec, clean)[~where])
    # Rows that do not keep the spoilt tokens have unchanged means.
    for name, mean in rows.items():
        assert torch.equal(mean[1:], clean_rows[name][1:])
        assert torch.isfinite(mean[1:]).all()


@on_devices(
    "scale, dtype",
    cpu=[(1e-30, "float32"), (1e30, "float32"), (1e4, "float16")],
    gpu=[*itertools.product((1e-30, 1e30), ("float32", "bfloat16")), (1e4, "float16"), (1e-7, "float16")],
)
@pytest.mark.parametrize("preset", ["turbo3", "paper"])
def test_numbers_of_any_size(device: str, scale: float, dtype: str, preset: str) -> None:
    """Tiny numbers get the codes of zero, huge ones the lowest or the highest."""
    codec = codec_of(preset, 32)
    tokens = random_tokens(codec)
    tokens = replace(tokens, **{name: (getattr(tokens, name) * scale).to(DTYPES[dtype]) for name in ("keys", "values")})
    assert torch.isfinite(tokens.keys).all()
    packed, _, _ = encode(tokens, codec, device)
    assert_same_codes(packed, tokens, codec)


@on_devices(
    cpu=[("turbo3", "float32"), ("paper", "float16")], gpu=itertools.product(PRESETS, DTYPES), names="preset, dtype"
)
def test_memory_that_was_used_before(device: str, preset: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the previous contents of outputs and scratch."""
    codec = codec_of(preset, 32)
    tokens = ragged_tokens(codec, length=75, dtype=DTYPES[dtype])
    clean = encode(tokens, codec, device)
    empty = torch.empty

    def filled(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: filled(empty(*args, **kwargs)))
    again = encode(tokens, codec, device)
    monkeypatch.undo()
    for one, other in zip(clean, again, strict=True):
        assert_equal(other, one)


@on_devices(cpu=["turbo3"], gpu=["turbo3", "paper"], names="preset")
def test_strides_of_any_kind(device: str, preset: str) -> None:
    """Slices of larger tensors, components that are not contiguous, and tensors contiguous by head."""
    codec = codec_of(preset, 16)
    tokens = random_tokens(codec)
    expected = encode(tokens, codec, device)

    def within(x: Tensor) -> Tensor:
        larger = torch.full([size + 3 for size in x.shape], float("nan"), device=x.device)
        return larger[1:-2, 1:-2, 2:-1, 1:-2].copy_(x)

    def scattered(x: Tensor) -> Tensor:
        return x.transpose(1, 3).contiguous().transpose(1, 3)

    for keys_like, values_like in ((within, scattered), (scattered, Tensor.contiguous)):
        keys, values = keys_like(tokens.keys.to(device)), values_like(tokens.values.to(device))
        found = encode(replace(tokens, keys=keys, values=values), codec, device)
        for one, other in zip(expected, found, strict=True):
            assert_equal(other, one)


def new_cache(codec: KVCodec, device: str) -> TurboKVCache:
    geometry = codec.geometry
    return TurboKVCache(codec.config, geometry, np.zeros((1 + 4 * geometry.num_layers, 17), np.float32), codec, device)


def cache_codec(preset: str, head_dim: int) -> KVCodec:
    """A preset's codec, except that its cache protects special tokens."""
    codec = codec_of(preset, head_dim)
    return type(codec)(replace(codec.config, protect_special_tokens=True), codec.geometry, codec.state)


def add(cache: TurboKVCache, ids: Tensor, keep: Tensor, backend: KVBackend, seed: int) -> None:
    """Appends tokens with random keys and values, different ones in each layer."""
    append = cache.plan_append(ids.to(cache.device), keep.to(cache.device), None, [CLS, EOS])
    for layer_idx in range(cache.geometry.num_layers):
        tokens = random_tokens(cache.codec, batch=len(ids), length=ids.shape[1], seed=seed + layer_idx)
        cache.stage(append, layer_idx, tokens.keys.to(cache.device), tokens.values.to(cache.device), backend)
    cache.commit(append)


@on_devices(cpu=["turbo3", "paper"], gpu=PRESETS, names="preset")
def test_a_cache_written_by_each_backend(device: str, preset: str) -> None:
    """A prefill of two rows of unequal lengths, then tokens that some rows do not keep."""
    codec = cache_codec(preset, 16)
    ids = torch.full((2, 68), RESIDUE)
    ids[:, 0] = CLS
    ids[1, 40] = EOS
    keep = torch.arange(68) < torch.tensor([[68], [41]])
    caches = []
    for backend in (TritonBackend(), TorchBackend()):
        cache = new_cache(codec, device)
        add(cache, ids, keep, backend, 0)
        more = torch.tensor([[RESIDUE, EOS, RESIDUE], [RESIDUE] * 3])
        add(cache, more, torch.tensor([[True, True, False], [False, True, True]]), backend, 10)
        caches.append(cache)
    by_kernel, plain = caches
    assert by_kernel.lengths.tolist() == [70, 43]
    assert torch.equal(by_kernel.protected_columns, plain.protected_columns)
    there = plain.valid().cpu()[:, None, :, None]
    for layer_idx, (one, other) in enumerate(zip(by_kernel.layers, plain.layers, strict=True)):
        codes = [
            ordinals(codec, {name: x.cpu() for name, x in layer.packed.items()}, layer_idx) for layer in (one, other)
        ]
        differing = (codes[0] != codes[1]) & there
        assert int(differing.sum()) <= max(1, differing.numel() // 10_000)
        assert ((codes[0] - codes[1]).abs() * there <= 1).all()
        used = (plain.protected_columns >= 0)[:, None, :, None]
        assert one.protected.keys() == other.protected.keys() == {"keys", "values"}
        for name, x in other.protected.items():
            torch.testing.assert_close(one.protected[name] * used, x * used, rtol=BFLOAT16, atol=1e-5)
        assert one.rows.keys() == other.rows.keys()
        for name, x in other.rows.items():
            # One code on the other side of a boundary moves a mean over 41 tokens by a 41st of a step.
            atol = 1e-5 if not differing.any() else 0.1
            torch.testing.assert_close(one.rows[name], x, rtol=BFLOAT16, atol=atol)


def no_kernel(*args: object, **kwargs: object) -> None:
    raise AssertionError("the kernel was called")


WITHOUT_KERNEL: dict[str, Callable[[], KVCodec]] = {
    "another codec": lambda: ExactCodec(TurboConfig.from_preset("exact"), Geometry(2, 2, 16), {}),
    "fields of three bits": lambda: fitted(TurboConfig(bits=2), _statistics(16)),
    "a head of 136": lambda: codec_of("paper", 136),
}


@pytest.mark.parametrize("codec", WITHOUT_KERNEL.values(), ids=WITHOUT_KERNEL)
def test_layers_without_a_kernel(codec: Callable[[], KVCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are encoded by PyTorch, also in a cache."""
    made = codec()
    assert not triton_encode.can_run(made, LAYER)
    monkeypatch.setattr(triton_encode, "encode_packed", no_kernel)
    tokens = random_tokens(made, length=3)
    expected = torch_ops.encode(made, LAYER, tokens.keys, tokens.values)
    for ours, theirs in zip(encode(tokens, made, "cpu"), expected, strict=True):
        assert_equal(ours, theirs)
    caches = [new_cache(made, "cpu") for _ in range(2)]
    for cache, backend in zip(caches, (TritonBackend(), TorchBackend()), strict=True):
        add(cache, torch.full((1, 3), RESIDUE), torch.ones(1, 3).bool(), backend, 0)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert_equal(one.packed, other.packed)


def test_more_protected_tokens_than_a_tile_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = cache_codec("turbo3", 16)
    monkeypatch.setattr(triton_encode, "encode_packed", no_kernel)
    cache = new_cache(codec, "cpu")
    ids, keep = torch.full((1, 70), RESIDUE), torch.ones(1, 70).bool()
    ids[0, :65] = CLS
    add(cache, ids, keep, TritonBackend(), 0)
    assert cache.protected_columns.shape == (1, 65)
    ids[0, 64] = RESIDUE
    with pytest.raises(AssertionError, match="the kernel was called"):
        add(new_cache(codec, "cpu"), ids, keep, TritonBackend(), 0)


def test_keys_and_values_of_different_shapes() -> None:
    codec = cache_codec("turbo3", 16)
    tokens = random_tokens(codec)
    with pytest.raises(ValueError, match="keys and values must have one shape"):
        encode(replace(tokens, values=tokens.values[:, :, 1:]), codec, "cpu")


def test_a_start_needs_the_number_of_columns() -> None:
    codec = codec_of("turbo3", 16)
    tokens = random_tokens(codec, length=3)
    with pytest.raises(ValueError, match="`columns` must be given"):
        triton_encode.encode(codec, LAYER, tokens.keys, tokens.values, start=torch.tensor([5]))


@on_devices("preset", cpu=["turbo1", "paper"], gpu=["turbo3", "paper"])
def test_opcheck(device: str, preset: str) -> None:
    codec = codec_of(preset, 16)
    # Slabs without padding between them, whose contents would differ between runs.
    tokens = replace(random_tokens(codec, length=64), protected=torch.tensor([[0, -1]]))
    counters = triton_encode.new_counters(1, 1, 2, torch.device(device))[0]
    with RecordedCalls("encode_packed") as recorded:
        encode(tokens, codec, device, counters=counters)
    [arguments] = recorded.calls
    checks = torch.library.opcheck(torch.ops.esm_turbo.encode_packed.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


class _Layer(torch.nn.Module):
    """Projections before the encoding and after it, so that there is something to compile on both sides."""

    def __init__(self, codec: KVCodec, tokens: Tokens, device: str) -> None:
        super().__init__()
        self.codec = codec
        self.protected = None if tokens.protected is None else tokens.protected.to(device)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, codec.geometry.head_dim, device=device))

    def forward(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        outputs = triton_encode.encode(
            self.codec, LAYER, keys * self.scale, values * self.scale, protected=self.protected
        )
        return [x.float() * 2 for tensors in outputs for x in tensors.values()]


@on_devices("preset", cpu=["turbo1"], gpu=["turbo3", "paper"])
@torch.no_grad()
def test_compiles_as_one_graph(device: str, preset: str) -> None:
    codec = codec_of(preset, 16)
    tokens = replace(random_tokens(codec, length=65), protected=torch.tensor([[0, -1]]))
    keys, values = tokens.keys.to(device), tokens.values.to(device)
    layer = _Layer(codec, tokens, device)
    expected = layer(keys, values)
    torch._dynamo.reset()
    # Without a GPU only the graph is captured: compiling it for a CPU takes half a minute.
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for found, x in zip(compiled(keys, values), expected, strict=True):
        assert torch.equal(found, x)
