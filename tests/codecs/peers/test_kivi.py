"""KIVI: groups of keys along the context, and what cannot be appended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.codecs import codec_without_calibration
from esm_turbo.config import PRESETS, Geometry
from tests.helpers.peer_codecs import decoded, make_codec, normal, relative_mse

MakeModel = Callable[..., TurboEsmForMaskedLM]
RandomProteins = Callable[..., tuple[Tensor, Tensor]]


def test_kivi_keys_are_scaled_per_channel():
    """An outlier channel does not affect the others, as it would with one scale per token."""
    x = normal(1, 2, 100, 64)
    loud = x * torch.where(torch.arange(64) == 5, 1000.0, 1.0)
    quiet = torch.arange(64) != 5
    plain = decoded(make_codec("kivi4", 64), x)[0]
    keys = decoded(make_codec("kivi4", 64), loud)[0]
    assert torch.equal(keys[..., quiet], plain[..., quiet])
    assert relative_mse(x[..., quiet], decoded(make_codec("int4", 64), loud)[0][..., quiet]) > 0.9


def test_kivi_groups_are_of_32_columns():
    x = normal(1, 2, 70, 16)
    changed = x.clone()
    changed[:, :, 40] = 50.0
    codec = make_codec("kivi4", 16)
    before, after = decoded(codec, x)[0], decoded(codec, changed)[0]
    same = (before == after).all(-1).all(1)[0]
    assert bool(same[:32].all()) and bool(same[64:].all())
    assert not bool(same[32:64].any())


@pytest.mark.parametrize(("bits", "expected"), [(4, 0.0063), (2, 0.160)])
def test_kivi_error_is_that_of_a_range_of_32(bits: int, expected: float) -> None:
    """The range of 32 standard normal numbers has the mean square 17.4, a uniform step's error is step^2 / 12."""
    x = normal(1, 4, 320, 64)
    keys, values = decoded(make_codec(f"kivi{bits}", 64, heads=4), x)
    assert expected == pytest.approx(17.4 / (2**bits - 1) ** 2 / 12, rel=0.03)
    # The two ends of a group are met exactly, and two bits leave more than a twelfth less than a step.
    for other in (keys, values):
        assert relative_mse(x, other) == pytest.approx(expected, rel=0.08)


def test_kivi_rows_do_not_depend_on_their_padding(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    model = tiny_model(preset="kivi2")
    ids, mask = random_proteins([70, 37])
    with torch.no_grad():
        together = model(ids, mask, use_cache=True).past_key_values
        alone = model(ids[1:, :37], use_cache=True).past_key_values
    for mine, other in zip(together.layers, alone.layers, strict=True):
        keys = [
            alone.codec.unpack(0, "key", {name: t[-1:] for name, t in (layer.packed | layer.rows).items()})[:, :, :37]
            for layer in (mine, other)
        ]
        # Batched matrix products round differently, and a code may lie on the border.
        assert float((keys[0] - keys[1]).abs().mean()) < 1e-3 * float(keys[1].abs().mean())


def test_kivi_groups_exclude_protected_tokens(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    config = replace(PRESETS["kivi4"], protect_special_tokens=True)
    codec = codec_without_calibration(config, Geometry(1, 1, 16))
    x = normal(1, 1, 40, 16)
    x[:, :, 0] = 1e4
    mask = torch.arange(40)[None] > 0
    packed = codec.quantize(0, x, x)
    keys = codec.unpack(0, "key", packed | codec.summarize(0, x, x, packed, mask))
    assert relative_mse(x[:, :, 1:], keys[:, :, 1:]) < 0.01


def test_kivi_refuses_to_append(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    model = tiny_model(preset="kivi4")
    ids, mask = random_proteins([20, 9])
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values
        before = cache.nbytes, cache.lengths.tolist()
        with pytest.raises(ValueError, match=r"'kivi4' cannot be appended to.*prefill the longer context"):
            model(ids[:, 1:3], past_key_values=cache, use_cache=True)
    assert (cache.nbytes, cache.lengths.tolist()) == before


def test_kivi_refuses_more_groups_than_a_byte_can_index():
    codec = make_codec("kivi2", 16, heads=1)
    x = torch.zeros(1, 1, 8193, 16)
    with pytest.raises(ValueError, match="at most 8192 tokens, got 8193"):
        codec.transform(0, x, x)


def test_kivi_caches_of_different_lengths_concatenate(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    model = tiny_model(preset="kivi4")
    ids, mask = random_proteins([70, 20])
    with torch.no_grad():
        caches = [model(ids[row : row + 1, : int(mask[row].sum())], use_cache=True).past_key_values for row in (0, 1)]
        combined = TurboKVCache.cat(caches)
        new = ids[:, 3:8]
        expected = torch.cat([model(new[row : row + 1], past_key_values=caches[row]).logits for row in (0, 1)])
        output = model(new, past_key_values=combined).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
