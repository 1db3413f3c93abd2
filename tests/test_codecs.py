"""Codecs against the paper, literal bytes, slow twins, scikit-learn and published distortions."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from esm_turbo import KVCalibrator, TurboConfig, reference
from esm_turbo.codecs import CODECS, ExactCodec, KVCodec, LutCodec, TurboCodec, codec_class
from esm_turbo.config import PRODUCT_PRESETS, Geometry
from esm_turbo.kv_statistics import KEY_BLOCK, KVStatistics, Moments, Sensitivity, TokenMoments, TokenSample
from esm_turbo.transforms import GAUSSIAN_DISTORTIONS, component_variances, query_aware

LAYERS, HEADS = 2, 2
PAPER = TurboConfig()
ABLATIONS = {
    "paper": PAPER,
    "no rotation": TurboConfig(key_transform="identity"),
    "hadamard": TurboConfig(key_transform="hadamard", value_transform="hadamard", seed=3),
    "no sign": TurboConfig(sign_correction="none"),
    "signs on keys": TurboConfig(sign_correction="keys"),
    "shared": TurboConfig(shared_codebook=True),
    "standardised": TurboConfig(standardize=True),
    "one bit": TurboConfig(bits=1),
    "two bits": TurboConfig(bits=2, sign_correction="keys"),
    "four bits": TurboConfig(bits=4, sign_correction="none"),
    "seven bits": TurboConfig(bits=7, key_transform="hadamard", standardize=True),
}


def correlated(rng, tokens, head_dim, decay=0.12):
    """Vectors [LAYERS, HEADS, tokens, head_dim]: variances that fall along random directions, a mean other than 0."""
    stack = (LAYERS, HEADS)
    mixing = np.linalg.qr(rng.standard_normal((*stack, head_dim, head_dim)))[0] * np.exp(-decay * np.arange(head_dim))
    mean = 0.5 * rng.standard_normal((*stack, 1, head_dim))
    return rng.standard_normal((*stack, tokens, head_dim)) @ np.swapaxes(mixing, -1, -2) + mean


def moments_of(x):
    """Moments of vectors [layers, heads, tokens, head_dim]."""
    mean = x.mean(axis=2)
    centred = x - mean[:, :, None]
    return Moments(x.shape[2], mean, np.swapaxes(centred, 2, 3) @ centred / x.shape[2])


def as_bfloat16(x):
    return torch.from_numpy(x.astype(np.float32)).bfloat16().float().numpy()


def statistics_of(keys, values, is_special=None, queries=None, positions=None):
    """Statistics whose sample is all there is: keys and values [layers, heads, tokens, head_dim].

    All tokens weigh the same, and so do all errors of a head's output; queries are of the keys' shape.
    """
    keys, values = as_bfloat16(keys), as_bfloat16(values)
    layers, heads, tokens, head_dim = keys.shape
    stack = (layers, heads)
    is_special = np.zeros(tokens, dtype=bool) if is_special is None else is_special
    positions = np.zeros(tokens, dtype=np.int64) if positions is None else positions
    queries = keys if queries is None else queries
    states = [x.astype(np.float64) for x in (keys, queries, values)]

    def token_moments(mask):
        return TokenMoments(
            *(moments_of(x[:, :, mask]) if mask.any() else Moments.empty(*stack, head_dim) for x in states)
        )

    inv_freq = INV_FREQ[head_dim]
    relative = turned(keys.astype(np.float64), -(positions // KEY_BLOCK) * KEY_BLOCK)
    sensitivity = Sensitivity(
        tokens,
        relative.mean(axis=2),
        dataclasses.replace(moments_of(relative), count=np.full(stack, float(tokens))),
        dataclasses.replace(moments_of(states[2]), count=np.full(stack, float(tokens))),
        moments_of(states[1]).second_moment,
        np.ones(stack),
    )
    weights = np.ones((*stack, tokens), dtype=np.float32)
    sample = TokenSample(keys, values, is_special, positions, weights, weights)
    gram = np.broadcast_to(np.eye(head_dim), (*stack, head_dim, head_dim))
    return KVStatistics(
        Geometry(layers, heads, head_dim),
        token_moments(~is_special),
        token_moments(is_special),
        sensitivity,
        sample,
        inv_freq,
        gram,
    )


INV_FREQ = {d: 10000.0 ** (-np.arange(d // 2) / (d // 2)) for d in (8, 12, 16, 24, 32, 64, 128)}


def turned(x, positions):
    """RoPE (Su et al. 2021) of x [..., tokens, head_dim] by positions [tokens]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * INV_FREQ[x.shape[-1]]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gaussian_statistics(head_dim, seed=0):
    rng = np.random.default_rng(seed)
    tokens = 150 + 4000 // head_dim
    return statistics_of(correlated(rng, tokens, head_dim), correlated(rng, tokens, head_dim, decay=0.05))


def fitted(config, statistics):
    cls = codec_class(config)
    return cls(config, statistics.geometry, cls.fit(config, statistics))


def keys_and_values(statistics, layer, batch_size=2, tokens=7, seed=5):
    """Fresh keys and values of the statistics' own distribution, float32 [batch, heads, tokens, head_dim]."""
    rng = np.random.default_rng(seed)
    drawn = []
    for sample in (statistics.sample.keys, statistics.sample.values):
        picks = rng.integers(0, sample.shape[2], (batch_size, tokens))
        x = sample[layer][:, picks].transpose(1, 0, 2, 3)
        drawn.append(torch.from_numpy((x * rng.normal(1, 0.1, x.shape)).astype(np.float32)))
    return drawn


def mapped_query(codec, layer, query, block=0):
    """The query against stored keys of one block, and what it adds to every score (a number or [B, H, n, 1])."""
    mapped, offset = codec.map_query(layer, query, block, 1)
    return mapped[:, :, 0], 0 if offset is None else offset[:, :, 0]


@pytest.fixture(scope="module")
def statistics():
    return {head_dim: gaussian_statistics(head_dim) for head_dim in (16, 24, 64, 128)}


@pytest.fixture(scope="module")
def codec_of(statistics):
    """The codec of some options for the statistics of a head size, fitted once for all tests."""
    codecs = {}

    def codec_of(config, head_dim):
        if (config, head_dim) not in codecs:
            codecs[config, head_dim] = fitted(config, statistics[head_dim])
        return codecs[config, head_dim]

    return codec_of


ablations = pytest.mark.parametrize("config", ABLATIONS.values(), ids=ABLATIONS)
all_head_dims = pytest.mark.parametrize("head_dim", [16, 24, 128])


# --- the paper's method


@all_head_dims
def test_rotation_is_that_of_the_svd_of_the_stacked_keys(statistics, codec_of, head_dim):
    """TurboESM section 3.2: X = U S V^T, keys are multiplied by V^T; X is not centred."""
    stats = statistics[head_dim]
    key_map = codec_of(PAPER, head_dim).state["key_map"].double().numpy()
    for layer, head in np.ndindex(LAYERS, HEADS):
        x, rows = stats.sample.keys[layer, head].astype(np.float64), key_map[layer, head]
        _, singular_values, right = np.linalg.svd(x, full_matrices=False)
        np.testing.assert_allclose(rows @ rows.T, np.eye(head_dim), atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(x @ rows.T, axis=0), singular_values, rtol=1e-4, atol=1e-4)
        # Directions of nearly equal singular values mix freely: the overlap outside of a group is what counts.
        overlap = np.abs(rows @ right.T)
        apart = np.abs(np.subtract.outer(singular_values, singular_values)) > 0.01 * singular_values
        assert overlap[apart].max() < 1e-3
        assert np.diag(overlap)[:4].min() > 1 - 1e-5


def test_values_are_not_rotated(statistics, codec_of):
    stats = statistics[16]
    codec = codec_of(PAPER, 16)
    keys, values = keys_and_values(stats, 1)
    mapped_keys, mapped_values = codec.transform(1, keys, values)
    assert torch.equal(mapped_values, values)
    assert not torch.allclose(mapped_keys, keys, atol=0.1)
    assert "value_map" not in codec.state


@pytest.mark.parametrize("shared", [False, True])
def test_levels_are_as_good_as_k_means(statistics, codec_of, shared):
    """Section 3.3: one 8-level quantiser over all components of a head."""
    stats = statistics[16]
    state = codec_of(TurboConfig(shared_codebook=shared), 16).state
    for layer, head in [(0, 0), (1, 1)]:
        key_map = state["key_map"][layer, head].double().numpy()
        samples = {
            "key": (stats.sample.keys[layer, head] @ key_map.T).ravel(),
            "value": stats.sample.values[layer, head].ravel(),
        }
        if shared:
            samples = dict.fromkeys(samples, np.concatenate(list(samples.values())))
        for kind, x in samples.items():
            levels = state[f"{kind}_levels"][layer, head].double().numpy()
            assert (np.diff(levels) > 0).all()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                clusters = KMeans(8, n_init=4, random_state=0, max_iter=200).fit(x[:, None])
            mine = np.square(x[:, None] - levels).min(axis=1).mean()
            assert mine <= 1.001 * clusters.inertia_ / len(x)


@ablations
def test_step_is_the_mean_absolute_residual(statistics, codec_of, config):
    """Section 3.4, eq. 7."""
    stats = statistics[16]
    state = codec_of(config, 16).state
    eye = torch.eye(16).expand(LAYERS, HEADS, 16, 16)
    for kind, sample in (("key", stats.sample.keys), ("value", stats.sample.values)):
        maps = state.get(f"{kind}_map", eye).double().numpy()
        x = np.einsum("lhij,lhtj->lhti", maps, sample).reshape(LAYERS, HEADS, -1)
        levels = state[f"{kind}_levels"].double().numpy()
        residual = np.abs(x[..., None] - levels[:, :, None]).min(axis=-1)
        np.testing.assert_allclose(state[f"{kind}_step"].numpy(), residual.mean(axis=-1), rtol=1e-4)


def test_all_tokens_are_fitted_unless_special_ones_are_protected():
    rng = np.random.default_rng(8)
    keys, values = correlated(rng, 300, 16), correlated(rng, 300, 16)
    is_special = rng.random(300) < 0.2
    keys[:, :, is_special] += 20
    both = fitted(PAPER, statistics_of(keys, values, is_special))
    assert_same_state(both, fitted(PAPER, statistics_of(keys, values)), atol=1e-5)
    protecting = dataclasses.replace(PAPER, protect_special_tokens=True)
    residues = fitted(protecting, statistics_of(keys, values, is_special))
    assert_same_state(residues, fitted(PAPER, statistics_of(keys[:, :, ~is_special], values[:, :, ~is_special])))
    assert both.state["key_levels"].max() > 2 * residues.state["key_levels"].max()


def assert_same_state(one, other, atol=0.0):
    assert one.state.keys() == other.state.keys()
    for name, tensor in one.state.items():
        torch.testing.assert_close(tensor, other.state[name], rtol=0, atol=atol, msg=name)


# --- what is stored


def handmade(sign_correction, levels=(-7, -5, -3, -1, 1, 3, 5, 7), step=0.5):
    """A codec of one layer and one head of eight components, with levels that can be read."""
    bits = (len(levels) - 1).bit_length()
    config = TurboConfig(key_transform="identity", sign_correction=sign_correction, bits=bits)
    tables = torch.tensor(levels, dtype=torch.float32)[None, None]
    state = {
        "key_levels": tables,
        "value_levels": tables * 10,
        "key_step": torch.tensor([[step]]),
        "value_step": torch.tensor([[10 * step]]),
    }
    return LutCodec(config, Geometry(1, 1, 8), state)


# Codes 0 to 7, residuals + - - + + + - +: the fields are code | sign << 3.
COMPONENTS = torch.tensor([-6.6, -5.4, -3.6, -0.9, 1.2, 3.9, 4.1, 7.5])
FIELDS = [8, 1, 2, 11, 12, 13, 6, 15]
WORD = 0xF6DCB218


def test_eight_codes_and_eight_signs_are_one_little_endian_word():
    codec = handmade("keys_and_values")
    packed = codec.quantize(0, COMPONENTS.view(1, 1, 1, 8), 10 * COMPONENTS.view(1, 1, 1, 8))
    assert packed.keys() == {"keys", "values"}
    for stored in packed.values():
        assert stored.dtype == torch.uint8
        assert stored.shape == (1, 1, 1, 4)
        assert stored.flatten().tolist() == [0x18, 0xB2, 0xDC, 0xF6]
        word = int.from_bytes(bytes(stored.flatten().tolist()), "little")
        assert word == WORD
        assert [word >> (4 * j) & 15 for j in range(8)] == FIELDS
    decoded = torch.tensor([-6.5, -5.5, -3.5, -0.5, 1.5, 3.5, 4.5, 7.5])
    assert torch.equal(codec.dequantize_keys(0, packed).flatten(), decoded)
    assert torch.equal(codec.dequantize_values(0, packed).flatten(), 10 * decoded)


def test_codes_without_signs_fill_three_bytes():
    codec = handmade("none")
    packed = codec.quantize(0, COMPONENTS.view(1, 1, 1, 8), 10 * COMPONENTS.view(1, 1, 1, 8))
    word = sum(code << (3 * code) for code in range(8))
    assert packed["keys"].flatten().tolist() == list(word.to_bytes(3, "little"))
    assert packed["values"].tolist() == packed["keys"].tolist()
    assert codec.dequantize_keys(0, packed).flatten().tolist() == [-7, -5, -3, -1, 1, 3, 5, 7]


def test_signs_on_keys_only():
    codec = handmade("keys")
    packed = codec.quantize(0, COMPONENTS.view(1, 1, 1, 8), 10 * COMPONENTS.view(1, 1, 1, 8))
    assert packed["keys"].shape[-1] == 4
    assert packed["values"].shape[-1] == 3
    assert codec.dequantize_keys(0, packed).flatten()[0] == -6.5
    assert codec.dequantize_values(0, packed).flatten()[0] == -70


def test_ties():
    """Half way between levels goes down; at a level the residual is not positive."""
    codec = handmade("keys_and_values")
    x = torch.tensor([-6.0, -4.0, 0.0, 6.0, -7.0, 1.0, 7.0, -0.0]).view(1, 1, 1, 8)
    decoded = codec.dequantize_keys(0, codec.quantize(0, x, x)).flatten()
    assert decoded.tolist() == [-6.5, -4.5, -0.5, 5.5, -7.5, 0.5, 6.5, -0.5]


def test_values_beyond_the_levels_and_numbers_that_are_none():
    codec = handmade("keys_and_values")
    x = torch.tensor([1e30, -1e30, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 100.0]).view(1, 1, 1, 8)
    packed = codec.quantize(0, x, x)
    decoded = codec.dequantize_keys(0, packed).flatten()
    assert decoded.tolist() == [7.5, -7.5, 7.5, -7.5, -7.5, 0.5, -0.5, 7.5]
    assert torch.isfinite(codec.dequantize_values(0, packed)).all()


@ablations
def test_nan_crashes_nothing_and_stays_with_its_token(statistics, codec_of, config):
    stats = statistics[16]
    codec = codec_of(config, 16)
    keys, values = keys_and_values(stats, 0)
    expected = codec.encode(0, keys, values)
    keys[1, 1, 3, 4] = values[1, 1, 3, 4] = float("nan")
    packed = codec.encode(0, keys, values)
    for name, tensor in packed.items():
        changed = (tensor != expected[name]).any(dim=-1)
        changed[1, 1, 3] = False
        assert not changed.any()
    for decoded in codec.decode(0, packed):
        assert torch.isfinite(decoded).all()


@all_head_dims
@ablations
def test_bits_per_element_are_exact(statistics, codec_of, config, head_dim):
    stats = statistics[head_dim]
    packed = codec_of(config, head_dim).encode(1, *keys_and_values(stats, 1))
    bits = [8 * tensor[0, 0, 0].nbytes / head_dim for tensor in (packed["keys"], packed["values"])]
    signs = {"keys_and_values": (1, 1), "keys": (1, 0), "none": (0, 0)}[config.sign_correction]
    assert bits == [config.bits + sign for sign in signs]
    assert {tensor.shape[:3] for tensor in packed.values()} == {(2, HEADS, 7)}
    assert len(packed) == 2


def test_bits_per_element_of_the_papers_variants(statistics):
    def bits(config):
        packed = fitted(config, statistics[64]).encode(0, *keys_and_values(statistics[64], 0))
        return 8 * sum(tensor[0, 0, 0].nbytes for tensor in packed.values()) / (2 * 64)

    assert bits(PAPER) == 4
    assert bits(ABLATIONS["no sign"]) == 3
    assert bits(ABLATIONS["signs on keys"]) == 3.5


@all_head_dims
@ablations
def test_codes_are_those_of_the_slow_twin_bit_for_bit(statistics, codec_of, config, head_dim):
    stats = statistics[head_dim]
    codec = codec_of(config, head_dim)
    layer = 1
    keys, values = codec.transform(layer, *keys_and_values(stats, layer, batch_size=1, tokens=3))
    packed = codec.quantize(layer, keys, values)
    decoded = {"keys": codec.dequantize_keys(layer, packed), "values": codec.dequantize_values(layer, packed)}
    signed = {"keys": config.sign_correction != "none", "values": config.sign_correction == "keys_and_values"}
    for name, x in (("keys", keys), ("values", values)):
        levels, step = (codec.state[f"{name[:-1]}_{part}"][layer] for part in ("levels", "step"))
        codes = reference.quantize(x, (levels[:, 1:] + levels[:, :-1]) / 2).long()
        nearest = torch.stack([levels[head][codes[:, head]] for head in range(HEADS)], dim=1)
        # Nearest indeed, whatever the boundaries were.
        distance = (x[..., None] - levels[:, None, None]).abs().amin(dim=-1)
        torch.testing.assert_close((x - nearest).abs(), distance, rtol=0, atol=0)
        fields, expected = codes, nearest
        if signed[name]:
            signs = (x > nearest).long()
            fields = codes | signs << config.bits
            step = step[:, None, None]
            expected = torch.where(signs == 1, nearest + step, nearest - step)
        assert torch.equal(packed[name], reference.pack_codes(fields.to(torch.uint8), config.bits + signed[name]))
        assert torch.equal(decoded[name], expected)


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(st.floats(-10, 10, width=32), min_size=16, max_size=16),
    signs=st.sampled_from(["keys_and_values", "none"]),
)
def test_stored_values_are_levels_plus_or_minus_a_step(data, signs):
    codec = handmade(signs)
    x = torch.tensor(data).view(1, 1, 2, 8)
    packed = codec.quantize(0, x, x)
    decoded = codec.dequantize_keys(0, packed)
    step = 0.5 if signs != "none" else 0.0
    choices = {level + s * step for level in (-7, -5, -3, -1, 1, 3, 5, 7) for s in (-1, 1)}
    assert set(decoded.flatten().tolist()) <= choices
    inside = x.abs() <= 7
    assert ((decoded - x).abs()[inside] <= 1.0).all()
    # What is stored decodes to the same when a part of it is read alone.
    part = {name: tensor[:, :, 1:] for name, tensor in packed.items()}
    assert torch.equal(codec.dequantize_keys(0, part), decoded[:, :, 1:])


@ablations
def test_tokens_are_encoded_one_by_one(statistics, codec_of, config):
    """A token's bytes depend on the token alone: not on the batch, the block or strides."""
    stats = statistics[24]
    codec = codec_of(config, 24)
    keys, values = keys_and_values(stats, 0, batch_size=3, tokens=9)
    packed = codec.encode(0, keys, values)
    strided = codec.encode(0, keys.transpose(1, 2).contiguous().transpose(1, 2), values.flip(2).flip(2))
    alone = codec.encode(0, keys[1:2, :, 4:6], values[1:2, :, 4:6])
    for name, tensor in packed.items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor, strided[name])
        # The maps' sums may be grouped otherwise: a component at a boundary may go to the other side of it.
        assert (tensor[1:2, :, 4:6] != alone[name]).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@ablations
def test_inputs_of_any_dtype_are_taken_as_they_are(statistics, codec_of, config, dtype):
    stats = statistics[16]
    codec = codec_of(config, 16)
    keys, values = (x.to(dtype) for x in keys_and_values(stats, 0))
    packed, expected = codec.encode(0, keys, values), codec.encode(0, keys.float(), values.float())
    for name, tensor in packed.items():
        assert torch.equal(tensor, expected[name])
    assert codec.dequantize_keys(0, packed).dtype == torch.float32


# --- the ablation's switches


def state_parts(config, stats):
    """What a codec consists of and what it stores, by part."""
    codec = fitted(config, stats)
    packed = codec.encode(0, *keys_and_values(stats, 0))
    eye = torch.eye(16).expand(LAYERS, HEADS, 16, 16)
    state = codec.state
    return {
        "key_map": state["key_map"],
        "value_map": state.get("value_map", eye),
        "key_levels": state["key_levels"],
        "value_levels": state["value_levels"],
        "key_step": state["key_step"],
        "value_step": state["value_step"],
        "keys": packed["keys"],
        "values": packed["values"],
    }


EVERYTHING_OF_KEYS = {"key_map", "key_levels", "key_step", "keys"}
EVERYTHING_OF_VALUES = {"value_map", "value_levels", "value_step", "values"}


@pytest.mark.parametrize(
    ("option", "value", "changed"),
    [
        ("key_transform", "identity", EVERYTHING_OF_KEYS),
        ("key_transform", "hadamard", EVERYTHING_OF_KEYS),
        ("value_transform", "hadamard", EVERYTHING_OF_VALUES),
        ("sign_correction", "none", {"keys", "values"}),
        ("sign_correction", "keys", {"values"}),
        ("shared_codebook", True, {"key_levels", "value_levels", "key_step", "value_step", "keys", "values"}),
        ("standardize", True, EVERYTHING_OF_KEYS | EVERYTHING_OF_VALUES),
        ("bits", 4, {"key_levels", "value_levels", "key_step", "value_step", "keys", "values"}),
        # The synthetic data has no special tokens, and the paper's transforms are not random.
        ("protect_special_tokens", True, set()),
        ("seed", 1, set()),
        ("mean_bits", 2, set()),
    ],
)
def test_each_switch_changes_what_it_says_and_nothing_else(statistics, option, value, changed):
    before = state_parts(PAPER, statistics[16])
    after = state_parts(dataclasses.replace(PAPER, **{option: value}), statistics[16])
    assert {name for name in before if not torch.equal(before[name], after[name])} == changed


def test_every_option_has_a_test_above():
    marks = test_each_switch_changes_what_it_says_and_nothing_else.pytestmark
    tested = {case[0] for case in next(mark for mark in marks if mark.name == "parametrize").args[1]}
    assert tested == {option.name for option in dataclasses.fields(TurboConfig)} - {"codec"}


def test_seed_changes_random_transforms_only_by_the_signs(statistics):
    one, other, again = (
        fitted(TurboConfig(key_transform="hadamard", seed=seed), statistics[16]).state["key_map"] for seed in (0, 1, 0)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.testing.assert_close(one.abs(), torch.full_like(one, 0.25))
    # Each head has signs of its own.
    assert len({tuple(head.flatten().tolist()) for head in one.flatten(0, 1)}) > 1


def test_shared_codebook_is_one(statistics):
    state = fitted(TurboConfig(shared_codebook=True), statistics[16]).state
    assert torch.equal(state["key_levels"], state["value_levels"])
    assert not torch.equal(state["key_step"], state["value_step"])


def test_standardised_components_have_unit_mean_square(statistics, codec_of):
    stats = statistics[64]
    config = TurboConfig(standardize=True, key_transform="svd", value_transform="hadamard")
    codec = codec_of(config, 64)
    for layer in range(LAYERS):
        keys, values = (torch.from_numpy(x[layer])[None] for x in (stats.sample.keys, stats.sample.values))
        for mapped in codec.transform(layer, keys, values):
            torch.testing.assert_close(mapped.square().mean(dim=2), torch.ones(1, HEADS, 64), rtol=1e-3, atol=1e-3)


def test_identity_map_is_the_identity(statistics):
    codec = fitted(TurboConfig(key_transform="identity"), statistics[16])
    keys, values = keys_and_values(statistics[16], 1)
    mapped_keys, mapped_values = codec.transform(1, keys, values)
    assert torch.equal(mapped_keys, keys)
    assert torch.equal(mapped_values, values)
    query, offset = mapped_query(codec, 1, keys)
    assert torch.equal(query, keys)
    assert offset == 0


# --- maps of queries and outputs


@all_head_dims
@pytest.mark.parametrize("layer", range(LAYERS))
@ablations
def test_mapped_queries_keep_their_scores(statistics, codec_of, config, head_dim, layer):
    stats = statistics[head_dim]
    codec = codec_of(config, head_dim)
    keys, values = keys_and_values(stats, layer, tokens=11)
    query = torch.randn(2, HEADS, 5, head_dim, generator=torch.Generator().manual_seed(1))
    mapped, offset = mapped_query(codec, layer, query)
    stored_keys, _ = codec.transform(layer, keys, values)
    scores = mapped.double() @ stored_keys.double().transpose(2, 3) + offset
    expected = query.double() @ keys.double().transpose(2, 3)
    sizes = query.double().norm(dim=-1)[..., None] * keys.double().norm(dim=-1)[..., None, :]
    assert ((scores - expected).abs() / sizes).max() < 1e-4


@all_head_dims
@ablations
def test_weighted_sums_of_stored_values_map_back(statistics, codec_of, config, head_dim):
    stats = statistics[head_dim]
    codec = codec_of(config, head_dim)
    keys, values = keys_and_values(stats, 1, tokens=11)
    weights = torch.rand(2, HEADS, 5, 11, generator=torch.Generator().manual_seed(2)).softmax(dim=-1)
    _, stored = codec.transform(1, keys, values)
    output = codec.unmap_output(1, weights @ stored)
    torch.testing.assert_close(output, weights @ values, rtol=1e-4, atol=1e-4)


@all_head_dims
@ablations
def test_inverse_transform_undoes_transform(statistics, codec_of, config, head_dim):
    stats = statistics[head_dim]
    codec = codec_of(config, head_dim)
    keys, values = keys_and_values(stats, 0)
    again = codec.inverse_transform(0, *codec.transform(0, keys, values))
    for actual, expected in zip(again, (keys, values), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Centred(LutCodec):
    """The interface allows means, which the paper's codec does not use."""

    @classmethod
    def fit(cls, config, statistics):
        state = super().fit(config, statistics)
        moments = statistics.residues
        state["key_mean"], state["value_mean"] = (
            torch.from_numpy(m.mean.astype(np.float32)) for m in (moments.keys, moments.values)
        )
        return state


def test_centred_codecs_keep_scores_and_sums(statistics):
    stats = statistics[24]
    codec = Centred(PAPER, stats.geometry, Centred.fit(PAPER, stats))
    keys, values = keys_and_values(stats, 1, tokens=11)
    query = torch.randn(2, HEADS, 5, 24, generator=torch.Generator().manual_seed(3))
    mapped, offset = mapped_query(codec, 1, query)
    stored_keys, stored_values = codec.transform(1, keys, values)
    scores = mapped @ stored_keys.transpose(2, 3) + offset
    torch.testing.assert_close(scores, query @ keys.transpose(2, 3), rtol=1e-3, atol=1e-3)
    weights = scores.softmax(dim=-1)
    torch.testing.assert_close(codec.unmap_output(1, weights @ stored_values), weights @ values, rtol=1e-4, atol=1e-4)
    again = codec.inverse_transform(1, stored_keys, stored_values)
    torch.testing.assert_close(again[0], keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again[1], values, rtol=1e-4, atol=1e-4)


# --- distortion


@pytest.mark.parametrize(
    ("signs", "distortion"),
    [("keys_and_values", (0.0123, 0.0123)), ("none", (0.0345, 0.0345)), ("keys", (0.0123, 0.0345))],
)
@pytest.mark.parametrize("transform", ["identity", "hadamard"])
def test_distortion_of_a_unit_gaussian(signs, distortion, transform):
    """Method of the paper: 8 levels leave 0.0345 of the variance, one sign and one magnitude bring it to 0.0123."""
    rng = np.random.default_rng(0)
    shape = (1, 1, 3000, 32)
    stats = statistics_of(rng.standard_normal(shape), rng.standard_normal(shape))
    codec = fitted(TurboConfig(key_transform=transform, sign_correction=signs), stats)
    # Midpoints in probability, in a random order: no sampling noise in their mean squares.
    grid = ndtri((np.arange(96_000) + 0.5) / 96_000)
    fresh = torch.from_numpy(np.stack([rng.permutation(grid) for _ in range(2)]).astype(np.float32)).view(2, *shape)
    decoded = codec.decode(0, codec.encode(0, *fresh))
    for x, x_hat, expected in zip(fresh, decoded, distortion, strict=True):
        assert (x - x_hat).square().mean().item() == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_a_sign_lowers_the_distortion_by_the_square_of_its_step(statistics, codec_of, bits):
    """On the sample itself, whatever its distribution (section 3.4)."""
    stats = statistics[64]
    errors = {}
    for signs in ("keys_and_values", "none"):
        codec = codec_of(TurboConfig(bits=bits, sign_correction=signs), 64)
        keys, values = (torch.from_numpy(x[1])[None] for x in (stats.sample.keys, stats.sample.values))
        mapped = codec.transform(1, keys, values)
        packed = codec.quantize(1, *mapped)
        decoded = codec.dequantize_keys(1, packed), codec.dequantize_values(1, packed)
        errors[signs] = [(x - y).square().mean(dim=(0, 2, 3)) for x, y in zip(mapped, decoded, strict=True)]
    for kind, with_sign, without in zip(("key", "value"), errors["keys_and_values"], errors["none"], strict=True):
        gain = codec.state[f"{kind}_step"][1].square()
        torch.testing.assert_close(without - with_sign, gain, rtol=2e-3, atol=1e-6)


def test_more_bits_lose_less(statistics, codec_of):
    stats = statistics[16]
    keys, values = keys_and_values(stats, 0, batch_size=20)
    errors = []
    for bits, signs in itertools.product(range(1, 8), ("none", "keys_and_values")):
        codec = codec_of(TurboConfig(bits=bits, sign_correction=signs), 16)
        decoded = codec.decode(0, codec.encode(0, keys, values))
        errors.append(sum((x - y).square().mean().item() for x, y in zip(decoded, (keys, values), strict=True)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[0]


# --- degenerate data


@pytest.mark.parametrize("config", [*ABLATIONS.values()], ids=ABLATIONS)
def test_constant_and_zero_heads(config):
    keys, values = correlated(np.random.default_rng(0), 50, 16), np.zeros((LAYERS, HEADS, 50, 16))
    keys[0, 0] = 0
    keys[1, 1] = 2.5
    codec = fitted(config, statistics_of(keys, values))
    for tensor in codec.state.values():
        assert torch.isfinite(tensor).all()
    x = torch.from_numpy(keys[1, :, :4].astype(np.float32))[None]
    decoded_keys, decoded_values = codec.decode(1, codec.encode(1, x, torch.zeros_like(x)))
    torch.testing.assert_close(decoded_keys[:, 1], x[:, 1], rtol=1e-3, atol=1e-3)
    assert decoded_values.abs().max() < 1e-6


def test_huge_outlier_channels_stay_finite():
    keys = correlated(np.random.default_rng(0), 100, 16)
    keys[..., 3] *= 1e6
    for config in ABLATIONS.values():
        codec = fitted(config, statistics_of(keys, keys))
        x = torch.from_numpy(keys[0].astype(np.float32))[None]
        for decoded in codec.decode(0, codec.encode(0, x, x)):
            assert torch.isfinite(decoded).all()


def test_heads_that_cannot_be_packed():
    stats = gaussian_statistics(12)
    with pytest.raises(ValueError, match="`head_dim` must be a multiple of it, got 12"):
        fitted(PAPER, stats)


# --- determinism


@ablations
def test_fitting_and_encoding_are_deterministic(statistics, config):
    stats = statistics[64]
    keys, values = keys_and_values(stats, 1, tokens=33)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            with threadpool_limits(threads):
                codec = fitted(config, stats)
                results.append((codec, codec.encode(1, keys, values)))
    finally:
        torch.set_num_threads(before)
    first, packed = results[0]
    for codec, other in results[1:]:
        assert_same_state(codec, first)
        for name, tensor in packed.items():
            assert torch.equal(other[name], tensor)


def test_copies_of_a_codec_share_nothing_that_changes(statistics):
    codec = fitted(PAPER, statistics[16])
    state = {name: tensor.clone() for name, tensor in codec.state.items()}
    keys, values = keys_and_values(statistics[16], 0)
    kept = keys.clone(), values.clone()
    codec.decode(0, codec.encode(0, keys, values))
    codec.map_query(0, keys)
    assert torch.equal(keys, kept[0])
    assert torch.equal(values, kept[1])
    for name, tensor in state.items():
        assert torch.equal(codec.state[name], tensor)


# --- turbo: query-aware transforms and bits shared out


TURBO = {bits: TurboConfig(codec="turbo", mean_bits=bits) for bits in (1, 2, 3, 4)}
FIELD_BITS_AND_PLANES = {0: (0, 0), 1: (0, 1), 2: (1, 1), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
turbo_bits = pytest.mark.parametrize("bits", TURBO)
turbo_head_dims = pytest.mark.parametrize("head_dim", [16, 24, 64, 128])


@pytest.fixture(scope="module")
def turbo_statistics():
    """Keys that are alike relative to their blocks, wherever they stand; queries and values of their own shapes."""
    made = {}
    for head_dim in (16, 24, 64, 128):
        rng = np.random.default_rng(head_dim)
        tokens = 400 + 6000 // head_dim
        positions = rng.integers(0, 1000, tokens)
        relative = correlated(rng, tokens, head_dim, decay=6 / head_dim)
        made[head_dim] = statistics_of(
            turned(relative, positions // KEY_BLOCK * KEY_BLOCK),
            correlated(rng, tokens, head_dim, decay=2 / head_dim),
            queries=correlated(rng, tokens, head_dim, decay=3 / head_dim),
            positions=positions,
        )
    return made


@pytest.fixture(scope="module")
def turbo_codec_of(turbo_statistics):
    codecs = {}

    def codec_of(bits, head_dim):
        if (bits, head_dim) not in codecs:
            codecs[bits, head_dim] = fitted(TURBO[bits], turbo_statistics[head_dim])
        return codecs[bits, head_dim]

    return codec_of


def turbo_tokens(statistics, layer, tokens=9, seed=3):
    """Keys after RoPE, values and the columns where they stand: float32 [2, heads, tokens, head_dim], [2, tokens]."""
    keys, values = (torch.from_numpy(x[layer]) for x in (statistics.sample.keys, statistics.sample.values))
    picks = torch.randint(0, keys.shape[1], (2, tokens), generator=torch.Generator().manual_seed(seed))
    columns = torch.from_numpy(statistics.sample.positions)[picks]
    return keys[:, picks].transpose(0, 1), values[:, picks].transpose(0, 1), columns


def read_slowly(codec, layer, kind, fields, planes):
    """Components [head_dim] of one token and head from their bytes, as docs/format.md says."""
    levels = {
        int(name.rsplit("_", 1)[1]): codec.state[name][layer].tolist()
        for name in codec.state
        if name.startswith(f"{kind}_levels_")
    }
    bits = {"fields": list(fields), "planes": list(planes)}
    bits = {name: [byte >> i & 1 for byte in stored for i in range(8)] for name, stored in bits.items()}
    components = []
    for width, runs in itertools.groupby(codec.state[f"{kind}_widths"][layer].tolist()):
        n = 8 * len(list(runs))
        field_bits, num_planes = FIELD_BITS_AND_PLANES[width]
        codes = [0] * n
        for j in range(n):
            for i in range(field_bits):
                codes[j] |= bits["fields"].pop(0) << i
        for _ in range(num_planes):
            codes = [code << 1 | bits["planes"].pop(0) for code in codes]
        components += [levels[width][code] if width else 0.0 for code in codes]
    assert bits == {"fields": [], "planes": []}
    return components


@turbo_head_dims
@turbo_bits
def test_turbo_stores_its_mean_bits_exactly(turbo_statistics, turbo_codec_of, bits, head_dim):
    codec = turbo_codec_of(bits, head_dim)
    for layer in range(LAYERS):
        keys, values, columns = turbo_tokens(turbo_statistics[head_dim], layer)
        packed = codec.quantize(layer, *codec.transform(layer, keys, values, columns))
        assert {tensor.dtype for tensor in packed.values()} == {torch.uint8}
        sizes = {name: tensor.shape[-1] for name, tensor in packed.items()}
        assert 8 * sum(sizes.values()) / (2 * head_dim) == bits
        for kind in ("key", "value"):
            widths = codec.state[f"{kind}_widths"][layer].tolist()
            assert sum(widths) == sizes[f"{kind}_fields"] + sizes[f"{kind}_planes"]
            assert widths == sorted(widths, reverse=True)
            assert set(widths) <= set(FIELD_BITS_AND_PLANES)


@turbo_head_dims
@turbo_bits
def test_turbo_reads_what_the_format_says(turbo_statistics, turbo_codec_of, bits, head_dim):
    codec = turbo_codec_of(bits, head_dim)
    keys, values, columns = turbo_tokens(turbo_statistics[head_dim], 1, tokens=2)
    mapped = codec.transform(1, keys, values, columns)
    packed = codec.quantize(1, *mapped)
    decoded = codec.dequantize_keys(1, packed), codec.dequantize_values(1, packed)
    for kind, x, x_hat in zip(("key", "value"), mapped, decoded, strict=True):
        fields, planes = (packed[f"{kind}_{part}"] for part in ("fields", "planes"))
        for index in np.ndindex(*fields.shape[:3]):
            slow = read_slowly(codec, 1, kind, fields[index].tolist(), planes[index].tolist())
            assert x_hat[index].tolist() == slow
        # Every component is at the nearest level of its width.
        widths = np.repeat(codec.state[f"{kind}_widths"][1].numpy(), 8)
        for component, width in enumerate(widths):
            levels = codec.state[f"{kind}_levels_{width}"][1] if width else torch.zeros(1)
            distance = (x[..., component, None] - levels).abs().amin(dim=-1)
            torch.testing.assert_close((x - x_hat)[..., component].abs(), distance, rtol=0, atol=1e-6)


@turbo_head_dims
@turbo_bits
def test_turbo_shares_bits_out_as_no_other_way_is_better(turbo_statistics, turbo_codec_of, bits, head_dim):
    stats, codec = turbo_statistics[head_dim], turbo_codec_of(bits, head_dim)
    keys, values = stats.sensitivity.keys, stats.residues.values
    relative = keys.covariance
    key_costs = component_variances(query_aware(relative, stats.sensitivity.queries, 1e-3), relative)
    value_costs = component_variances(
        query_aware(values.covariance, stats.output_gram, 1e-3, rotary_pairs=False), values.covariance
    )
    distortion = np.array([GAUSSIAN_DISTORTIONS[width] for width in FIELD_BITS_AND_PLANES])
    num_bytes = bits * head_dim // 4
    for layer in range(LAYERS):
        runs = [costs[layer].sum(axis=0).reshape(-1, 8).sum(axis=1) for costs in (key_costs, value_costs)]
        widths = [codec.state[f"{kind}_widths"][layer].numpy() for kind in ("key", "value")]
        error = sum(
            float(np.sum(cost * np.array([GAUSSIAN_DISTORTIONS[w] for w in width])))
            for cost, width in zip(runs, widths, strict=True)
        )
        # The least error with at most so many bytes, run after run; the whole words of each kind come last.
        tables = []
        for costs in runs:
            best = np.zeros(num_bytes + 1)
            for cost in costs:
                options = [
                    np.concatenate([np.full(width, np.inf), best[: num_bytes + 1 - width] + cost * share])
                    for width, share in zip(FIELD_BITS_AND_PLANES, distortion, strict=True)
                    if width <= num_bytes
                ]
                best = np.min(options, axis=0)
            tables.append(best)
        step = 4 if num_bytes >= 16 else 1
        least = min(tables[0][n] + tables[1][num_bytes - n] for n in range(0, num_bytes + 1, step))
        assert error == pytest.approx(least, rel=1e-6)


def test_turbo_shares_are_the_best_of_all_there_are(turbo_statistics, turbo_codec_of):
    """The recursion above against plain enumeration."""
    stats, codec = turbo_statistics[16], turbo_codec_of(2, 16)
    relative, values = stats.sensitivity.keys.covariance, stats.residues.values.covariance
    key_costs = component_variances(query_aware(relative, stats.sensitivity.queries, 1e-3), relative)
    value_costs = component_variances(query_aware(values, stats.output_gram, 1e-3, rotary_pairs=False), values)
    runs = np.concatenate([costs[0].sum(axis=0).reshape(2, 8).sum(axis=1) for costs in (key_costs, value_costs)])
    errors = {
        widths: sum(cost * GAUSSIAN_DISTORTIONS[width] for cost, width in zip(runs, widths, strict=True))
        for widths in itertools.product(FIELD_BITS_AND_PLANES, repeat=4)
        if sum(widths) <= 8
    }
    mine = (*codec.state["key_widths"][0].tolist(), *codec.state["value_widths"][0].tolist())
    assert errors[mine] == pytest.approx(min(errors.values()), rel=1e-6)


@turbo_head_dims
@pytest.mark.parametrize("layer", range(LAYERS))
def test_turbo_keeps_scores_block_by_block(turbo_statistics, turbo_codec_of, head_dim, layer):
    codec = turbo_codec_of(3, head_dim)
    keys, values, columns = turbo_tokens(turbo_statistics[head_dim], layer, tokens=30)
    query = torch.randn(2, HEADS, 4, head_dim, generator=torch.Generator().manual_seed(6))
    stored, _ = codec.transform(layer, keys, values, columns)
    expected = query.double() @ keys.double().transpose(2, 3)
    sizes = query.norm(dim=-1)[..., None] * keys.norm(dim=-1)[..., None, :]
    for block in range(int(columns.max()) // KEY_BLOCK + 1):
        mapped, offset = mapped_query(codec, layer, query, block)
        scores = mapped.double() @ stored.double().transpose(2, 3) + offset
        inside = (columns // KEY_BLOCK == block)[:, None, None].expand_as(scores)
        assert (((scores - expected).abs() / sizes)[inside] < 2e-4).all()


def test_turbo_maps_queries_for_many_blocks_at_once(turbo_codec_of):
    codec = turbo_codec_of(3, 24)
    query = torch.randn(2, HEADS, 4, 24, generator=torch.Generator().manual_seed(6))
    mapped, offsets = codec.map_query(0, query, 2, 5)
    assert mapped.shape == (2, HEADS, 5, 4, 24)
    assert offsets.shape == (2, HEADS, 5, 4, 1)
    for index in range(5):
        one, offset = mapped_query(codec, 0, query, 2 + index)
        torch.testing.assert_close(mapped[:, :, index], one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(offsets[:, :, index], offset, rtol=1e-5, atol=1e-5)


@turbo_head_dims
def test_turbo_maps_go_back(turbo_statistics, turbo_codec_of, head_dim):
    codec = turbo_codec_of(3, head_dim)
    keys, values, columns = turbo_tokens(turbo_statistics[head_dim], 0)
    mapped_keys, mapped_values = codec.transform(0, keys, values, columns)
    again = codec.inverse_transform(0, mapped_keys, mapped_values, columns)
    torch.testing.assert_close(again[0], keys, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again[1], values, rtol=1e-3, atol=1e-3)
    weights = torch.rand(2, HEADS, 5, 9, generator=torch.Generator().manual_seed(2)).softmax(dim=-1)
    output = codec.unmap_output(0, weights @ mapped_values)
    torch.testing.assert_close(output, weights @ values, rtol=1e-3, atol=1e-3)


def test_turbo_columns_count_from_zero_by_default(turbo_statistics, turbo_codec_of):
    codec = turbo_codec_of(3, 16)
    keys, values, _ = turbo_tokens(turbo_statistics[16], 0, tokens=150)
    columns = torch.arange(150).expand(2, -1)
    for told, default in zip(codec.transform(0, keys, values, columns), codec.transform(0, keys, values), strict=True):
        assert torch.equal(told, default)


@turbo_head_dims
def test_turbo_components_have_unit_size_and_gaussian_distortion(turbo_statistics, turbo_codec_of, head_dim):
    """The data are Gaussian, so that each width leaves the published share of the variance."""
    stats = turbo_statistics[head_dim]
    for bits in TURBO:
        codec = turbo_codec_of(bits, head_dim)
        for layer in range(LAYERS):
            keys, values = (torch.from_numpy(x[layer])[None] for x in (stats.sample.keys, stats.sample.values))
            mapped = codec.transform(layer, keys, values, torch.from_numpy(stats.sample.positions)[None])
            packed = codec.quantize(layer, *mapped)
            decoded = codec.dequantize_keys(layer, packed), codec.dequantize_values(layer, packed)
            for kind, x, x_hat in zip(("key", "value"), mapped, decoded, strict=True):
                torch.testing.assert_close(x.square().mean(dim=2), torch.ones(1, HEADS, head_dim), rtol=0.01, atol=0)
                error = (x - x_hat).square().mean(dim=(0, 1, 2))
                widths = codec.state[f"{kind}_widths"][layer].repeat_interleave(8)
                for width in widths.unique().tolist():
                    found = error[widths == width].mean().item()
                    # Tables are shared by heads and layers; a sample of a few thousand has no exact tails.
                    assert found == pytest.approx(GAUSSIAN_DISTORTIONS[width], rel=0.35 if width > 4 else 0.12)


def test_turbo_levels_are_symmetric_and_shared(turbo_codec_of):
    for bits in TURBO:
        state = turbo_codec_of(bits, 64).state
        for name in [name for name in state if "_levels_" in name]:
            levels = state[name]
            assert levels.shape == (LAYERS, 2 ** int(name.rsplit("_", 1)[1]))
            assert torch.equal(levels, levels[:1].expand_as(levels))
            assert torch.equal(levels, -levels.flip(1))
            assert (levels.diff(dim=1) > 0).all()


def test_turbo_does_not_see_outlier_channels(turbo_statistics):
    """Key channels scaled by a and query channels by 1 / a, pair by pair: the same function, the same bytes."""
    stats = turbo_statistics[16]
    scale = np.ones(16)
    scale[[3, 11]], scale[[6, 14]] = 64.0, 1 / 256.0
    keys = turned(stats.sample.keys.astype(np.float64), -(stats.sample.positions // KEY_BLOCK) * KEY_BLOCK)
    rng = np.random.default_rng(2)
    queries = correlated(rng, keys.shape[2], 16, decay=0.2)
    values = stats.sample.values.astype(np.float64)
    packed = []
    for s in (np.ones(16), scale):
        after_rope = turned(keys * s, stats.sample.positions // KEY_BLOCK * KEY_BLOCK)
        planted = statistics_of(after_rope, values, queries=queries / s, positions=stats.sample.positions)
        codec = fitted(TURBO[4], planted)
        x = torch.from_numpy(after_rope[0].astype(np.float32))[None]
        y = torch.from_numpy(values[0].astype(np.float32))[None]
        columns = torch.from_numpy(stats.sample.positions)[None]
        packed.append(codec.quantize(0, *codec.transform(0, x, y, columns)) | {"widths": codec.state["key_widths"]})
    assert torch.equal(packed[0]["widths"], packed[1]["widths"])
    for name in ("key_fields", "key_planes"):
        # A component at a boundary may fall to either side of it.
        assert (packed[0][name] != packed[1][name]).sum() <= 1e-3 * packed[0][name].numel()
    for name in ("value_fields", "value_planes"):
        assert torch.equal(packed[0][name], packed[1][name])


@turbo_bits
def test_turbo_residual_is_the_mean_of_what_was_left(turbo_statistics, turbo_codec_of, bits):
    codec = turbo_codec_of(bits, 16)
    keys, values, columns = turbo_tokens(turbo_statistics[16], 0, tokens=12)
    mapped = codec.transform(0, keys + 0.7, values - 0.3, columns)
    packed = codec.quantize(0, *mapped)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = False
    rows = codec.summarize(0, *mapped, packed, mask)
    assert {(name, tensor.dtype, tensor.shape) for name, tensor in rows.items()} == {
        (f"{kind}_residual", torch.bfloat16, (2, HEADS, 1, 16)) for kind in ("key", "value")
    }
    plain = codec.dequantize_keys(0, packed), codec.dequantize_values(0, packed)
    read = codec.dequantize_keys(0, packed | rows), codec.dequantize_values(0, packed | rows)
    for x, before, after in zip(mapped, plain, read, strict=True):
        for row in range(2):
            left = (x[row] - after[row])[:, mask[row]].mean(dim=1)
            size = (x[row] - before[row])[:, mask[row]].mean(dim=1).abs()
            assert (left.abs() <= 2**-8 * size + 1e-6).all()
    nobody = codec.summarize(0, *mapped, packed, torch.zeros_like(mask))
    assert all(not tensor.any() for tensor in nobody.values())


@turbo_bits
def test_turbo_nan_crashes_nothing(turbo_statistics, turbo_codec_of, bits):
    codec = turbo_codec_of(bits, 24)
    keys, values, columns = turbo_tokens(turbo_statistics[24], 0)
    expected = codec.quantize(0, *codec.transform(0, keys, values, columns))
    keys, values = keys.clone(), values.clone()
    keys[1, 0, 2, 3], values[1, 0, 2, 3] = float("nan"), float("inf")
    packed = codec.quantize(0, *codec.transform(0, keys, values, columns))
    for name, tensor in packed.items():
        changed = (tensor != expected[name]).any(dim=-1)
        changed[1, 0, 2] = False
        assert not changed.any()
    assert torch.isfinite(codec.dequantize_keys(0, packed)).all()
    assert torch.isfinite(codec.dequantize_values(0, packed)).all()


def test_turbo_scores_are_better_than_the_papers_at_fewer_bits(turbo_statistics, turbo_codec_of):
    """What the query-aware transform is for: the mean squared error of q . k."""
    stats = turbo_statistics[64]
    root = torch.linalg.cholesky(torch.from_numpy(stats.sensitivity.queries[0])).float()
    queries = (torch.randn(HEADS, 100, 64, generator=torch.Generator().manual_seed(0)) @ root.transpose(1, 2))[None]
    keys, values, columns = turbo_tokens(stats, 0, tokens=200)
    errors = {}
    for name, codec in (("turbo3", turbo_codec_of(3, 64)), ("paper", fitted(PAPER, stats))):
        mapped = codec.transform(0, keys, values, columns)
        packed = codec.quantize(0, *mapped)
        read = codec.inverse_transform(0, codec.dequantize_keys(0, packed), codec.dequantize_values(0, packed), columns)
        errors[name] = (queries @ (read[0] - keys).transpose(2, 3)).square().mean().item()
    assert errors["turbo3"] < 0.5 * errors["paper"]


def test_turbo_is_deterministic(turbo_statistics):
    results = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            results.append(fitted(TURBO[3], turbo_statistics[64]))
    assert_same_state(*results)


def test_turbo_heads_that_cannot_be_packed():
    with pytest.raises(ValueError, match="`head_dim` must be a multiple, got 12"):
        fitted(TURBO[3], gaussian_statistics(12))


# --- every preset, whatever its codec


@pytest.fixture(scope="module")
def calibration(tiny_esm, random_proteins):
    calibrator = KVCalibrator(tiny_esm(head_dim=16, heads=2, layers=2), sample_size=300)
    return calibrator.partial_fit(*random_proteins([150, 90, 120], seed=4, eos=True)).finalize()


def model_like(statistics, layer, tokens=40):
    """Tokens of the calibration's own sample, [1, heads, tokens, head_dim]."""
    keep = ~statistics.sample.is_special
    return [
        torch.from_numpy(x[layer][:, keep][:, :tokens].copy())[None]
        for x in (statistics.sample.keys, statistics.sample.values)
    ]


@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_every_preset_stores_uniform_tokens_and_reads_them_back(calibration, preset):
    codec = calibration.codec(preset)
    assert isinstance(codec, KVCodec)
    keys, values = model_like(calibration.statistics, 1)
    packed = codec.encode(1, keys, values)
    assert all(tensor.shape[:3] == (1, 2, 40) for tensor in packed.values())
    decoded = codec.decode(1, packed)
    for x, x_hat in zip((keys, values), decoded, strict=True):
        assert x_hat.dtype == torch.float32
        # Better than storing the mean.
        spread = (x - x.mean(dim=2, keepdim=True)).square().sum()
        assert (x - x_hat).square().sum() < spread
    again = codec.encode(1, keys, values)
    assert all(torch.equal(again[name], tensor) for name, tensor in packed.items())


@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_every_preset_keeps_scores_and_sums_through_its_maps(calibration, preset):
    codec = calibration.codec(preset)
    keys, values = model_like(calibration.statistics, 0)
    query = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(0))
    mapped, offset = mapped_query(codec, 0, query)
    stored_keys, stored_values = codec.transform(0, keys, values)
    scores = mapped @ stored_keys.float().transpose(2, 3) + offset
    torch.testing.assert_close(scores, query @ keys.transpose(2, 3), rtol=1e-3, atol=1e-3)
    weights = scores.softmax(dim=-1)
    torch.testing.assert_close(
        codec.unmap_output(0, weights @ stored_values.float()), weights @ values, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_stores_what_it_is_given(calibration, dtype):
    codec = calibration.codec("exact")
    assert isinstance(codec, ExactCodec)
    keys, values = (x.to(dtype) for x in model_like(calibration.statistics, 0))
    packed = codec.encode(0, keys, values)
    assert packed["keys"].dtype == dtype
    assert torch.equal(packed["keys"], keys)
    assert torch.equal(packed["values"], values)
    decoded = codec.decode(0, packed)
    assert torch.equal(decoded[0], keys.float())
    assert torch.equal(decoded[1], values.float())
    query, offset = mapped_query(codec, 0, keys)
    assert torch.equal(query, keys.float())
    assert offset == 0


def test_registry_names_the_codecs():
    assert codec_class(PRODUCT_PRESETS["exact"]) is ExactCodec
    assert codec_class(PRODUCT_PRESETS["paper"]) is LutCodec
    assert codec_class(PRODUCT_PRESETS["turbo3"]) is TurboCodec
    assert {config.codec for config in PRODUCT_PRESETS.values()} <= set(CODECS)
    with pytest.raises(ValueError, match=r"`codec` must be one of .*'exact'.*'lut'.*got 'gzip'"):
        codec_class(TurboConfig(codec="gzip"))
