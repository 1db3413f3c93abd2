"""Comparison codecs fitted to isotropic statistics, and measures of what they store."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec, codec_class
from esm_turbo.config import PRESETS, Geometry, TurboConfig

HEAD_DIMS = (16, 24, 32, 64, 128)
_SEEDS = 400


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int = 0) -> Tensor:
    x = normal(*shape, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


def make_codec(
    preset: str | TurboConfig, head_dim: int, *, heads: int = 2, layers: int = 1, channel_std: Tensor | None = None
) -> KVCodec:
    """A codec, where it looks at statistics fitted to isotropic ones, or to channels of these standard deviations."""
    config = TurboConfig.from_preset(preset)
    geometry = Geometry(layers, heads, head_dim)
    std = np.ones(head_dim) if channel_std is None else channel_std.numpy().astype(np.float64)
    shape = (layers, heads, head_dim)
    moments = SimpleNamespace(second_moment=np.broadcast_to(np.diag(std**2), (*shape, head_dim)))
    vectors = np.random.default_rng(0).standard_normal((layers, heads, 256, head_dim)) * std
    sample = SimpleNamespace(keys=vectors, values=vectors)
    statistics = SimpleNamespace(
        geometry=geometry, select=lambda protect: (SimpleNamespace(keys=moments, values=moments), sample)
    )
    cls = codec_class(config)
    return cls(config, geometry, cls.fit(config, statistics))


def decoded(codec: KVCodec, x: Tensor) -> tuple[Tensor, Tensor]:
    return codec.decode(0, codec.encode(0, x, x))


def stored_scores(codec: KVCodec, query: Tensor, packed: dict[str, Tensor]) -> Tensor:
    """Scores of queries [B, H, n, D] in the codec's space, [B, H, n, L]."""
    mapped, offset = codec.map_query(0, query)
    scores = mapped[:, :, 0] @ codec.unpack(0, "key", packed).mT
    return scores if offset is None else scores + offset[:, :, 0]


def relative_mse(x: Tensor, other: Tensor) -> float:
    return float((x - other).square().sum() / x.square().sum())


def estimates(preset: TurboConfig, head_dim: int, query: Tensor, keys: Tensor, seeds: int) -> Tensor:
    """q . k of every key as codecs of many seeds give it, [seeds, keys]."""
    rows = []
    for seed in range(seeds):
        codec = make_codec(replace(preset, seed=seed), head_dim, heads=1)
        packed = codec.encode(0, keys[None, None], keys[None, None])
        rows.append(stored_scores(codec, query[None, None, None], packed)[0, 0, 0])
    return torch.stack(rows)


def assert_unbiased_scores(preset: str, head_dim: int) -> None:
    """The mean over random projections, of keys at all angles to the query, lies within its own error of the score."""
    query, away = unit(head_dim, seed=1), unit(head_dim, seed=2)
    away = away - query * (query @ away)
    away = away / away.norm()
    cosines = torch.tensor([1.0, 0.8, 0.3, 0.0, -0.6])
    keys = cosines[:, None] * query + (1 - cosines.square()).sqrt()[:, None] * away
    found = estimates(PRESETS[preset], head_dim, query, keys, _SEEDS)
    standard_error = found.std(0) / math.sqrt(_SEEDS)
    assert bool(((found.mean(0) - cosines).abs() < 4 * standard_error + 1e-3).all())
    assert float(standard_error.max()) < 0.02
