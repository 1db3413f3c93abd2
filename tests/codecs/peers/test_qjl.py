"""QJL: unbiased scores, and its outlier channels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo.codecs.peers.jl import orthogonal_gain
from tests.helpers.peer_codecs import assert_unbiased_scores, make_codec, normal


@pytest.mark.parametrize("preset", ["qjl", "qjl_outliers"])
@pytest.mark.parametrize("head_dim", [64, 24, 16])
def test_scores_are_unbiased(preset: str, head_dim: int) -> None:
    assert_unbiased_scores(preset, head_dim)


def plain_scores(query: Tensor, keys: Tensor, rows: Tensor, signs: tuple[int, int], count: int) -> Tensor:
    """Scores of queries [n, D] with keys [L, D] of one head as the authors' program computes them, key by key.

    Args:
        rows: of the projection, [m, D].
        signs: of a key's other channels, and of its outliers.
        count: of the outliers.
    """
    dim = keys.shape[1]
    scores = torch.zeros(len(query), len(keys), dtype=torch.float64)
    for start in range(0, len(keys), 32):
        group = keys[start : start + 32].double()
        outliers = np.argsort(-group.norm(dim=0).numpy())[:count]
        apart = torch.zeros(dim, dtype=torch.bool)
        apart[torch.from_numpy(outliers)] = True
        for index, key in enumerate(group):
            for channels, m in zip((~apart, apart), signs, strict=True):
                part = key * channels
                sketched = torch.sign(rows[:m].double() @ part)
                estimate = (rows[:m].double() @ (query.double() * channels).T).T @ sketched
                scores[:, start + index] += orthogonal_gain(dim) / m * part.norm() * estimate
    return scores


@pytest.mark.parametrize("length", [5, 32, 70])
@pytest.mark.parametrize(
    ("head_dim", "outliers", "signs"),
    [
        # The settings of the program, where heads have 128 channels, in the initial layer and in the other.
        (128, 8, [(512, 128), (256, 256)]),
        (24, 1, [(96, 24), (48, 48)]),
    ],
)
def test_outlier_scores_are_those_of_the_authors_program(
    head_dim: int, outliers: int, signs: list[tuple[int, int]], length: int
) -> None:
    codec = make_codec("qjl_outliers", head_dim, layers=2)
    loud = torch.where(torch.arange(head_dim) % 9 == 4, 8.0, 1.0)
    keys, query = normal(1, 2, length, head_dim) * loud, normal(1, 2, 3, head_dim, seed=1)
    for layer in range(2):
        packed = codec.encode(layer, keys, keys)
        assert [packed[f"key_{part}signs"].shape[-1] * 8 for part in ("", "outlier_")] == list(signs[layer])
        mapped, _ = codec.map_query(layer, query)
        found = mapped[:, :, 0] @ codec.unpack(layer, "key", packed).mT
        for head in range(2):
            rows = codec.state["projection"][layer]
            expected = plain_scores(query[0, head], keys[0, head], rows, signs[layer], outliers)
            # Norms are of bfloat16.
            torch.testing.assert_close(found[0, head].double(), expected, rtol=0.01, atol=0.01 * float(expected.std()))
