"""Planted outliers: the function stays, what is stored grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo import TurboEsmForMaskedLM
from esm_turbo.config import Geometry
from esm_turbo.evaluate.outliers import outlier_channels, with_outliers
from esm_turbo.model.sessions import KVSession

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
Tiny = Callable[..., TurboEsmForMaskedLM]


class Recorder(KVSession):
    """Records queries, keys and values of every layer, [heads, n, head_dim] each."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.layers.append((query[0], keys[0], values[0]))


@torch.no_grad()
def run(model: TurboEsmForMaskedLM, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    recorder = Recorder()
    return model(ids, kv_session=recorder).logits, recorder.layers


@pytest.mark.parametrize("scale", [10, 60, 200, 0.1])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_the_model_computes_the_same_function(
    tiny_model: Tiny, random_proteins: Callable[..., tuple[Tensor, Tensor]], head_dim: int, scale: float
) -> None:
    model = tiny_model(head_dim=head_dim)
    ids = random_proteins([40], eos=True)[0]
    before, _ = run(model, ids)
    after, _ = run(with_outliers(model, scale), ids)
    # float32: the scaled weights are rounded once more, which adds about 1e-6 over two layers.
    assert (after - before).norm() / before.norm() < 1e-5
    assert not torch.equal(after, before)


def test_stored_channels_grow_by_the_scale(
    tiny_model: Tiny, random_proteins: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    model, scale = tiny_model(), 60.0
    ids = random_proteins([30], eos=True)[0]
    (_, before), (_, after) = run(model, ids), run(with_outliers(model, scale), ids)
    channels = outlier_channels(Geometry(LAYERS, HEADS, HEAD_DIM))
    for layer in range(LAYERS):
        scaled = [
            torch.zeros(HEADS * HEAD_DIM, dtype=torch.bool).index_fill_(0, torch.from_numpy(c), True)
            for c in channels[layer]
        ]
        expected = [(scaled[0], 1 / scale), (scaled[0], scale), (scaled[1], scale)]
        for old, new, (where, factor) in zip(before[layer], after[layer], expected, strict=True):
            ratio = new.norm(dim=1) / old.norm(dim=1)
            wanted = torch.where(where.view(HEADS, HEAD_DIM), factor, 1.0)
            torch.testing.assert_close(ratio, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_one_rotary_pair_per_head_for_keys_and_for_values(head_dim: int) -> None:
    channels = outlier_channels(Geometry(3, 5, head_dim))
    assert channels.shape == (3, 2, 10)
    heads, within = np.divmod(channels, head_dim)
    first, second = np.split(within, 2, axis=-1)
    assert np.array_equal(heads, np.broadcast_to(np.tile(np.arange(5), 2), heads.shape))
    assert np.array_equal(second, first + head_dim // 2)
    assert (first < head_dim // 2).all()


def test_channels_depend_on_the_seed_only() -> None:
    geometry = Geometry(LAYERS, HEADS, HEAD_DIM)
    assert np.array_equal(outlier_channels(geometry, 3), outlier_channels(geometry, 3))
    assert not np.array_equal(outlier_channels(geometry, 3), outlier_channels(geometry, 4))


def test_the_original_is_not_modified_and_its_calibration_not_copied(tiny_model: Tiny) -> None:
    model = tiny_model(preset="paper")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    planted = with_outliers(model, 60)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.esm.calibration is not None
    assert planted.esm.calibration is None
    assert planted.lm_head.decoder.weight is planted.esm.embeddings.word_embeddings.weight
    with pytest.raises(ValueError, match="not this model's"):
        planted.set_turbo(calibration=model.esm.calibration)


def test_scale_one_is_a_plain_copy(tiny_model: Tiny) -> None:
    model = tiny_model()
    planted = with_outliers(model, 1)
    assert planted is not model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), planted.parameters(), strict=True))


@pytest.mark.parametrize("scale", [0, -10, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(tiny_model: Tiny, scale: float) -> None:
    with pytest.raises(ValueError, match="`scale` must be a positive number"):
        with_outliers(tiny_model(), scale)


@pytest.mark.parametrize(("kind", "other"), [(1, 2), (2, 1)])
def test_keys_or_values_are_scaled_alone(
    tiny_model: Tiny, random_proteins: Callable[..., tuple[Tensor, Tensor]], kind: int, other: int
) -> None:
    model, ids = tiny_model(), random_proteins([30], eos=True)[0]
    (_, before), (_, after) = run(model, ids), run(with_outliers(model, 10.0, kinds=[("key", "value")[kind - 1]]), ids)
    assert after[0][kind].abs().max() > 3 * before[0][kind].abs().max()
    torch.testing.assert_close(after[0][other], before[0][other])
