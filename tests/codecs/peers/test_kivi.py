"""KIVI: groups of keys along the context, the exact tail, and what cannot be appended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.codecs import codec_without_calibration
from esm_turbo.config import PRESETS, Geometry
from tests.helpers.peer_codecs import make_codec, normal, relative_mse

MakeModel = Callable[..., TurboEsmForMaskedLM]
RandomProteins = Callable[..., tuple[Tensor, Tensor]]


LENGTHS = (1, 17, 31, 32, 33, 63, 64, 70, 100)
"""Tokens of a context: fewer than a tail has, whole groups, and others."""


def plain_integers(x: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """Numbers of one group, quantised and read: zero and scale are of float16."""
    zero = np.float32(np.float16(x.min()))
    scale = np.float32(np.float16((x.max() - zero) / (2**bits - 1)))
    return np.float32(np.clip(np.round((x - zero) / scale), 0, 2**bits - 1) * scale + zero)


def plain_kivi(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values [L, D] of one head as KIVI's algorithm 1 stores them, number by number (R = 32, groups of 32)."""
    length, dim = keys.shape
    stored_keys, stored_values = (x.half().float().numpy() for x in (keys, values))
    size = dim if dim % 32 else 32
    for start in range(0, length - length % 32, 32):
        for channel in range(dim):
            group = keys.numpy()[start : start + 32, channel]
            stored_keys[start : start + 32, channel] = plain_integers(group, bits)
    for token in range(max(0, length - 32)):
        for start in range(0, dim, size):
            group = values.numpy()[token, start : start + size]
            stored_values[token, start : start + size] = plain_integers(group, bits)
    return torch.from_numpy(stored_keys), torch.from_numpy(stored_values)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("preset", "bits", "head_dim"), [("kivi4", 4, 24), ("kivi2", 2, 64)])
def test_kivi_is_the_published_algorithm(preset: str, bits: int, head_dim: int, length: int) -> None:
    codec = make_codec(preset, head_dim)
    keys, values = normal(1, 2, length, head_dim), 3 * normal(1, 2, length, head_dim, seed=1)
    found = codec.decode(0, codec.encode(0, keys, values))
    for head in range(2):
        for ours, plain in zip(found, plain_kivi(keys[0, head], values[0, head], bits), strict=True):
            # Scales are of eleven bits; a code on the border would be off by a whole step.
            torch.testing.assert_close(ours[0, head], plain, rtol=1e-5, atol=1e-5)


def test_kivi_tail_is_that_of_each_row(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    """Rows of a batch, and cropped ones, keep exactly the last tokens of their own context as it was written."""
    model = tiny_model(preset="kivi2")
    ids, mask = random_proteins([70, 45])
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values
        model.set_turbo(preset="exact")
        exact = model(ids, mask, use_cache=True).past_key_values
    lengths = cache.lengths.tolist()
    cache.crop(-10)
    for row, length in enumerate(lengths):
        values = {
            name: c.codec.unpack(0, "value", {n: t[row : row + 1] for n, t in (layer.packed | layer.rows).items()})
            for name, c, layer in (("kivi", cache, cache.layers[0]), ("exact", exact, exact.layers[0]))
        }
        same = torch.isclose(values["kivi"], values["exact"][:, :, : cache.columns], rtol=1e-3, atol=1e-5)
        same = same.all(-1).all(1)[0, : length - 10]
        assert same.tolist() == [False] * (length - 32) + [True] * 22


def test_kivi_groups_exclude_protected_tokens(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    config = replace(PRESETS["kivi4"], protect_special_tokens=True)
    codec = codec_without_calibration(config, Geometry(1, 1, 16))
    x = normal(1, 1, 40, 16)
    x[:, :, 0] = 1e4
    mask = torch.arange(40)[None] > 0
    packed = codec.quantize(0, x, x)
    keys = codec.unpack(0, "key", packed | codec.summarize(0, x, x, packed, mask))
    assert relative_mse(x[:, :, 1:], keys[:, :, 1:]) < 0.01


@pytest.mark.parametrize("preset", ["kivi4", "qjl_outliers"])
def test_codecs_with_groups_refuse_to_append(
    tiny_model: MakeModel, random_proteins: RandomProteins, preset: str
) -> None:
    model = tiny_model(preset=preset)
    ids, mask = random_proteins([20, 9])
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values
        before = cache.nbytes, cache.lengths.tolist()
        with pytest.raises(ValueError, match=rf"'{preset}' cannot be appended to.*prefill the longer context"):
            model(ids[:, 1:3], past_key_values=cache, use_cache=True)
    assert (cache.nbytes, cache.lengths.tolist()) == before


@pytest.mark.parametrize(("preset", "most"), [("kivi2", 8160), ("qjl_outliers", 8192)])
def test_more_groups_than_a_byte_can_index_are_refused(preset: str, most: int) -> None:
    codec = make_codec(preset, 16, heads=1)
    codec.transform(0, *[torch.zeros(1, 1, most, 16)] * 2)
    with pytest.raises(ValueError, match=f"at most {most} tokens, got {most + 1}"):
        codec.transform(0, *[torch.zeros(1, 1, most + 1, 16)] * 2)


@pytest.mark.parametrize("preset", ["kivi4", "qjl_outliers"])
def test_caches_of_different_lengths_concatenate(
    tiny_model: MakeModel, random_proteins: RandomProteins, preset: str
) -> None:
    model = tiny_model(preset=preset)
    ids, mask = random_proteins([70, 20])
    with torch.no_grad():
        caches = [model(ids[row : row + 1, : int(mask[row].sum())], use_cache=True).past_key_values for row in (0, 1)]
        combined = TurboKVCache.cat(caches)
        new = ids[:, 3:8]
        expected = torch.cat([model(new[row : row + 1], past_key_values=caches[row]).logits for row in (0, 1)])
        output = model(new, past_key_values=combined).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
