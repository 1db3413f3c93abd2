"""The registry of codecs."""

import pytest

from esm_turbo import TurboConfig
from esm_turbo.codecs import CODECS, ExactCodec, LutCodec, TurboCodec, codec_class
from esm_turbo.config import PRODUCT_PRESETS


def test_registry_names_the_codecs():
    assert codec_class(PRODUCT_PRESETS["exact"]) is ExactCodec
    assert codec_class(PRODUCT_PRESETS["paper"]) is LutCodec
    assert codec_class(PRODUCT_PRESETS["turbo3"]) is TurboCodec
    assert {config.codec for config in PRODUCT_PRESETS.values()} <= set(CODECS)
    with pytest.raises(ValueError, match=r"`codec` must be one of .*'exact'.*'lut'.*got 'gzip'"):
        codec_class(TurboConfig(codec="gzip"))
