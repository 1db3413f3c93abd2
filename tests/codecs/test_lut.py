"""Look-up tables against the paper, literal bytes, slow twins, scikit-learn and published distortions."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from esm_turbo import TurboConfig
from esm_turbo.codecs import LutCodec
from esm_turbo.config import Geometry
from tests.helpers import reference
from tests.helpers.codec_samples import (
    HEADS,
    LAYERS,
    assert_same_state,
    certain,
    correlated,
    fitted,
    mapped_query,
    statistics_of,
)

PAPER = TurboConfig()
OPTIONS = {
    "paper": PAPER,
    "one bit": TurboConfig(bits=1),
    "two bits": TurboConfig(bits=2, protect_special_tokens=True),
    "five bits": TurboConfig(bits=5),
}


def gaussian_statistics(head_dim, seed=0):
    rng = np.random.default_rng(seed)
    tokens = 150 + 4000 // head_dim
    return statistics_of(correlated(rng, tokens, head_dim), correlated(rng, tokens, head_dim, decay=0.05))


def keys_and_values(statistics, layer, batch_size=2, tokens=7, seed=5):
    """Fresh keys and values of the statistics' own distribution, float32 [batch, heads, tokens, head_dim]."""
    rng = np.random.default_rng(seed)
    drawn = []
    for sample in (statistics.sample.keys, statistics.sample.values):
        picks = rng.integers(0, sample.shape[2], (batch_size, tokens))
        x = sample[layer][:, picks].transpose(1, 0, 2, 3)
        drawn.append(torch.from_numpy((x * rng.normal(1, 0.1, x.shape)).astype(np.float32)))
    return drawn


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


every_option = pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
all_head_dims = pytest.mark.parametrize("head_dim", [16, 24, 128])


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


def test_levels_are_as_good_as_k_means(statistics, codec_of):
    """Section 3.3: one 8-level quantiser over all components of a head."""
    stats = statistics[16]
    state = codec_of(PAPER, 16).state
    for layer, head in [(0, 0), (1, 1)]:
        key_map = state["key_map"][layer, head].double().numpy()
        samples = {
            "key": (stats.sample.keys[layer, head] @ key_map.T).ravel(),
            "value": stats.sample.values[layer, head].ravel(),
        }
        for kind, x in samples.items():
            levels = state[f"{kind}_levels"][layer, head].double().numpy()
            assert (np.diff(levels) > 0).all()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                clusters = KMeans(8, n_init=4, random_state=0, max_iter=200).fit(x[:, None])
            mine = np.square(x[:, None] - levels).min(axis=1).mean()
            assert mine <= 1.001 * clusters.inertia_ / len(x)


@every_option
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


def handmade():
    """A codec of one layer and one head of eight components, with levels that can be read."""
    tables = torch.arange(-7.0, 8, 2)[None, None]
    state = {
        "key_levels": tables,
        "value_levels": tables * 10,
        "key_step": torch.tensor([[0.5]]),
        "value_step": torch.tensor([[5.0]]),
    }
    return LutCodec(PAPER, Geometry(1, 1, 8), state)


# Codes 0 to 7, residuals + - - + + + - +: the fields are code | sign << 3.
COMPONENTS = torch.tensor([-6.6, -5.4, -3.6, -0.9, 1.2, 3.9, 4.1, 7.5])
FIELDS = [8, 1, 2, 11, 12, 13, 6, 15]
WORD = 0xF6DCB218


def test_eight_codes_and_eight_signs_are_one_little_endian_word():
    codec = handmade()
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
    assert torch.equal(codec.unpack(0, "key", packed).flatten(), decoded)
    assert torch.equal(codec.unpack(0, "value", packed).flatten(), 10 * decoded)


def test_ties():
    """Half way between levels goes down; at a level the residual is not positive."""
    codec = handmade()
    x = torch.tensor([-6.0, -4.0, 0.0, 6.0, -7.0, 1.0, 7.0, -0.0]).view(1, 1, 1, 8)
    decoded = codec.unpack(0, "key", codec.quantize(0, x, x)).flatten()
    assert decoded.tolist() == [-6.5, -4.5, -0.5, 5.5, -7.5, 0.5, 6.5, -0.5]


def test_values_outside_the_levels_and_non_finite_values():
    codec = handmade()
    x = torch.tensor([1e30, -1e30, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 100.0]).view(1, 1, 1, 8)
    packed = codec.quantize(0, x, x)
    decoded = codec.unpack(0, "key", packed).flatten()
    assert decoded.tolist() == [7.5, -7.5, 7.5, -7.5, -7.5, 0.5, -0.5, 7.5]
    assert torch.isfinite(codec.unpack(0, "value", packed)).all()


@every_option
def test_nan_affects_only_its_token(statistics, codec_of, config):
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
@every_option
def test_codes_equal_the_reference_bit_for_bit(statistics, codec_of, config, head_dim):
    stats = statistics[head_dim]
    codec = codec_of(config, head_dim)
    layer = 1
    keys, values = codec.transform(layer, *keys_and_values(stats, layer, batch_size=1, tokens=3))
    packed = codec.quantize(layer, keys, values)
    decoded = {"keys": codec.unpack(layer, "key", packed), "values": codec.unpack(layer, "value", packed)}
    for name, x in (("keys", keys), ("values", values)):
        levels, step = (codec.state[f"{name[:-1]}_{part}"][layer] for part in ("levels", "step"))
        codes = reference.quantize(x, (levels[:, 1:] + levels[:, :-1]) / 2).long()
        nearest = torch.stack([levels[head][codes[:, head]] for head in range(HEADS)], dim=1)
        # Nearest indeed, whatever the boundaries were, which are rounded as the differences are.
        distance = (x[..., None] - levels[:, None, None]).abs().amin(dim=-1)
        rounding = 4 * torch.finfo(torch.float32).eps * levels.abs().max().item()
        torch.testing.assert_close((x - nearest).abs(), distance, rtol=0, atol=rounding)
        signs, step = (x > nearest).long(), step[:, None, None]
        fields = codes | signs << config.bits
        assert torch.equal(packed[name], reference.pack_codes(fields.to(torch.uint8), config.bits + 1))
        assert torch.equal(decoded[name], torch.where(signs == 1, nearest + step, nearest - step))


@every_option
def test_tokens_are_encoded_one_by_one(statistics, codec_of, config):
    """A token's bytes depend on the token alone: not on the batch, the block or strides."""
    stats = statistics[24]
    codec = codec_of(config, 24)
    keys, values = keys_and_values(stats, 0, batch_size=3, tokens=9)
    packed = codec.encode(0, keys, values)
    strided = codec.encode(0, keys.transpose(1, 2).contiguous().transpose(1, 2), values.flip(2).flip(2))
    alone = codec.encode(0, keys[1:2, :, 4:6], values[1:2, :, 4:6])
    # The maps' sums may be grouped otherwise: a component at a boundary may go to the other side of it.
    sure = certain(codec, 0, keys, values)
    assert sure.sum() >= 9
    for name, tensor in packed.items():
        assert tensor.is_contiguous()
        assert not (tensor != strided[name]).any(3).any(1)[sure].any()
        assert not (tensor[1:2, :, 4:6] != alone[name]).any(3).any(1)[sure[1:2, 4:6]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_option
def test_codes_do_not_depend_on_the_dtype_of_the_input(statistics, codec_of, config, dtype):
    stats = statistics[16]
    codec = codec_of(config, 16)
    keys, values = (x.to(dtype) for x in keys_and_values(stats, 0))
    packed, expected = codec.encode(0, keys, values), codec.encode(0, keys.float(), values.float())
    for name, tensor in packed.items():
        assert torch.equal(tensor, expected[name])
    assert codec.unpack(0, "key", packed).dtype == torch.float32


@pytest.mark.parametrize("option", [{"protect_special_tokens": True}, {"seed": 1}, {"mean_bits": 2}])
def test_options_of_other_codecs_change_nothing(statistics, option):
    """The synthetic data has no special tokens, and the paper's transforms are not random."""
    before = fitted(PAPER, statistics[16])
    assert_same_state(before, fitted(dataclasses.replace(PAPER, **option), statistics[16]))


@all_head_dims
@every_option
def test_maps_keep_scores_and_sums_and_go_back(statistics, codec_of, config, head_dim):
    codec = codec_of(config, head_dim)
    query = torch.randn(2, HEADS, 5, head_dim, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(2, HEADS, 5, 11, generator=torch.Generator().manual_seed(2)).softmax(dim=-1)
    for layer in range(LAYERS):
        keys, values = keys_and_values(statistics[head_dim], layer, tokens=11)
        stored_keys, stored_values = codec.transform(layer, keys, values)
        mapped, offset = mapped_query(codec, layer, query)
        scores = mapped.double() @ stored_keys.double().transpose(2, 3) + offset
        expected = query.double() @ keys.double().transpose(2, 3)
        sizes = query.double().norm(dim=-1)[..., None] * keys.double().norm(dim=-1)[..., None, :]
        assert ((scores - expected).abs() / sizes).max() < 1e-4
        output = codec.unmap_output(layer, weights @ stored_values)
        torch.testing.assert_close(output, weights @ values, rtol=1e-4, atol=1e-4)
        again = codec.inverse_transform(layer, stored_keys, stored_values)
        for actual, given in zip(again, (keys, values), strict=True):
            torch.testing.assert_close(actual, given, rtol=1e-4, atol=1e-4)


def test_step_and_distortion_of_three_bits_and_a_sign():
    """By quadrature a unit Gaussian's mean absolute residual is 0.149594, and 0.0345478 - 0.149594^2 = 0.0121693."""
    grid = ndtri((np.arange(96_000) + 0.5) / 96_000).reshape(1, 1, 3000, 32)
    codec = fitted(PAPER, statistics_of(grid, grid, bfloat16=False))
    x = torch.from_numpy(grid.astype(np.float32))
    _, decoded = codec.decode(0, codec.encode(0, x, x))
    assert codec.state["value_step"].item() == pytest.approx(0.149594, abs=5e-5)
    assert (x - decoded).square().mean().item() == pytest.approx(0.0121693, abs=2e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_a_sign_lowers_the_distortion_by_the_square_of_its_step(statistics, codec_of, bits):
    """On the sample itself, whatever its distribution (section 3.4)."""
    codec, stats = codec_of(TurboConfig(bits=bits), 64), statistics[64]
    keys, values = codec.transform(1, *(torch.from_numpy(x[1])[None] for x in (stats.sample.keys, stats.sample.values)))
    packed = codec.quantize(1, keys, values)
    for kind, x in (("key", keys), ("value", values)):
        levels = codec.state[f"{kind}_levels"][1]
        without = (x[..., None] - levels[:, None, None]).square().amin(dim=-1).mean(dim=(0, 2, 3))
        with_sign = (x - codec.unpack(1, kind, packed)).square().mean(dim=(0, 2, 3))
        gain = codec.state[f"{kind}_step"][1].square()
        torch.testing.assert_close(without - with_sign, gain, rtol=2e-3, atol=1e-6)


@every_option
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


def test_heads_that_cannot_be_packed():
    stats = gaussian_statistics(12)
    with pytest.raises(ValueError, match="`head_dim` must be a multiple of 8, got 12"):
        fitted(PAPER, stats)


def test_fitting_and_encoding_are_deterministic(statistics):
    stats = statistics[64]
    keys, values = keys_and_values(stats, 1, tokens=33)
    codecs = []
    for threads in (1, 2, 1):
        with threadpool_limits(threads):
            codecs.append(fitted(PAPER, stats))
    first, *others = codecs
    packed = first.encode(1, keys, values)
    for codec in others:
        assert_same_state(codec, first)
        for name, tensor in codec.encode(1, keys, values).items():
            assert torch.equal(packed[name], tensor)
