"""quanto and HQQ: their errors as published, and what is needed for them."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import cache_utils

from esm_turbo.config import TurboConfig
from esm_turbo.files.extras import install_hint
from tests.helpers.peer_codecs import HEAD_DIMS, decoded, make_codec, normal, relative_mse


def test_optional_presets_name_the_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __init__(self, *args: object) -> None:
            raise ImportError("not here")

    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", Missing)
    with pytest.raises(ValueError, match=rf"'quanto' needs optional packages: {re.escape(install_hint('compare'))}"):
        make_codec("quanto4", 64)


def test_optional_presets_check_before_they_import():
    with pytest.raises(ValueError, match=r"`bits` of codec 'hqq' must be one of \[1, 2, 4\], got 3"):
        make_codec(TurboConfig(codec="hqq", bits=3), 64)
    with pytest.raises(ValueError, match="`head_dim` must be at most 64 or a multiple of it, got 72"):
        make_codec("quanto4", 72)


@pytest.mark.compare
@pytest.mark.parametrize(
    ("preset", "published"), [("quanto4", 0.0080), ("quanto2", 0.203), ("hqq4", 0.0074), ("hqq2", None)]
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hugging_faces_backends_as_they_are(preset: str, published: float | None, head_dim: int) -> None:
    """Ours reads what theirs reads; the errors published for groups of 64 are met."""
    codec = make_codec(preset, head_dim)
    x = normal(1, 2, 516, head_dim)
    keys, values = decoded(codec, x)
    layer = codec._layer
    if preset.startswith("hqq"):
        layer.lazy_initialization(x, x)
    theirs = layer._dequantize(layer._quantize(x, layer.axis_key))
    torch.testing.assert_close(keys, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, theirs, rtol=1e-5, atol=1e-5)
    if published is not None and head_dim >= 64:
        assert relative_mse(x, keys) == pytest.approx(published, rel=0.03)
    packed = codec.encode(0, x[:, :, :1], x[:, :, :1])
    groups = max(1, head_dim // 64)
    assert sum(t.nbytes for t in packed.values()) == 2 * 2 * (head_dim * codec.config.bits // 8 + groups * 8)
