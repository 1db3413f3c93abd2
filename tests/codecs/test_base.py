"""Means, which the interface of codecs allows."""

import pickle

import numpy as np
import torch

from esm_turbo import TurboConfig
from esm_turbo.codecs import LutCodec
from tests.helpers.codec_samples import HEADS, correlated, mapped_query, statistics_of


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


def test_a_pickled_codec_comes_without_what_was_made_on_devices():
    rng = np.random.default_rng(0)
    stats = statistics_of(correlated(rng, 316, 24), correlated(rng, 316, 24, decay=0.05))
    codec = Centred(TurboConfig(), stats.geometry, Centred.fit(TurboConfig(), stats))
    made = codec.layer_state(1, torch.device("cpu"))
    assert pickle.loads(pickle.dumps(codec))._on_device == {}
    assert codec.layer_state(1, torch.device("cpu")) is made


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
