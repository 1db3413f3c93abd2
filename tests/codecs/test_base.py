"""Contract of every preset: uniform tokens, maps that keep scores and sums, and means that codecs may add."""

import numpy as np
import pytest
import torch

from esm_turbo import KVCalibrator, TurboConfig
from esm_turbo.codecs import KVCodec, LutCodec
from esm_turbo.config import PRODUCT_PRESETS
from tests.helpers.codec_samples import HEADS, correlated, mapped_query, statistics_of


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


def test_centred_codecs_keep_scores_and_sums():
    rng = np.random.default_rng(0)
    stats = statistics_of(correlated(rng, 316, 24), correlated(rng, 316, 24, decay=0.05))
    codec = Centred(TurboConfig(), stats.geometry, Centred.fit(TurboConfig(), stats))
    keys, values = (torch.from_numpy(x[1][None, :, :11].copy()) for x in (stats.sample.keys, stats.sample.values))
    query = torch.randn(1, HEADS, 5, 24, generator=torch.Generator().manual_seed(3))
    mapped, offset = mapped_query(codec, 1, query)
    stored_keys, stored_values = codec.transform(1, keys, values)
    scores = mapped @ stored_keys.transpose(2, 3) + offset
    torch.testing.assert_close(scores, query @ keys.transpose(2, 3), rtol=1e-3, atol=1e-3)
    weights = scores.softmax(dim=-1)
    torch.testing.assert_close(codec.unmap_output(1, weights @ stored_values), weights @ values, rtol=1e-4, atol=1e-4)
    again = codec.inverse_transform(1, stored_keys, stored_values)
    torch.testing.assert_close(again[0], keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again[1], values, rtol=1e-4, atol=1e-4)
