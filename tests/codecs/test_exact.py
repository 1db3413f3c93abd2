"""The exact codec returns what it was given."""

import pytest
import torch

from esm_turbo.codecs import ExactCodec, codec_without_calibration
from esm_turbo.config import PRESETS, Geometry
from tests.helpers.codec_samples import mapped_query


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_stores_what_it_is_given(dtype):
    codec = codec_without_calibration(PRESETS["exact"], Geometry(2, 2, 16))
    assert isinstance(codec, ExactCodec)
    keys, values = torch.randn(2, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = codec.encode(0, keys, values)
    assert packed["keys"].dtype == dtype
    assert torch.equal(packed["keys"], keys)
    assert torch.equal(packed["values"], values)
    decoded = codec.decode(0, packed)
    assert torch.equal(decoded[0], keys.float())
    assert torch.equal(decoded[1], values.float())
    query, offset = mapped_query(codec, 0, keys)
    assert torch.equal(query, keys.float())
    assert offset == 0
