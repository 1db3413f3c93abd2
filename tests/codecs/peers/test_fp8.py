"""fp8 against Hugging Face's, and beyond its range."""

from __future__ import annotations

import pytest
import torch
from transformers import cache_utils

from tests.helpers.peer_codecs import decoded, make_codec, normal, relative_mse


def test_fp8_is_hugging_faces_with_another_scale():
    x = normal(1, 2, 200, 64)
    codec = make_codec("fp8", 64)
    scale = float(codec.state["key_scale"])
    keys, values = decoded(codec, x)
    theirs = cache_utils.Fp8QuantizedLayer()._quantize(x, scale=scale)[0].float() * scale
    inside = x.abs() <= 448 * scale
    torch.testing.assert_close(keys[inside], theirs[inside], rtol=0, atol=0)
    assert relative_mse(x, values) == pytest.approx(0.0007, abs=0.0001)


def test_fp8_clips_large_numbers():
    codec = make_codec("fp8", 16)
    most = 448 * float(codec.state["key_scale"])
    keys, _ = decoded(codec, torch.tensor([1e6, -1e30]).repeat(8)[None, None, None].expand(1, 2, 1, 16))
    torch.testing.assert_close(keys[0, 0, 0, :2], torch.tensor([most, -most]))


def test_fp8_scale_of_zeros():
    """A sample of zeros has no largest number."""
    codec = make_codec("fp8", 16, channel_std=torch.zeros(16))
    assert float(codec.state["value_scale"]) == 1.0
