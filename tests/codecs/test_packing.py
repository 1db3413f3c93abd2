"""Packing and quantisation: literal bytes, round trips, and equality with the slow twins, bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo.codecs import packing
from tests.helpers import reference

ALL_BITS = range(1, 9)

GOLDEN = {
    "1 bit": (1, [1, 0, 0, 0, 0, 1, 0, 1], [0b10100001]),
    "2 bits": (2, [1, 2, 3, 0, 3, 3, 0, 2], [0b00111001, 0b10001111]),
    "3 bits": (3, [0, 1, 2, 3, 4, 5, 6, 7], [0b10001000, 0b11000110, 0b11111010]),
    "4 bits": (4, [0, 1, 2, 3, 4, 5, 14, 15], [0x10, 0x32, 0x54, 0xFE]),
    "5 bits": (5, [1, 1, 1, 1, 1, 1, 1, 1], [0x21, 0x84, 0x10, 0x42, 0x08]),
    "5 bits, ends": (5, [31, 0, 0, 0, 0, 0, 0, 16], [0x1F, 0, 0, 0, 0x80]),
    "6 bits": (6, [1, 2, 3, 4, 63, 0, 0, 63], [0x81, 0x30, 0x10, 0x3F, 0x00, 0xFC]),
    "7 bits": (7, [127, 0, 0, 0, 1, 0, 0, 127], [0x7F, 0, 0, 0x10, 0, 0, 0xFE]),
    "8 bits": (8, [0, 1, 2, 127, 128, 200, 254, 255], [0, 1, 2, 127, 128, 200, 254, 255]),
}


def random_codes(shape, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


@st.composite
def codes_and_bits(draw):
    bits = draw(st.integers(1, 8))
    lead = draw(st.lists(st.integers(0, 3), max_size=3))
    groups = draw(st.integers(0, 4))
    shape = (*lead, 8 * groups)
    size = math.prod(shape)
    values = draw(st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.uint8).reshape(shape), bits


@pytest.mark.parametrize(("bits", "codes", "expected"), GOLDEN.values(), ids=GOLDEN.keys())
@pytest.mark.parametrize("module", [packing, reference], ids=["fast", "reference"])
def test_literal_bytes(module, bits, codes, expected):
    codes, expected = (torch.tensor(values, dtype=torch.uint8) for values in (codes, expected))
    assert torch.equal(module.pack_codes(codes, bits), expected)
    assert torch.equal(module.unpack_codes(expected, bits), codes)


@settings(deadline=None, max_examples=100)
@given(codes_and_bits())
def test_round_trip_and_reference(case):
    codes, bits = case
    packed = packing.pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*codes.shape[:-1], codes.shape[-1] // 8 * bits)
    assert torch.equal(packed, reference.pack_codes(codes, bits))
    assert torch.equal(packing.unpack_codes(packed, bits), codes)
    assert torch.equal(reference.unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_codes_out_of_range_keep_their_low_bits(bits, dtype):
    codes = torch.tensor([0, -1, 2**bits, -(2**bits) + 1, 1, 127, -128, 3]).to(dtype)
    expected = reference.pack_codes((codes.to(torch.int64) % 2**bits).to(torch.uint8), bits)
    assert torch.equal(packing.pack_codes(codes, bits), expected)
    assert torch.equal(reference.pack_codes(codes, bits), expected)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_any_strides(bits):
    codes = random_codes((3, 24, 5), bits).transpose(1, 2)
    packed = packing.pack_codes(codes, bits)
    assert torch.equal(packed, reference.pack_codes(codes.contiguous(), bits))
    odd_offset = torch.cat([torch.zeros(1, dtype=torch.uint8), packed.flatten()])[1:].view(packed.shape)
    assert odd_offset.storage_offset() == 1
    assert torch.equal(packing.unpack_codes(odd_offset, bits), codes)
    swapped = packed.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(packing.unpack_codes(swapped, bits), codes)
    lonely = torch.zeros(64, dtype=torch.uint8).as_strided((1, 8), (3, 1), 1)
    assert torch.equal(packing.pack_codes(lonely, bits), torch.zeros(1, bits, dtype=torch.uint8))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("shape", [(5, 8), (5, 16)], ids=str)
def test_results_own_exactly_their_memory(bits, shape):
    codes = random_codes(shape, bits)
    kept = codes.clone()
    packed = packing.pack_codes(codes, bits)
    unpacked = packing.unpack_codes(packed, bits)
    for result in (packed, unpacked):
        assert result.is_contiguous()
        assert result.untyped_storage().nbytes() == result.numel()
    unpacked.zero_()
    packed.zero_()
    assert torch.equal(codes, kept)


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5])
def test_bits_out_of_range(bits):
    for call in (packing.pack_codes, packing.unpack_codes):
        with pytest.raises(ValueError, match="`bits` must be one of 1 to 8"):
            call(torch.zeros(8, dtype=torch.uint8), bits)


@pytest.mark.parametrize(
    ("call", "shape", "dtype", "bits", "message"),
    [
        (packing.pack_codes, (2, 12), torch.uint8, 4, "multiple of 8"),
        (packing.pack_codes, (), torch.uint8, 4, "multiple of 8"),
        (packing.unpack_codes, (2, 8), torch.uint8, 3, "multiple of `bits` = 3"),
        (packing.unpack_codes, (), torch.uint8, 1, "multiple of `bits` = 1"),
        *((packing.pack_codes, (8,), dtype, 4, "integer") for dtype in (torch.float32, torch.bool, torch.complex64)),
        (packing.unpack_codes, (8,), torch.int32, 4, "uint8"),
    ],
)
def test_bad_tensors(call, shape, dtype, bits, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(shape, dtype=dtype), bits)


@pytest.mark.parametrize("module", [packing, reference], ids=["fast", "reference"])
def test_ties_nan_and_infinity(module):
    boundaries = torch.tensor([-1.0, 0.0, 2.0])
    below = torch.nextafter(boundaries, torch.tensor(-math.inf))
    above = torch.nextafter(boundaries, torch.tensor(math.inf))
    assert module.quantize(below, boundaries).tolist() == [0, 1, 2]
    assert module.quantize(boundaries, boundaries).tolist() == [0, 1, 2]
    assert module.quantize(above, boundaries).tolist() == [1, 2, 3]
    odd = torch.tensor([math.nan, -math.inf, math.inf, -0.0])
    assert module.quantize(odd, boundaries).tolist() == [0, 0, 3, 1]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(width=32), min_size=24, max_size=24),
    st.lists(st.floats(width=32, allow_nan=False), min_size=24, max_size=24),
)
def test_quantize_equals_reference_on_any_floats(values, thresholds):
    x = torch.tensor(values, dtype=torch.float32).view(1, 2, 3, 4)
    shared = torch.tensor(thresholds[:5], dtype=torch.float32).sort().values
    per_head = torch.tensor(thresholds[:6], dtype=torch.float32).view(2, 3).sort().values
    per_component = torch.tensor(thresholds, dtype=torch.float32).view(2, 4, 3).sort().values
    for boundaries in (shared, per_head, per_head[:1], per_component, per_component[:1]):
        assert torch.equal(packing.quantize(x, boundaries), reference.quantize(x, boundaries))


@pytest.mark.parametrize("levels", [1, 2, 8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_equals_reference(levels, dtype):
    generator = torch.Generator().manual_seed(levels)
    x = torch.randn(2, 3, 17, 24, generator=generator).to(dtype)
    for shape in ((levels - 1,), (3, levels - 1), (3, 24, levels - 1)):
        boundaries = torch.randn(shape, generator=generator).sort().values
        codes = packing.quantize(x, boundaries)
        assert codes.dtype == torch.uint8
        assert codes.shape == x.shape
        assert torch.equal(codes, reference.quantize(x, boundaries))
    assert levels == 1 or codes.max() > 0


def test_boundaries_are_not_rounded_to_the_dtype_of_x():
    # 1 + 2^-12 is 1 in bfloat16; compared there, x = 1 would be a tie with the next code still below it.
    x = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    just_above, just_below = torch.tensor([1.0 + 2.0**-12]), torch.tensor([1.0 - 2.0**-12])
    assert packing.quantize(x, just_above).tolist() == [0, 1]
    assert packing.quantize(x, just_below).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("x", "boundaries", "message"),
    [
        ((1, 2, 5, 4), (3, 7), "heads"),
        ((1, 2, 5, 4), (2, 3, 7), "components"),
        ((2, 4), (2, 7), "heads"),
        ((1, 2, 5, 4), (), "`boundaries` must be"),
        ((1, 2, 5, 4), (1, 2, 4, 7), "`boundaries` must be"),
        ((1, 2, 5, 4), (256,), "at most 256 levels"),
    ],
)
def test_quantize_bad_shapes(x, boundaries, message):
    with pytest.raises(ValueError, match=message):
        packing.quantize(torch.zeros(x), torch.zeros(boundaries))
    with pytest.raises(ValueError, match="floating point"):
        packing.quantize(torch.zeros(x, dtype=torch.int64), torch.zeros(7))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nothing_depends_on_values(bits):
    # The meta device has no values to wait for, so a hidden synchronisation fails here.
    codes = torch.zeros(2, 3, 16, dtype=torch.uint8, device="meta")
    assert packing.unpack_codes(packing.pack_codes(codes, bits), bits).shape == codes.shape
    boundaries = torch.zeros(3, 7, device="meta")
    assert packing.quantize(torch.zeros(1, 3, 2, 4, device="meta"), boundaries).shape == (1, 3, 2, 4)
