"""Collected statistics against Hugging Face's states: moments, sensitivities pair by pair, and the sample."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from esm_turbo import KVCalibrator
from esm_turbo.calibrate import _hash_tokens
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.model import collectors, padding, sensitivity
from tests.helpers.calibration_cases import (
    STATES,
    assert_close,
    assert_same_moments,
    assert_same_sample,
    assert_same_sensitivity,
    batch,
    fitted,
    linear_outputs,
    positions_given_to,
    rope,
    statistics_of,
    thirteen_proteins,
)
from tests.helpers.models import CLS, EOS, PAD


@pytest.fixture(scope="module")
def model(tiny_esm):
    return tiny_esm(head_dim=16, heads=2, layers=2)


@pytest.fixture(scope="module")
def proteins():
    return thirteen_proteins()


def direct_tokens(model, ids, mask, positions):
    """Keys and values, [layers, H, tokens, D], and which of the tokens are special."""
    keys, _, values = linear_outputs(model, ids, mask)
    keep = mask.numpy().astype(bool)
    states = (rope(keys, positions), values)
    special = np.isin(ids.numpy(), (CLS, EOS))[keep]
    return [x[:, keep].transpose(0, 2, 1, 3) for x in states], special


def assert_moments_are(moments, tokens, rtol):
    count = tokens.shape[2]
    mean = tokens.mean(axis=2)
    centred = tokens - mean[:, :, None]
    covariance = np.einsum("lhti,lhtj->lhij", centred, centred) / count
    rms = np.sqrt(np.square(tokens).mean(axis=2))
    assert moments.count == count
    assert (np.abs(moments.mean - mean) <= rtol * rms).all()
    assert (np.abs(moments.covariance - covariance) <= rtol * rms[..., :, None] * rms[..., None, :]).all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("max_positions", [1, 300, 1024])
def test_moments_are_those_of_hugging_faces_projections(tiny_esm, proteins, head_dim, implementation, max_positions):
    model = tiny_esm(head_dim=head_dim, heads=3, layers=2, attn_implementation=implementation)
    ids, mask = batch(proteins)
    calibrator = KVCalibrator(model, max_positions=max_positions, sample_size=10_000)
    positions = positions_given_to(calibrator, ids, mask)
    statistics = calibrator.finalize(presets=()).statistics
    states, special = direct_tokens(model, ids, mask, positions)
    # Angles near 1,000 rad are known to 6e-5 in float32.
    for state, tokens in zip(STATES, states, strict=True):
        assert_moments_are(getattr(statistics.residues, state), tokens[:, :, ~special], rtol=3e-4)
        assert_moments_are(getattr(statistics.specials, state), tokens[:, :, special], rtol=3e-4)
    # A sample that is large enough is all tokens, in an order of its own.
    sample = statistics.sample
    assert sample.is_special.sum() == special.sum() == 2 * len(proteins)
    for mine, direct in zip((sample.keys, sample.values), states, strict=True):
        assert mine.shape == direct.shape
        np.testing.assert_allclose(
            np.sort(mine, axis=2), np.sort(direct, axis=2), rtol=2**-8, atol=1e-3 * np.abs(direct).max()
        )
    for layer, module in enumerate(model.esm.encoder.layer):
        weight = module.attention.output.dense.weight.detach().double().numpy()
        for head in range(3):
            columns = weight[:, head * head_dim : (head + 1) * head_dim]
            np.testing.assert_allclose(statistics.output_gram[layer, head], columns.T @ columns, rtol=1e-5, atol=1e-6)


def direct_sensitivity(model, ids, mask, positions, drawn):
    """`Sensitivity` by its definition, one pair of tokens after another; the weights of all tokens of the batch.

    In every row only the residues in `drawn` are queries; each represents an equal share of all residues.
    """
    raw = linear_outputs(model, ids, mask)
    keys, queries = rope(raw[0], positions), rope(raw[1], positions) * raw[1].shape[-1] ** -0.5
    values = raw[2]
    layers, batch_size, width, heads, head_dim = keys.shape
    output = [layer.attention.output.dense.weight.detach().double().numpy() for layer in model.esm.encoder.layer]
    weights = np.zeros((2, layers, heads, batch_size, width))
    found = {
        "count": 0,
        "queries": np.zeros((layers, heads, head_dim, head_dim)),
        "attention": np.zeros((layers, heads)),
    }
    relative = rope(keys, -(positions // KEY_BLOCK) * KEY_BLOCK)
    residue = mask.numpy().astype(bool) & ~np.isin(ids.numpy(), (CLS, EOS))
    for layer, head, row in np.ndindex(layers, heads, batch_size):
        n = int(mask[row].sum())
        q, k, v = (x[layer, row, :n, head] for x in (queries, keys, values))
        w = output[layer][:, head * head_dim : (head + 1) * head_dim]
        scores = np.exp(q @ k.T)
        attention = scores / scores.sum(axis=1, keepdims=True)
        for j in np.flatnonzero(residue[row]):
            block = np.full((1, 1), -(positions[row, j] // KEY_BLOCK) * KEY_BLOCK)
            share = residue[row].sum() / len(drawn[row])
            for i in drawn[row]:
                if i == j:
                    continue
                squared = share * attention[i, j] ** 2
                gain = squared * np.square(w @ (v[j] - attention[i] @ v)).sum()
                rotated = rope(q[i][None, None, None, None], block).ravel()
                found["queries"][layer, head] += gain * np.outer(rotated, rotated)
                found["attention"][layer, head] += squared
                weights[:, layer, head, row, j] += gain, squared
    count = int(residue.sum())
    weights = np.sqrt(weights)
    for name, x, weight in (("keys", relative, weights[0]), ("values", values, weights[1])):
        x, weight = x.transpose(0, 3, 1, 2, 4)[:, :, residue], weight[:, :, residue]
        total = weight.sum(axis=2)
        share = (weight / total[..., None])[..., None]
        mean = (share * x).sum(axis=2)
        centred = x - mean[:, :, None]
        found[name] = (total, mean, np.swapaxes(share * centred, 2, 3) @ centred)
    found["key_mean"] = relative.transpose(0, 3, 1, 2, 4)[:, :, residue].mean(axis=2)
    found |= {"count": count, "queries": found["queries"] / count, "attention": found["attention"] / count}
    return found, weights[:, :, :, mask.numpy().astype(bool)]


def drawn_queries(ids, mask):
    """Indices of the residues drawn as queries, per row."""
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    residues = [~torch.isin(row, torch.tensor([CLS, EOS])) for row in rows]
    return [collectors._draw_queries(x, _hash_tokens(row)).numpy() for x, row in zip(residues, rows, strict=True)]


@pytest.mark.parametrize("residues_per_query", [1, collectors._RESIDUES_PER_QUERY])
def test_sensitivities_follow_their_definition(tiny_esm, random_proteins, monkeypatch, residues_per_query):
    monkeypatch.setattr(collectors, "_RESIDUES_PER_QUERY", residues_per_query)
    model = tiny_esm(head_dim=16, heads=2, layers=2)
    # The longest crosses a block's end wherever it begins.
    ids, mask = random_proteins([70, 21, 9], seed=11, eos=True)
    calibrator = KVCalibrator(model, sample_size=1000)
    positions = positions_given_to(calibrator, ids, mask)
    statistics = calibrator.finalize(presets=()).statistics
    drawn = drawn_queries(ids, mask)
    assert [len(chosen) for chosen in drawn] == [-(-n // residues_per_query) for n in (68, 19, 7)]
    expected, weights = direct_sensitivity(model, ids, mask, positions, drawn)
    mine = statistics.sensitivity
    assert mine.count == expected["count"] == 94
    for name in ("key_mean", "queries", "attention"):
        assert_close(getattr(mine, name), expected[name], 1e-3)
    for name in ("keys", "values"):
        for part, direct in zip(("count", "mean", "covariance"), expected[name], strict=True):
            assert_close(getattr(getattr(mine, name), part), direct, 1e-3)
    # The sample is all tokens in an order of its own.
    sample = statistics.sample
    np.testing.assert_array_equal(np.sort(sample.positions), np.sort(positions[mask.numpy().astype(bool)]))
    for sampled, direct in ((sample.key_weights, weights[0]), (sample.value_weights, weights[1])):
        assert_close(np.sort(sampled, axis=2), np.sort(direct, axis=2), 1e-3)
    np.testing.assert_allclose(statistics.inv_freq, 10000.0 ** (-np.arange(8) / 8), rtol=1e-6)


def test_heads_one_at_a_time_give_the_same(model, proteins, monkeypatch):
    together = statistics_of(model, [proteins])
    monkeypatch.setattr(sensitivity, "_MAX_PAIRS", 1)
    apart = statistics_of(model, [proteins])
    assert_same_sensitivity(apart, together, rtol=1e-6)
    assert_same_sample(apart.sample, together.sample)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Proteins padded together and sums in float64 tensors, as on a CUDA device."""
    monkeypatch.setattr(padding, "_MAX_PAIRS", {"cpu": 40_000})
    monkeypatch.setattr(collectors, "_SUMS_ON", ("cpu",))


def test_proteins_padded_together_give_the_same(tiny_esm, random_proteins, request):
    # Lengths that share a tensor, one that does not fit, and proteins without residues; blocks begin inside.
    ids, mask = random_proteins([70, 21, 9, 300, 80, 81, 64], seed=11, eos=True)
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    batches = [[*rows[:3], torch.tensor([CLS, EOS]), *rows[3:]], [rows[1], rows[0]], [torch.tensor([CLS, EOS])]]
    model = tiny_esm(head_dim=16, heads=2, layers=2)
    alone = statistics_of(model, batches)
    request.getfixturevalue("as_on_cuda")
    assert len(list(padding.parts_together([len(row) for row in batches[0]], torch.device("cpu")))) == 3
    together = statistics_of(model, batches)
    assert_same_moments(together, alone, rtol=1e-5)
    assert_same_sensitivity(together, alone, rtol=1e-5)
    assert_same_sample(together.sample, alone.sample)


@pytest.mark.parametrize("tokens", [0, 5, 1024, 1300])
def test_sums_over_tokens_in_parts(as_on_cuda, tokens):
    a, b = (torch.randn(3, tokens, size, dtype=torch.float64) for size in (8, 5))
    torch.testing.assert_close(collectors.sum_over_tokens(a, b), a.mT @ b)


@pytest.mark.gpu
def test_a_cuda_device_gathers_what_a_processor_does(tiny_esm, random_proteins):
    ids, mask = random_proteins([70, 21, 9, 300, 80, 81, 64], seed=11, eos=True)
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    batches = [[*rows[:3], torch.tensor([CLS, EOS]), *rows[3:]], [rows[1], rows[0]]]
    model = tiny_esm(head_dim=16, heads=2, layers=2)
    expected = statistics_of(model, batches)
    calibrator = fitted(model.to("cuda"), batches)
    assert calibrator._residues.keys.mean.device.type == "cuda"
    found = calibrator.finalize(presets=()).statistics
    assert_same_moments(found, expected, rtol=1e-3)
    assert_same_sensitivity(found, expected, rtol=1e-3)
    assert_same_sample(found.sample, expected.sample)


def test_statistics_of_a_device_travel_as_arrays(model, proteins, as_on_cuda):
    expected = statistics_of(model, [proteins[:4], proteins[4:]])
    there = fitted(model, [proteins[4:]])
    assert isinstance(there._residues.keys.mean, torch.Tensor)
    part = pickle.loads(pickle.dumps(there.take()))
    assert isinstance(part.sensitivity.keys.count, np.ndarray)
    here = fitted(model, [proteins[:4]]).merge(part)
    assert_same_moments(here.finalize(presets=()).statistics, expected, rtol=1e-6)
    # Also where the arrays came first.
    here = KVCalibrator(model).merge(part).merge(fitted(model, [proteins[:4]]).take())
    assert_same_sensitivity(here.finalize(presets=()).statistics, expected, rtol=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=6))
def test_padding_is_undone(bounds):
    parts = [slice(start, start + length) for start, length in bounds]
    row = torch.arange(1, 65).reshape(2, 32)
    segments = padding.Padding(parts, torch.device("cpu"))
    padded = segments.pad(row[..., None])
    assert padded.shape == (2, len(parts), segments.longest, 1)
    assert torch.equal(segments.unpad(padded)[..., 0], torch.cat([row[:, part] for part in parts], dim=1))
    if segments.mask is not None:
        assert segments.mask.sum(1).tolist() == [length for _, length in bounds]
    added, expected = torch.zeros_like(row), torch.zeros_like(row)
    segments.add_to(added, padded[..., 0])
    for part in parts:
        expected[:, part] += row[:, part]
    assert torch.equal(added, expected)


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_every_protein_is_in_one_group(lengths):
    groups = list(padding.parts_together(lengths, torch.device("cuda")))
    assert [one for group in groups for one in lengths[group]] == lengths
    assert list(padding.parts_together(lengths, torch.device("cpu"))) == [slice(i, i + 1) for i in range(len(lengths))]


def test_queries_are_spread_evenly_and_depend_on_the_sequence_alone():
    residues = torch.ones(107, dtype=torch.bool)
    residues[[0, 40, 41, 106]] = False
    # 103 residues in 13 stretches of 7 or 8.
    stretches = np.split(np.flatnonzero(residues), np.arange(1, 13) * 103 // 13)
    drawn = {seed: collectors._draw_queries(residues, seed) for seed in (0, 1, 2**64 - 1)}
    for seed, chosen in drawn.items():
        assert torch.equal(collectors._draw_queries(residues, seed), chosen)
        for index, stretch in zip(chosen.tolist(), stretches, strict=True):
            assert index in stretch
    assert len({tuple(chosen.tolist()) for chosen in drawn.values()}) == 3


def test_every_residue_is_equally_likely_to_be_a_query():
    residues = torch.ones(3 * collectors._RESIDUES_PER_QUERY, dtype=torch.bool)
    counts = sum(np.bincount(collectors._draw_queries(residues, seed), minlength=len(residues)) for seed in range(2000))
    assert chisquare(counts).pvalue > 1e-3


def test_proteins_without_residues_change_no_sensitivity(model, proteins):
    empty = torch.tensor([CLS, EOS])
    alone = statistics_of(model, [proteins[:3]])
    among = statistics_of(model, [[proteins[0], empty, *proteins[1:3]], [empty]])
    assert among.specials.keys.count == alone.specials.keys.count + 4
    assert_same_sensitivity(among, alone, rtol=1e-5)


def test_sampled_keys_stand_where_the_sample_says(tiny_esm, random_proteins):
    """Rotated back by its position, a key of the first layer depends on its token alone."""
    model = tiny_esm(head_dim=16, heads=2, layers=1)
    ids, mask = random_proteins([80, 50], seed=2, eos=True)
    assert set(ids[1].tolist()) - {PAD} <= set(ids[0].tolist())
    sample = KVCalibrator(model).partial_fit(ids, mask).finalize(presets=()).statistics.sample
    back = rope(sample.keys.transpose(0, 2, 1, 3)[:, None], -sample.positions[None])[0, 0]
    raw, _, values = (x[0, 0] for x in linear_outputs(model, ids[:1], mask[:1]))
    for key, value in zip(back, sample.values[0].transpose(1, 0, 2), strict=True):
        # The first protein has every letter that the second has.
        token = np.square(values - value).sum(axis=(1, 2)).argmin()
        np.testing.assert_allclose(values[token], value, rtol=2**-7, atol=1e-2)
        np.testing.assert_allclose(key, raw[token], rtol=0, atol=0.01 * np.abs(raw).max())
