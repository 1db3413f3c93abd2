"""The turbo codec: its bytes as docs/format.md says, its widths against enumeration, and what its maps keep."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from esm_turbo import Calibration, TurboConfig
from esm_turbo.codecs import TurboCodec
from esm_turbo.codecs.fitting.lloyd_max import gaussian_uniform, uniform_quantizer
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.codecs.fitting.transforms import component_variances, query_aware
from esm_turbo.codecs.turbo import _MAX_OPERAND_COLUMNS, _allocate_bits, slabs
from esm_turbo.config import Geometry
from tests.helpers.codec_samples import (
    HEADS,
    LAYERS,
    assert_same_state,
    correlated,
    fitted,
    mapped_query,
    rotated,
    statistics_of,
)

PAPER = TurboConfig()
TURBO = {bits: TurboConfig(codec="turbo", mean_bits=bits) for bits in (1, 2, 3, 4)}
HEAD_DIMS = (16, 24, 32, 64, 128)
RUN_SIZES = {16: 8, 24: 8, 32: 8, 64: 8, 72: 8, 128: 16}
DISTORTIONS = [1.0, *(gaussian_uniform(2**width).distortion for width in range(1, 9))]
all_bits = pytest.mark.parametrize("bits", TURBO)
all_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def read_widths(codec, layer, kind):
    return codec.state[f"{kind}_widths"][layer].tolist()


def fields_slowly(widths, size):
    """Slabs as docs/format.md says: for each the bits of a field, and each field's component and lowest bit."""
    found = []
    for bits in (8, 4, 2, 1):
        runs = [run for run, width in enumerate(widths) if width // bits % 2 == 1]
        for length in (16, 8, 4, 2, 1):
            if len(runs) // length % 2 == 1:
                taken = [run for run in runs[:length] for _ in range(size)]
                fields = [(run * size + i % size, widths[run] % bits) for i, run in enumerate(taken)]
                found.append((bits, fields))
                runs = runs[length:]
        assert not runs
    return found


def read_slowly(widths, size, slabs_of_token, kind):
    """Components of one token and head, in steps, from its bytes by name; a slab that is missing was dropped."""
    components = [0.0] * (len(widths) * size)
    for index, (bits, fields) in enumerate(fields_slowly(widths, size)):
        stored = slabs_of_token.get(f"{kind}_{index}")
        if stored is None:
            continue
        assert 8 * len(stored) == bits * len(fields)
        string = [byte >> i & 1 for byte in stored for i in range(8)]
        for number, (component, lowest) in enumerate(fields):
            field = sum(string[bits * number + i] << i for i in range(bits))
            components[component] += (field - (2**bits - 1) / 2) * 2**lowest
    return components


def assert_reads_slowly(codec, layer, packed, kind, x_hat):
    widths = read_widths(codec, layer, kind)
    size = codec.geometry.head_dim // len(widths)
    for index in np.ndindex(*x_hat.shape[:3]):
        token = {name: tensor[index].tolist() for name, tensor in packed.items() if name.startswith(f"{kind}_")}
        assert x_hat[index].tolist() == read_slowly(widths, size, token, kind)


def literal_codec(key_widths, value_widths, heads=1, head_dim=None, bits=3):
    """A codec of one layer whose maps are the identity."""
    head_dim = 8 * len(key_widths) if head_dim is None else head_dim
    identity, zero = torch.eye(head_dim).expand(1, heads, -1, -1), torch.zeros(1, heads, head_dim)
    state = {"inv_freq": torch.zeros(1, head_dim // 2)}
    for kind, widths in (("key", key_widths), ("value", value_widths)):
        state |= {f"{kind}_map": identity, f"{kind}_inverse": identity, f"{kind}_mean": zero}
        state |= {f"{kind}_widths": torch.tensor([widths]), f"{kind}_steps": torch.ones(1, head_dim)}
    return TurboCodec(TURBO[bits], Geometry(1, heads, head_dim), state)


# Every number below was worked out by hand from docs/format.md, where the same example stands.
GOLDEN_KEY_WIDTHS, GOLDEN_VALUE_WIDTHS = [8, 7, 3, 1], [4, 2, 0, 0]
GOLDEN_KEYS = [
    [-200.0, -127.0, -126.9, -0.5, 0.0, 0.25, 1.0, 500.0],
    [math.nan, -62.5, 0.5, math.inf, 21.5, -21.5, -48.5, 48.5],
    [9.0, 2.5, 1.5, 0.5, -0.5, -1.5, -2.5, -9.0],
    [-1.0, 1.0, 0.0, 0.1, -0.1, -0.0, math.inf, -math.inf],
]
GOLDEN_KEY_CODES = [
    [0, 0, 1, 127, 127, 128, 128, 255],
    [0, 1, 64, 127, 85, 42, 15, 112],
    [7, 6, 5, 4, 3, 2, 1, 0],
    [0, 1, 0, 1, 0, 0, 1, 0],
]
GOLDEN_VALUES = [
    [-7.5, -6.5, -5.5, -4.5, -3.5, -2.5, -1.5, -0.5],
    [-1.5, -0.5, 0.5, 1.5, 1.5, 0.5, -0.5, -1.5],
    [3.0, -3.0, 0.5, -0.5, 1e9, -1e9, math.nan, 0.0],
    [0.0] * 8,
]
GOLDEN_VALUE_CODES = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 3, 2, 1, 0], [0] * 8, [0] * 8]
GOLDEN_BYTES = {
    "key_0": "00 00 01 7f 7f 80 80 ff",
    "key_1": "00 f8 5a e1",
    "key_2": "c0 36 af 05",
    "key_3": "5a 55",
    "key_4": "4a",
    "value_0": "10 32 54 76",
    "value_1": "e4 1b",
}


def golden():
    codec = literal_codec(GOLDEN_KEY_WIDTHS, GOLDEN_VALUE_WIDTHS)
    x, y = (torch.tensor(rows).view(1, 1, 1, 32) for rows in (GOLDEN_KEYS, GOLDEN_VALUES))
    return codec, codec.quantize(0, x, y)


def test_golden_bytes():
    _, packed = golden()
    assert {name: bytes(tensor.flatten().tolist()).hex(" ") for name, tensor in packed.items()} == GOLDEN_BYTES
    assert {tensor.dtype for tensor in packed.values()} == {torch.uint8}
    assert {tensor.shape[:3] for tensor in packed.values()} == {(1, 1, 1)}


def test_golden_bytes_are_those_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "notes" / "format_example.md").read_text(encoding="utf-8")
    for name, stored in GOLDEN_BYTES.items():
        assert f"`{name}`" in text
        assert f"`{stored}`" in text


def test_golden_components():
    codec, packed = golden()
    for kind, widths, codes in (
        ("key", GOLDEN_KEY_WIDTHS, GOLDEN_KEY_CODES),
        ("value", GOLDEN_VALUE_WIDTHS, GOLDEN_VALUE_CODES),
    ):
        expected = [code - (2**width - 1) / 2 for width, run in zip(widths, codes, strict=True) for code in run]
        read = codec.unpack(0, kind, packed)
        assert read.flatten().tolist() == expected
        assert_reads_slowly(codec, 0, packed, kind, read)


def falling(size):
    return st.lists(st.integers(0, 8), min_size=size, max_size=size).map(lambda widths: sorted(widths, reverse=True))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9).flatmap(falling), st.sampled_from([8, 16]))
@example([8, 7, 3, 1], 8)
@example([7, 6, 6, 5, 5, 3, 0, 0], 8)
def test_slabs_hold_every_bit_of_every_code_once(widths, size):
    found = slabs(widths, size)
    expanded = [
        (slab.bits, [(component, shift) for start, stop, shift in slab.pieces for component in range(start, stop)])
        for slab in found
    ]
    assert expanded == fields_slowly(widths, size)
    bits = [0] * (len(widths) * size)
    for field_bits, fields in expanded:
        for component, shift in fields:
            field = 2**field_bits - 1 << shift
            assert not bits[component] & field
            bits[component] |= field
    assert bits == [2**width - 1 for width in widths for _ in range(size)]
    for slab in found:
        runs = slab.num_components // size
        assert runs & runs - 1 == 0
        assert slab.num_bytes * 8 == slab.num_components * slab.bits
        # Pieces are as long as they can be.
        for (_, stop, shift), (start, _, other) in itertools.pairwise(slab.pieces):
            assert stop < start or (stop == start and shift != other)
    assert [slab.bits for slab in found] == sorted([slab.bits for slab in found], reverse=True)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 8), st.lists(st.floats(width=32), min_size=8, max_size=8))
@example(8, [-127.0, -126.0, 0.0, -0.0, 126.0, 127.0, 128.0, -128.0])
@example(1, [0.0, -0.0, 1e-45, -1e-45, math.nan, math.inf, -math.inf, 3e38])
@example(3, [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -2.9999998])
def test_the_code_is_the_number_of_boundaries_below(width, numbers):
    codec = literal_codec([width, 0], [8, 0])
    x = torch.zeros(1, 1, 1, 16)
    x[0, 0, 0, :8] = torch.tensor(numbers)
    before = x.clone()
    packed = codec.quantize(0, x, torch.zeros_like(x))
    read = codec.unpack(0, "key", packed)[0, 0, 0, :8].tolist()
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))
    boundaries = range(-(2 ** (width - 1)) + 1, 2 ** (width - 1)) if width else ()
    levels = [code - (2**width - 1) / 2 for code in range(2**width)]
    for number, found in zip(numbers, read, strict=True):
        assert found == levels[sum(boundary < number for boundary in boundaries)]
        if math.isfinite(number):
            # Exact in float64: levels are halves.
            assert abs(found - number) == min(abs(level - number) for level in levels)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 8).flatmap(lambda runs: st.tuples(falling(runs), falling(runs))),
    st.integers(0, 2**31),
)
def test_any_widths_read_as_the_format_says(widths, seed):
    codec = literal_codec(*widths, heads=2)
    x = 100 * torch.randn(2, 1, 2, 3, codec.geometry.head_dim, generator=torch.Generator().manual_seed(seed)) ** 3
    packed = codec.quantize(0, *x)
    if not packed:
        assert widths == ([0] * len(widths[0]), [0] * len(widths[1]))
        return
    for kind in ("key", "value"):
        read = codec.unpack(0, kind, packed)
        assert_reads_slowly(codec, 0, packed, kind, read)
        slices = {name: tensor[:, :, 1:] for name, tensor in packed.items()}
        assert torch.equal(codec.unpack(0, kind, slices), read[:, :, 1:])


@settings(deadline=None, max_examples=150)
@given(
    st.integers(2, 7),
    # Half of a subnormal number may be zero, which is another code.
    st.lists(
        st.floats(-300, 300, width=32, allow_subnormal=False) | st.integers(-140, 140).map(float),
        min_size=8,
        max_size=8,
    ),
)
def test_dropping_the_one_bit_slabs_leaves_a_code_of_one_bit_less(width, numbers):
    """Of an odd width: the levels of the next smaller width, twice as far apart, the same rule at ties."""
    fine, coarse = literal_codec([width, 0], [8, 0]), literal_codec([width - width % 2, 0], [8, 0])
    x = torch.zeros(1, 1, 1, 16)
    x[0, 0, 0, :8] = torch.tensor(numbers)
    packed = fine.quantize(0, x, torch.zeros_like(x))
    last = max(name for name in packed if name.startswith("key"))
    assert fine.refinements(0) == [last] * (width % 2)
    read = fine.unpack(0, "key", {name: t for name, t in packed.items() if name not in fine.refinements(0)})
    scale = 1 + width % 2
    expected = scale * coarse.unpack(0, "key", coarse.quantize(0, x / scale, torch.zeros_like(x)))
    assert torch.equal(read, expected)
    assert ((read - fine.unpack(0, "key", packed)).abs()[..., :8] == 0.5 * (width % 2)).all()


def test_one_bit_slabs_alone_are_not_refinements():
    codec = literal_codec([1, 1], [3, 1])
    assert codec.refinements(0) == ["value_1"]
    assert literal_codec([1, 0], [1, 1]).refinements(0) == []
    assert literal_codec([8, 4], [6, 2]).refinements(0) == []


@pytest.fixture(scope="module")
def statistics():
    """Keys that are alike relative to their blocks, wherever they stand; queries and values of their own shapes."""
    made = {}
    for head_dim in HEAD_DIMS:
        rng = np.random.default_rng(head_dim)
        tokens = 400 + 6000 // head_dim
        positions = rng.integers(0, 1000, tokens)
        relative = correlated(rng, tokens, head_dim, decay=6 / head_dim)
        made[head_dim] = statistics_of(
            rotated(relative, positions // KEY_BLOCK * KEY_BLOCK),
            correlated(rng, tokens, head_dim, decay=2 / head_dim),
            queries=correlated(rng, tokens, head_dim, decay=3 / head_dim),
            positions=positions,
        )
    return made


@pytest.fixture(scope="module")
def codec_of(statistics):
    codecs = {}

    def codec_of(bits, head_dim):
        if (bits, head_dim) not in codecs:
            codecs[bits, head_dim] = fitted(TURBO[bits], statistics[head_dim])
        return codecs[bits, head_dim]

    return codec_of


def some_tokens(statistics, layer, tokens=9, seed=3):
    """Keys after RoPE, values and the columns where they stand: float32 [2, heads, tokens, head_dim], [2, tokens]."""
    keys, values = (torch.from_numpy(x[layer]) for x in (statistics.sample.keys, statistics.sample.values))
    picks = torch.randint(0, keys.shape[1], (2, tokens), generator=torch.Generator().manual_seed(seed))
    columns = torch.from_numpy(statistics.sample.positions)[picks]
    return keys[:, picks].transpose(0, 1), values[:, picks].transpose(0, 1), columns


@all_head_dims
@all_bits
def test_stores_its_mean_bits_exactly(statistics, codec_of, bits, head_dim):
    codec = codec_of(bits, head_dim)
    for layer in range(LAYERS):
        keys, values, columns = some_tokens(statistics[head_dim], layer)
        packed = codec.quantize(layer, *codec.transform(layer, keys, values, columns))
        assert {tensor.dtype for tensor in packed.values()} == {torch.uint8}
        sizes = {name: tensor.shape[-1] for name, tensor in packed.items()}
        assert 8 * sum(sizes.values()) / (2 * head_dim) == bits
        for kind in ("key", "value"):
            widths = read_widths(codec, layer, kind)
            assert len(widths) * RUN_SIZES[head_dim] == head_dim
            assert sum(widths) * RUN_SIZES[head_dim] == 8 * sum(n for name, n in sizes.items() if kind in name)
            assert widths == sorted(widths, reverse=True)
            assert 8 >= widths[0] > 0
        if head_dim >= 64:
            assert all(size % 4 == 0 for size in sizes.values())


def possible_widths(num_runs, size, kind):
    """Non-increasing widths, not all zero; in heads of 64 or more, of whole words and with few operand columns.

    A place is a component of a slab, or what a GPU adds to make 16 of them.
    """
    ways = []
    for widths in falling_widths(num_runs):
        found = fields_slowly(widths, size) if num_runs * size >= 64 else []
        whole = all(bits * len(fields) % 32 == 0 for bits, fields in found)
        columns = sum(max(16, len(fields)) for _, fields in found)
        if any(widths) and whole and columns <= _MAX_OPERAND_COLUMNS[kind] * num_runs * size:
            ways.append(widths)
    return np.array(ways)


def falling_widths(num_runs, most=8):
    if num_runs == 0:
        yield ()
        return
    for first in range(most + 1):
        for rest in falling_widths(num_runs - 1, first):
            yield (first, *rest)


def expected_errors(costs, widths):
    """Expected errors of runs [runs] with widths [ways, runs]."""
    return np.array(DISTORTIONS)[widths] @ costs


def costs_of(statistics):
    """What each run of keys and of values costs without bits, [layers, runs] each."""
    keys, values = statistics.sensitivity.keys, statistics.residues.values
    size = RUN_SIZES[statistics.geometry.head_dim]
    key_costs = component_variances(query_aware(keys.covariance, statistics.sensitivity.queries, 1e-3), keys.covariance)
    value_costs = component_variances(
        query_aware(values.covariance, statistics.output_gram, 1e-3, rotary_pairs=False), values.covariance
    )
    return [costs.sum(axis=1).reshape(LAYERS, -1, size).sum(axis=2) for costs in (key_costs, value_costs)]


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@all_bits
def test_no_other_bit_allocation_is_better(statistics, codec_of, bits, head_dim):
    """Against plain enumeration, layer by layer: two layers may have two profiles."""
    codec = codec_of(bits, head_dim)
    size = RUN_SIZES[head_dim]
    key_ways, value_ways = (possible_widths(head_dim // size, size, kind) for kind in ("key", "value"))
    key_bytes, value_bytes = (ways.sum(axis=1) * size // 8 for ways in (key_ways, value_ways))
    for layer, (key_costs, value_costs) in enumerate(zip(*costs_of(statistics[head_dim]), strict=True)):
        keys, values = expected_errors(key_costs, key_ways), expected_errors(value_costs, value_ways)
        least = np.inf
        for error, taken in zip(keys, key_bytes, strict=True):
            rest = values[value_bytes <= bits * head_dim // 4 - taken]
            least = min(least, error + rest.min(initial=np.inf))
        mine = [np.array(read_widths(codec, layer, kind)) for kind in ("key", "value")]
        assert (key_ways == mine[0]).all(axis=1).any()
        assert (value_ways == mine[1]).all(axis=1).any()
        error = expected_errors(key_costs, mine[0]) + expected_errors(value_costs, mine[1])
        assert error == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize(("head_dim", "layers"), [(64, 9), (24, 7), (128, 3), (16, 1)])
def test_layers_share_three_profiles(head_dim, layers):
    """The best three of what is best for some layer, by the sum of relative errors."""
    size = RUN_SIZES[head_dim]
    rng = np.random.default_rng(head_dim)
    decay = rng.uniform(0.5, 8, (2, layers, 1)) / head_dim
    key_costs, value_costs = np.exp(-decay * np.arange(head_dim)) * rng.uniform(0.5, 20, (2, layers, 1))
    own = [_allocate_bits(key_costs[i : i + 1], value_costs[i : i + 1], size, head_dim // 2) for i in range(layers)]
    keys, values = _allocate_bits(key_costs, value_costs, size, head_dim // 2)
    profiles = {tuple(np.concatenate(pair).tolist()) for pair in zip(keys, values, strict=True)}
    candidates = {tuple(np.concatenate(pair, axis=1)[0].tolist()) for pair in own}
    assert profiles <= candidates
    assert len(profiles) == min(3, len(candidates))

    def errors(pair):
        runs = [costs.reshape(layers, -1, size).sum(axis=2) for costs in (key_costs, value_costs)]
        widths = np.array(pair).reshape(2, -1)
        return sum(expected_errors(costs.T, width) for costs, width in zip(runs, widths, strict=True))

    table = {pair: errors(pair) for pair in candidates}
    best = np.min(list(table.values()), axis=0)
    least = min(
        np.min([table[pair] / best for pair in few], axis=0).sum()
        for few in itertools.combinations(candidates, min(3, len(candidates)))
    )
    mine = [table[tuple(np.concatenate(pair).tolist())][i] for i, pair in enumerate(zip(keys, values, strict=True))]
    assert (np.array(mine) / best).sum() == pytest.approx(least, rel=1e-9)
    if head_dim == 64:
        assert len(candidates) > 3


def test_layers_that_cost_nothing_have_widths():
    keys, values = _allocate_bits(np.zeros((2, 64)), np.zeros((2, 64)), 8, 32)
    assert (keys.sum(axis=1) + values.sum(axis=1) <= 32).all()
    assert keys.any(axis=1).all()
    assert values.any(axis=1).all()


@all_head_dims
def test_components_have_gaussian_distortion(statistics, codec_of, head_dim):
    """The data are Gaussian: times its step a component has unit size, and a width leaves the published share.

    All but the smallest components, which come last: those below the resolution of the sample are left small.
    """
    stats = statistics[head_dim]
    for bits in TURBO:
        codec = codec_of(bits, head_dim)
        for layer in range(LAYERS):
            keys, values = (torch.from_numpy(x[layer])[None] for x in (stats.sample.keys, stats.sample.values))
            mapped = codec.transform(layer, keys, values, torch.from_numpy(stats.sample.positions)[None])
            packed = codec.quantize(layer, *mapped)
            decoded = codec.unpack(layer, "key", packed), codec.unpack(layer, "value", packed)
            for kind, x, x_hat in zip(("key", "value"), mapped, decoded, strict=True):
                steps = codec.state[f"{kind}_steps"][layer]
                size = (x * steps).square().mean(dim=2)
                unit = (size > 0.99).all(dim=1)[0]
                assert unit.sum() >= head_dim // 2
                assert (unit.int().diff() <= 0).all()
                assert (size < 1.01).all()
                error = ((x - x_hat) * steps).square().mean(dim=(0, 1, 2))
                widths = codec.state[f"{kind}_widths"][layer].repeat_interleave(RUN_SIZES[head_dim])
                for width in widths[unit].unique().tolist():
                    # Steps are shared by heads and layers; a sample of a few thousand has no exact tails.
                    found = error[unit & (widths == width)].mean().item()
                    assert found == pytest.approx(DISTORTIONS[width], rel=0.35 if width > 4 else 0.12)


def pooled(mapped, weights, chosen):
    """Chosen components of every token, and their weights, over layers and heads."""
    parts, shares = [], []
    for x, w, components in zip(mapped, weights, chosen, strict=True):
        parts.append(x[:, :, components].ravel())
        shares.append(np.repeat((w / w.mean(axis=1, keepdims=True)).ravel(), components.sum()))
    return np.concatenate(parts), np.concatenate(shares)


@all_bits
def test_steps_are_those_of_all_components_of_a_width(statistics, codec_of, bits):
    """Whole samples, sorted for each width of each preset."""
    state, sample = codec_of(bits, 64).state, statistics[64].sample
    keys = rotated(sample.keys.astype(np.float64), -(sample.positions // KEY_BLOCK) * KEY_BLOCK)
    vectors = {"key": (keys, sample.key_weights), "value": (sample.values, sample.value_weights)}
    for kind, (x, weights) in vectors.items():
        centred = x - state[f"{kind}_mean"].double().numpy()[:, :, None]
        mapped = np.einsum("lhij,lhtj->lhti", state[f"{kind}_map"].double().numpy(), centred)
        widths = np.repeat(state[f"{kind}_widths"].numpy(), RUN_SIZES[64], axis=1)
        for width in set(widths.flat) - {0}:
            components, shares = pooled(mapped, weights, widths == width)
            expected = uniform_quantizer(components, 2 ** int(width), shares).step
            # The fit's map has more digits than the state's.
            np.testing.assert_allclose(state[f"{kind}_steps"].numpy()[widths == width], expected, rtol=1e-5)


def test_presets_share_their_maps(codec_of):
    """So that a calibration stores them once."""
    first, *others = (codec_of(bits, 64).state for bits in TURBO)
    for other in others:
        for name in ("key_map", "key_inverse", "key_mean", "value_map", "value_inverse", "value_mean", "inv_freq"):
            assert torch.equal(first[name], other[name])


def test_presets_fitted_together_are_those_fitted_alone(statistics):
    configs = [*TURBO.values(), dataclasses.replace(TURBO[3], protect_special_tokens=True)]
    for config, together in zip(configs, TurboCodec.fit_all(configs, statistics[64]), strict=True):
        alone = TurboCodec.fit(config, statistics[64])
        assert together.keys() == alone.keys()
        for name, tensor in alone.items():
            # Sums of the sorted sample differ by rounding.
            torch.testing.assert_close(together[name], tensor, rtol=1e-6 if "steps" in name else 0, atol=0)


@all_head_dims
@pytest.mark.parametrize("layer", range(LAYERS))
def test_keeps_scores_block_by_block(statistics, codec_of, head_dim, layer):
    codec = codec_of(3, head_dim)
    keys, values, columns = some_tokens(statistics[head_dim], layer, tokens=30)
    query = torch.randn(2, HEADS, 4, head_dim, generator=torch.Generator().manual_seed(6))
    stored, _ = codec.transform(layer, keys, values, columns)
    expected = query.double() @ keys.double().transpose(2, 3)
    sizes = query.norm(dim=-1)[..., None] * keys.norm(dim=-1)[..., None, :]
    for block in range(int(columns.max()) // KEY_BLOCK + 1):
        mapped, offset = mapped_query(codec, layer, query, block)
        scores = mapped.double() @ stored.double().transpose(2, 3) + offset
        inside = (columns // KEY_BLOCK == block)[:, None, None].expand_as(scores)
        assert (((scores - expected).abs() / sizes)[inside] < 2e-4).all()


def test_maps_queries_for_many_blocks_at_once(codec_of):
    codec = codec_of(3, 24)
    query = torch.randn(2, HEADS, 4, 24, generator=torch.Generator().manual_seed(6))
    mapped, offsets = codec.map_query(0, query, 2, 5)
    assert mapped.shape == (2, HEADS, 5, 4, 24)
    assert offsets.shape == (2, HEADS, 5, 4, 1)
    for index in range(5):
        one, offset = mapped_query(codec, 0, query, 2 + index)
        torch.testing.assert_close(mapped[:, :, index], one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(offsets[:, :, index], offset, rtol=1e-5, atol=1e-5)


@all_head_dims
def test_maps_go_back(statistics, codec_of, head_dim):
    codec = codec_of(3, head_dim)
    keys, values, columns = some_tokens(statistics[head_dim], 0)
    mapped_keys, mapped_values = codec.transform(0, keys, values, columns)
    again = codec.inverse_transform(0, mapped_keys, mapped_values, columns)
    torch.testing.assert_close(again[0], keys, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again[1], values, rtol=1e-3, atol=1e-3)
    weights = torch.rand(2, HEADS, 5, 9, generator=torch.Generator().manual_seed(2)).softmax(dim=-1)
    output = codec.unmap_output(0, weights @ mapped_values)
    torch.testing.assert_close(output, weights @ values, rtol=1e-3, atol=1e-3)


@all_bits
@pytest.mark.parametrize("head_dim", [16, 64])
def test_row_residual_is_the_mean_quantisation_residual(statistics, codec_of, bits, head_dim):
    codec = codec_of(bits, head_dim)
    keys, values, columns = some_tokens(statistics[head_dim], 0, tokens=12)
    mapped = codec.transform(0, keys + 0.7, values - 0.3, columns)
    packed = codec.quantize(0, *mapped)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = False
    rows = codec.summarize(0, *mapped, packed, mask)
    assert {(name, tensor.dtype, tensor.shape) for name, tensor in rows.items()} == {
        (f"{kind}_residual", torch.bfloat16, (2, HEADS, 1, head_dim)) for kind in ("key", "value")
    }
    plain = codec.unpack(0, "key", packed), codec.unpack(0, "value", packed)
    read = codec.unpack(0, "key", packed | rows), codec.unpack(0, "value", packed | rows)
    for kind, x, before, after in zip(("key", "value"), mapped, plain, read, strict=True):
        inverse, steps = codec.state[f"{kind}_inverse"][0].double(), codec.state[f"{kind}_steps"][0].double()
        for row in range(2):
            # It is rounded in the model's coordinates.
            left = (x[row] - before[row])[:, mask[row]].double().mean(dim=1)
            expected = ((left * steps)[:, None] @ inverse.transpose(1, 2))[:, 0]
            stored = rows[f"{kind}_residual"][row, :, 0].double()
            assert ((stored - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()
            back = ((after[row] - before[row]).double() * steps) @ inverse.transpose(1, 2)
            torch.testing.assert_close(back, stored[:, None].expand_as(back), rtol=1e-3, atol=1e-4)
    nobody = codec.summarize(0, *mapped, packed, torch.zeros_like(mask))
    assert all(not tensor.any() for tensor in nobody.values())


@all_bits
def test_is_invariant_to_outlier_channels(statistics, bits):
    """Key channels scaled by a and query channels by 1 / a, pair by pair: the same function, the same bytes."""
    stats = statistics[16]
    scale = np.ones(16)
    scale[[3, 11]], scale[[6, 14]] = 64.0, 1 / 256.0
    keys = rotated(stats.sample.keys.astype(np.float64), -(stats.sample.positions // KEY_BLOCK) * KEY_BLOCK)
    rng = np.random.default_rng(2)
    queries = correlated(rng, keys.shape[2], 16, decay=0.2)
    values = stats.sample.values.astype(np.float64)
    packed, widths = [], []
    for s in (np.ones(16), scale):
        after_rope = rotated(keys * s, stats.sample.positions // KEY_BLOCK * KEY_BLOCK)
        planted = statistics_of(after_rope, values, queries=queries / s, positions=stats.sample.positions)
        codec = fitted(TURBO[bits], planted)
        x = torch.from_numpy(after_rope[0].astype(np.float32))[None]
        y = torch.from_numpy(values[0].astype(np.float32))[None]
        columns = torch.from_numpy(stats.sample.positions)[None]
        packed.append(codec.quantize(0, *codec.transform(0, x, y, columns)))
        widths.append(codec.state["key_widths"])
    assert torch.equal(*widths)
    assert packed[0].keys() == packed[1].keys()
    for name, tensor in packed[0].items():
        if name.startswith("value"):
            assert torch.equal(tensor, packed[1][name])
        else:
            # A component at a boundary may fall to either side of it.
            assert (tensor != packed[1][name]).sum() <= max(1, 2e-3 * tensor.numel())


@all_bits
def test_nan_affects_only_its_token(statistics, codec_of, bits):
    codec = codec_of(bits, 24)
    keys, values, columns = some_tokens(statistics[24], 0)
    expected = codec.quantize(0, *codec.transform(0, keys, values, columns))
    keys, values = keys.clone(), values.clone()
    keys[1, 0, 2, 3], values[1, 0, 2, 3] = float("nan"), float("inf")
    packed = codec.quantize(0, *codec.transform(0, keys, values, columns))
    for name, tensor in packed.items():
        changed = (tensor != expected[name]).any(dim=-1)
        changed[1, 0, 2] = False
        assert not changed.any()
    assert torch.isfinite(codec.unpack(0, "key", packed)).all()
    assert torch.isfinite(codec.unpack(0, "value", packed)).all()


@all_bits
def test_constant_and_zero_heads(bits):
    keys, values = correlated(np.random.default_rng(0), 200, 16), np.zeros((LAYERS, HEADS, 200, 16))
    keys[0, 0] = 0
    keys[1, 1] = 2.5
    codec = fitted(TURBO[bits], statistics_of(keys, values))
    for tensor in codec.state.values():
        assert torch.isfinite(tensor).all()
    x = torch.from_numpy(keys[1, :, :4].astype(np.float32))[None]
    mapped = codec.transform(1, x, torch.zeros_like(x))
    packed = codec.quantize(1, *mapped)
    packed |= codec.summarize(1, *mapped, packed, torch.ones(1, 4, dtype=torch.bool))
    decoded_keys, decoded_values = codec.decode(1, packed)
    assert torch.isfinite(decoded_keys).all()
    # No level is zero, but what is the same for all tokens of a row is put right by its residual.
    torch.testing.assert_close(decoded_keys[:, 1], x[:, 1], rtol=2e-3, atol=2e-3)
    assert decoded_values.abs().max() < 2e-3


def test_components_that_dominate_a_layer_have_steps_of_their_own():
    """No bits can lessen their errors, but the step shared with the heavy tails of other components is too large."""
    rng = np.random.default_rng(0)
    keys, values = (correlated(rng, 1000, 64, decay=0.1) for _ in range(2))
    values = values * np.exp(0.5 * rng.standard_normal((LAYERS, HEADS, 1000, 1)))
    plain = fitted(TURBO[3], statistics_of(keys, values)).state
    large = 3000 * rng.uniform(-1, 1, (HEADS, 1000, 1))
    values[0] += large * np.eye(64)[5]
    stats = statistics_of(keys, values)
    codec = fitted(TURBO[3], stats)
    widths, steps = codec.state["value_widths"], codec.state["value_steps"]
    assert widths[0, 0] == widths[1, 0] == 8
    assert len(plain["value_steps"][:, :8].unique()) == len(steps[1, :8].unique()) == 1
    # Uniform numbers of unit size end at the square root of 3.
    assert steps[0, 0].item() == pytest.approx(1.1 * 2 * 3**0.5 / 255, rel=0.02)
    assert steps[0, 0] < 0.6 * steps[1, 0]
    x = torch.from_numpy(values[0].astype(np.float32))[None]
    _, decoded = codec.decode(0, codec.encode(0, torch.zeros_like(x), x))
    # Uniform rounding of 6,000 to 256 levels; the shared step would leave three times as much.
    assert (decoded - x)[..., 5].square().mean() < 1.5 * (6000 / 256) ** 2 / 12


def test_layers_that_look_up_positions_are_read_unbiased():
    """Codes are smaller than what they encode; where queries look up keys, gains make up for it."""
    rng = np.random.default_rng(0)
    keys, values = (correlated(rng, 2000, 64, decay=0.1) for _ in range(2))
    values[0] += 3000 * rng.uniform(-1, 1, (HEADS, 2000, 1)) * np.eye(64)[5]
    codec = fitted(TURBO[2], statistics_of(keys, values))
    slopes = []
    for layer in range(LAYERS):
        # Of the first block, as in the statistics.
        x = torch.from_numpy(keys[layer].reshape(HEADS, 40, 50, 64).swapaxes(0, 1)).float()
        stored, _ = codec.transform(layer, x, x)
        read, _ = codec.transform(layer, *codec.decode(layer, codec.encode(layer, x, x)))
        of_components = (stored * read).sum((0, 1, 2)) / stored.square().sum((0, 1, 2))
        slopes.append(of_components[(codec.state["key_widths"][layer] == 2).repeat_interleave(8)].mean().item())
    assert slopes[0] == pytest.approx(1, abs=0.02)
    assert max(slopes[1:]) < 0.93
    # Gains would also multiply tokens that are stored unquantised.
    is_special = np.arange(2000) < 10
    assert not any("gains" in name for name in fitted(TURBO[2], statistics_of(keys, values, is_special)).state)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_components_of_pure_rounding_do_not_distort_the_steps(head_dim):
    """Values of a first layer have no more dimensions than there are residues; bfloat16 puts a little into all."""
    rng = np.random.default_rng(0)
    basis = rng.standard_normal((LAYERS, HEADS, 20, head_dim))
    values = 3 + rng.standard_normal((LAYERS, HEADS, 500, 20)) @ basis
    stats = statistics_of(correlated(rng, 500, head_dim, decay=6 / head_dim), values)
    # What is fitted to, but for the sample, was never rounded.
    exact = statistics_of(stats.sample.keys, values, bfloat16=False)
    stats = dataclasses.replace(exact, sample=stats.sample)
    codec = fitted(TURBO[4], stats)
    x = torch.from_numpy(values[:, :, :50].astype(np.float32))
    for layer in range(LAYERS):
        keys = torch.zeros(1, HEADS, 50, head_dim)
        packed = codec.encode(layer, keys, x[layer][None])
        _, decoded = codec.decode(layer, packed)
        error = (decoded[0] - x[layer]).square().mean() / x[layer].var()
        assert error < 0.01


def test_scores_and_values_are_better_than_the_papers_at_fewer_bits(statistics, codec_of):
    """What the transforms and the shares are for: mean squared errors of q . k and of v, which count alike here."""
    stats = statistics[32]
    root = torch.linalg.cholesky(torch.from_numpy(stats.sensitivity.queries[0])).float()
    queries = (torch.randn(HEADS, 100, 32, generator=torch.Generator().manual_seed(0)) @ root.transpose(1, 2))[None]
    keys, values, columns = some_tokens(stats, 0, tokens=200)
    errors = {}
    for name, codec in (("turbo3", codec_of(3, 32)), ("paper", fitted(PAPER, stats))):
        mapped = codec.transform(0, keys, values, columns)
        packed = codec.quantize(0, *mapped)
        read = codec.inverse_transform(0, codec.unpack(0, "key", packed), codec.unpack(0, "value", packed), columns)
        scores = (queries @ (read[0] - keys).transpose(2, 3)).square().mean()
        errors[name] = (scores + (read[1] - values).square().sum(dim=-1).mean()).item()
    assert errors["turbo3"] < 0.5 * errors["paper"]


def test_threads_change_no_bit(statistics):
    before, states = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with threadpool_limits(threads):
                calibration = Calibration(statistics[64], np.zeros(0, dtype=np.float32), {}).fit(TURBO.values())
            states.append([calibration.codec(config) for config in TURBO.values()])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*states, strict=True):
        assert_same_state(one, other)


@pytest.mark.parametrize(("head_dim", "size"), [(12, 8), (136, 16)])
def test_heads_that_cannot_be_packed(head_dim, size):
    rng = np.random.default_rng(0)
    stats = statistics_of(correlated(rng, 20, head_dim), correlated(rng, 20, head_dim))
    with pytest.raises(ValueError, match=f"components are coded by {size}: .*, got {head_dim}"):
        fitted(TURBO[3], stats)


def test_head_sizes_that_no_published_model_has():
    rng = np.random.default_rng(0)
    stats = statistics_of(correlated(rng, 100, 72, decay=0.05), correlated(rng, 100, 72, decay=0.05))
    codec = fitted(TURBO[3], stats)
    keys, values, columns = some_tokens(stats, 0, tokens=2)
    packed = codec.quantize(0, *codec.transform(0, keys, values, columns))
    # 54 bytes would be three bits; 52 are whole words.
    assert sum(tensor.shape[-1] for tensor in packed.values()) == 52
    assert_reads_slowly(codec, 0, packed, "key", codec.unpack(0, "key", packed))
