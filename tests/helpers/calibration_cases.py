"""Calibrations of small models, and comparisons of their statistics with Hugging Face's states."""

import numpy as np
import torch
from torch import nn

from esm_turbo import KVCalibrator
from tests.helpers.models import PAD, random_ids

STATES = ("keys", "values")
KINDS = ("residues", "specials")


def thirteen_proteins():
    """Token ids of thirteen proteins, `<cls>` and `<eos>` included; the last is the third again."""
    ids, mask = random_ids([14, 31, 8, 50, 22, 40, 9, 17, 61, 25, 12, 35], seed=3, eos=True)
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    return [*rows, rows[2]]


def batch(rows):
    """Rows of ids as `input_ids` and `attention_mask`, padded on the right."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask


def fitted(model, batches, **options):
    calibrator = KVCalibrator(model, **options)
    for rows in batches:
        calibrator.partial_fit(*batch(rows))
    return calibrator


def statistics_of(model, batches, **options):
    return fitted(model, batches, **options).finalize(presets=()).statistics


def positions_given_to(calibrator, ids, mask=None):
    """Positions passed to the encoder by `partial_fit`, [batch, n], zero under padding."""
    seen = []

    def record(module, args, kwargs):
        seen.append(next(a for a in [*args, *kwargs.values()] if torch.is_tensor(a) and not a.is_floating_point()))

    handle = calibrator._encoder.rotary_embeddings.register_forward_pre_hook(record, with_kwargs=True)
    calibrator.partial_fit(ids, mask)
    handle.remove()
    (packed,) = seen
    positions = torch.zeros_like(ids)
    positions[torch.ones_like(ids).bool() if mask is None else mask.bool()] = packed[0]
    return positions.numpy()


def offset_of(calibrator, row):
    positions = positions_given_to(calibrator, row[None])
    np.testing.assert_array_equal(positions[0], positions[0, 0] + np.arange(len(row)))
    return int(positions[0, 0])


def assert_same_moments(actual, expected, rtol):
    """Means within rtol of a component's root mean square, second moments within rtol of two components'."""
    for kind in KINDS:
        for state in STATES:
            a, b = getattr(getattr(actual, kind), state), getattr(getattr(expected, kind), state)
            assert a.count == b.count
            rms = np.sqrt(np.einsum("lhii->lhi", b.second_moment))
            bound = rms[..., :, None] * rms[..., None, :]
            assert (np.abs(a.mean - b.mean) <= rtol * rms).all(), (kind, state)
            assert (np.abs(a.covariance - b.covariance) <= rtol * bound).all(), (kind, state)


def assert_same_sensitivity(actual, expected, rtol):
    """Every array within rtol of its largest entry; weights are square roots of small sums."""
    actual, expected = actual.sensitivity, expected.sensitivity
    assert actual.count == expected.count
    for name in ("key_mean", "queries", "attention"):
        assert_close(getattr(actual, name), getattr(expected, name), rtol)
    for name in ("keys", "values"):
        for part in ("count", "mean", "covariance"):
            assert_close(getattr(getattr(actual, name), part), getattr(getattr(expected, name), part), rtol)


def assert_close(actual, expected, rtol):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())


def assert_same_sample(actual, expected):
    """The same tokens in the same order; values may differ by one unit in bfloat16's last place."""
    np.testing.assert_array_equal(actual.is_special, expected.is_special)
    np.testing.assert_array_equal(actual.positions, expected.positions)
    assert_close(actual.key_weights, expected.key_weights, 1e-3)
    assert_close(actual.value_weights, expected.value_weights, 1e-3)
    for state in ("keys", "values"):
        np.testing.assert_allclose(getattr(actual, state), getattr(expected, state), rtol=2**-7, atol=1e-4)


def linear_outputs(model, ids, mask):
    """Outputs of the key, query and value projections of Hugging Face's model, [3][layers, batch, n, H, D]."""
    esm = getattr(model, "esm", model)
    attentions = [layer.attention.self for layer in esm.encoder.layer]
    outputs = [[], [], []]
    handles = []
    for attention in attentions:
        for state, name in enumerate(("key", "query", "value")):
            keep = outputs[state].append
            handles.append(
                getattr(attention, name).register_forward_hook(
                    lambda m, args, out, keep=keep: keep(out.double().numpy())
                )
            )
    with torch.no_grad():
        esm(ids, mask)
    for handle in handles:
        handle.remove()
    heads, head_dim = attentions[0].num_attention_heads, attentions[0].attention_head_size
    return [np.stack(layers).reshape(len(attentions), *ids.shape, heads, head_dim) for layers in outputs]


def rope(x, positions):
    """Rotary embedding (Su et al. 2021) of x [layers, batch, n, H, D] at positions [batch, n]."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angles)[None, :, :, None, :] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
