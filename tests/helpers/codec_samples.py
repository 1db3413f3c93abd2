"""Keys, values and statistics for the tests of codecs."""

import dataclasses

import numpy as np
import torch

from esm_turbo import Calibration
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK, KVStatistics, Moments, Sensitivity, TokenMoments, TokenSample
from esm_turbo.config import Geometry

LAYERS, HEADS = 2, 2
INV_FREQ = {d: 10000.0 ** (-np.arange(d // 2) / (d // 2)) for d in (8, 12, 16, 24, 32, 64, 72, 128, 136)}


def correlated(rng, tokens, head_dim, decay=0.12):
    """Vectors [LAYERS, HEADS, tokens, head_dim] with variances falling along random directions and a non-zero mean."""
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


def statistics_of(keys, values, is_special=None, queries=None, positions=None, bfloat16=True):
    """Statistics whose sample is all tokens: keys, values and queries [layers, heads, tokens, head_dim].

    All tokens have the same weight, and so have all errors of a head's output.
    """
    if bfloat16:
        keys, values = as_bfloat16(keys), as_bfloat16(values)
    layers, heads, tokens, head_dim = keys.shape
    stack = (layers, heads)
    is_special = np.zeros(tokens, dtype=bool) if is_special is None else is_special
    positions = np.zeros(tokens, dtype=np.int64) if positions is None else positions
    queries = keys if queries is None else queries
    states = [x.astype(np.float64) for x in (keys, values)]

    def token_moments(mask):
        return TokenMoments(
            *(moments_of(x[:, :, mask]) if mask.any() else Moments.empty(*stack, head_dim) for x in states)
        )

    inv_freq = INV_FREQ[head_dim]
    relative = rotated(keys.astype(np.float64), -(positions // KEY_BLOCK) * KEY_BLOCK)
    sensitivity = Sensitivity(
        tokens,
        relative.mean(axis=2),
        dataclasses.replace(moments_of(relative), count=np.full(stack, float(tokens))),
        dataclasses.replace(moments_of(states[1]), count=np.full(stack, float(tokens))),
        moments_of(queries.astype(np.float64)).second_moment,
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


def rotated(x, positions):
    """RoPE (Su et al. 2021) of x [..., tokens, head_dim] by positions [tokens]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * INV_FREQ[x.shape[-1]]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def fitted(config, statistics):
    """A codec fitted as users fit one: with one BLAS thread, whatever the environment says."""
    return Calibration(statistics, np.zeros(0, dtype=np.float32), {}).codec(config)


def certain(codec, layer, keys, values, columns=None):
    """Tokens whose codes do not depend on how the maps' products are summed, bool [B, L].

    However n products are summed in float32, the sum is within (n + 2) 2^-24 of the products' sizes together (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1); a rotation, the mean and rounding the map add six.
    Two such sums lie twice as far apart at most, and codes rise with the number: so they are compared at both ends.
    """
    state = codec.layer_state(layer, keys.device)
    mapped = codec.transform(layer, keys, values, columns)
    heads, head_dim = keys.shape[1], keys.shape[3]
    margins = []
    for kind, x in (("key", keys), ("value", values)):
        size = x.abs()
        if kind == "key" and codec.block_size is not None:
            size = size + size.roll(head_dim // 2, dims=-1)
        size = size + state.get(f"{kind}_mean", torch.zeros(heads, head_dim)).abs()[:, None]
        matrix = state.get(f"{kind}_map", torch.zeros(heads, head_dim, head_dim))
        margins.append(2 * (head_dim + 8) * 2**-24 * size @ matrix.abs().transpose(1, 2))
    low, high = (
        codec.quantize(layer, *(x + sign * margin for x, margin in zip(mapped, margins, strict=True)))
        for sign in (-1, 1)
    )
    return torch.stack([(low[name] == high[name]).flatten(3).all(3).all(1) for name in low]).all(0)


def certain_tokens(codec, layer, batch, length, generator, start=None):
    """Random keys and values [batch, heads, length, head_dim] whose codes no rounding changes (see `certain`)."""
    shape = (2, batch, codec.geometry.num_heads, length, codec.geometry.head_dim)
    columns = torch.arange(length) + (torch.zeros(batch, 1, dtype=torch.int64) if start is None else start[:, None])
    drawn = torch.randn(shape, generator=generator)
    while (again := ~certain(codec, layer, *drawn, columns)).any():
        drawn = torch.where(again[:, None, :, None], torch.randn(shape, generator=generator), drawn)
    return drawn


def mapped_query(codec, layer, query, block=0):
    """The query mapped for the stored keys of one block, and its score offset (a number or [B, H, n, 1])."""
    mapped, offset = codec.map_query(layer, query, block, 1)
    return mapped[:, :, 0], 0 if offset is None else offset[:, :, 0]


def assert_same_state(one, other, atol=0.0):
    assert one.state.keys() == other.state.keys()
    for name, tensor in one.state.items():
        torch.testing.assert_close(tensor, other.state[name], rtol=0, atol=atol, msg=name)
