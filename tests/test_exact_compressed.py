"""Compressed contexts of E1: as a cache, from a store, from a pool and with other contexts in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from tests.helpers.models import E1_MINI

# Of one homolog, which needs no numbers of sequences, of several, and with X, whose position is kept.
CONTEXTS = ["MKSAYLAKQRHISFIKAHFSRQLEE", "MKTAYIAKQRQISFVKSHFSRQ,MRTAFIAKQ,GSWKDMKTAYIAR", "MKXXTAYX,XGSW"]
QUERIES = ["MKTAYI?KQ", "MKTA?IAKQ", "WKTAYIAK?"]


@pytest.fixture(scope="module")
def e1() -> TurboEsm:
    return TurboEsm.from_pretrained(E1_MINI, device="cpu")


@pytest.fixture(scope="module")
def alone(e1: TurboEsm) -> torch.Tensor:
    return torch.cat([e1.extend(e1.prefill(one), query).logits for one, query in zip(CONTEXTS, QUERIES, strict=True)])


def test_no_token_is_protected(e1: TurboEsm) -> None:
    """Each homolog has a first and a last token: a context would have hundreds."""
    cache = e1.prefill(CONTEXTS[1])
    assert cache.config.protect_special_tokens and cache.protected_columns.shape == (1, 0)
    assert all(not layer.protected for layer in cache.layers)
    bits = 8 * sum(x.nbytes for layer in cache.layers for x in layer.packed.values())
    assert bits == 3 * cache.lengths.item() * 2 * 4 * 256


def test_in_a_batch(e1: TurboEsm, alone: torch.Tensor) -> None:
    torch.testing.assert_close(e1.extend(e1.prefill(CONTEXTS), QUERIES).logits, alone, rtol=0, atol=1e-4)


def test_from_a_file(e1: TurboEsm, alone: torch.Tensor, tmp_path: Path) -> None:
    e1.prefill(CONTEXTS).save(tmp_path / "contexts")
    loaded = TurboKVCache.load(tmp_path / "contexts", model=e1.model)
    torch.testing.assert_close(e1.extend(loaded, QUERIES).logits, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("again", [False, True])
def test_from_a_store_and_its_pool(e1: TurboEsm, alone: torch.Tensor, tmp_path: Path, again: bool) -> None:
    with ContextStore(tmp_path) as store:
        store.get_or_prefill(e1, CONTEXTS)
    with ContextStore(tmp_path) as store:
        if again:
            with store.hold(e1, CONTEXTS):
                pass
        with store.hold(e1, CONTEXTS) as held:
            torch.testing.assert_close(e1.extend(held, QUERIES).logits, alone, rtol=0, atol=1e-4)
            named = e1.extend(held, QUERIES[::-1], context_index=[2, 1, 0]).logits
            torch.testing.assert_close(named, alone.flip(0), rtol=0, atol=1e-4)
        assert store.info()["contexts"] == 3
