"""Embeddings after homologs: the hidden states of context and protein together, and what is refused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo import EmbeddingRequest, TurboEsm, TurboKVCache
from esm_turbo.tasks.embedding.embed import embedding_settings, iter_embeddings
from tests.helpers.models import E1_MINI

CONTEXT = "MKTAYIAKQRQISFVKSHFSRQ,MKSAYLAKQRHISFIKAHFSRQLEE"


@torch.no_grad()
def states_of(e1: TurboEsm, protein: str, context: str | None, layer: int) -> torch.Tensor:
    """Hidden states of the protein's residues, computed as the end of one row."""
    texts = [*([] if context is None else context.split(",")), protein]
    ids = torch.tensor([[*chain(*(e1.codes.whole(e1.codes.encode(text, "it")) for text in texts))]])
    states = e1.model(ids, output_hidden_states=True).hidden_states[layer][0]
    return states[len(states) - len(protein) - 2 : len(states) - 2]


@settings(max_examples=10, deadline=None)
@given(
    proteins=st.lists(st.text("ACDEFGHIKLMNPQRSTVWYX", min_size=1, max_size=30), min_size=1, max_size=4),
    context=st.sampled_from([None, CONTEXT, "MKTAY"]),
    toks_per_batch=st.sampled_from([1, 70, 4096]),
)
def test_embeddings_are_those_of_context_and_protein_together(
    e1: TurboEsm, proteins: list[str], context: str | None, toks_per_batch: int
) -> None:
    given_as = [context] if context is None else [context, e1.prefill(context)]
    for one in given_as:
        found = e1.embed(proteins, (0, 3, -1), ("mean", "per_tok"), toks_per_batch, context=one)
        for protein, embedding in zip(proteins, found, strict=True):
            for layer, states in embedding.representations.items():
                expected = states_of(e1, protein, context, layer)
                torch.testing.assert_close(states, expected, rtol=0, atol=1e-4)
                mean = embedding.mean_representations[layer]
                torch.testing.assert_close(mean, expected.mean(dim=0), rtol=0, atol=1e-4)


def test_results_belong_to_their_context(e1: TurboEsm) -> None:
    settings_of = [
        embedding_settings(e1, EmbeddingRequest.of(e1, (-1,), ["mean"], context=one))
        for one in (None, CONTEXT, CONTEXT, "MKTAY")
    ]
    assert settings_of[1] == settings_of[2]
    assert settings_of[0] != settings_of[1] != settings_of[3] != settings_of[0]


def test_a_context_is_read_as_it_was_when_the_request_was_made(e1: TurboEsm) -> None:
    proteins, cache = ["MKTAY", "GSWKD"], e1.prefill("MKTAYIAK")
    expected = [one.mean_representations[3] for one in e1.embed(proteins, (3,), "mean", context=cache)]
    request = EmbeddingRequest.of(e1, (3,), ["mean"], context=cache)
    found = {}
    for batch in iter_embeddings(e1, proteins, request, 1):
        found.update(batch)
        e1.extend(cache, "GSWKDLAEPL", append=True)
    for number, mean in enumerate(expected):
        torch.testing.assert_close(found[number].mean_representations[3], mean, rtol=0, atol=1e-5)


def test_results_belong_to_the_calibration_that_their_context_is_stored_by() -> None:
    turbo = TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="turbo3")
    request = EmbeddingRequest.of(turbo, (-1,), ["mean"], context=CONTEXT)
    before = embedding_settings(turbo, request)
    assert embedding_settings(turbo, request) == before
    turbo.model.base_model.codec(turbo.model.base_model.turbo_config).state["key_mean"].mul_(2)
    assert embedding_settings(turbo, request) != before


def test_results_belong_to_the_preset_of_a_given_cache() -> None:
    turbo = TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="turbo3")
    caches = []
    for preset in ("exact", "turbo3", "turbo1", "turbo1"):
        turbo.model.set_turbo(calibration=turbo.calibration, preset=preset)
        caches.append(turbo.prefill(CONTEXT))
    caches[-1].drop_refinements()
    of = [embedding_settings(turbo, EmbeddingRequest.of(turbo, (-1,), ["mean"], context=one)) for one in caches]
    assert all(one != other for number, one in enumerate(of) for other in of[:number])
    del of[2]["context"]["contents"]
    assert of[2] == embedding_settings(turbo, EmbeddingRequest.of(turbo, (-1,), ["mean"], context=CONTEXT))


def test_results_belong_to_the_contents_of_a_given_cache(e1: TurboEsm, tmp_path: Path) -> None:
    caches = [e1.prefill(f"{first},MKTAY") for first in ("MKTAY", "GSWKD")]
    for cache in caches:
        cache.drop_front(len(e1.codes.whole([0] * 5)))
    caches[0].save(tmp_path / "cache")
    # Of more rows, with spare columns.
    wide = TurboKVCache.cat([caches[0], e1.prefill(CONTEXT)]).select(0)
    e1.extend(wide, "MKTAY", append=True)
    wide.crop(-len(e1.codes.whole([0] * 5)))
    caches += [TurboKVCache.load(tmp_path / "cache", model=e1.model), wide]
    of = [embedding_settings(e1, EmbeddingRequest.of(e1, (-1,), ["mean"], context=one)) for one in caches]
    assert of[0] == of[2] == of[3] != of[1]


def test_bad_contexts_are_refused(e1: TurboEsm, tmp_path: Path) -> None:
    for context, message in (
        (["MKT", "MKTA"], "proteins are embedded after one context, got 2"),
        (",".join(["M"] * 512), "sequence 1 and context 1: 513 sequences are too many"),
    ):
        with pytest.raises(ValueError, match=message):
            e1.embed("MKTAY", context=context)
    with pytest.raises(ValueError, match="sequence 2: 8,193 residues are too many"):
        e1.embed(["MKTAY", "A" * 8193])
    with pytest.raises(ValueError, match="`devices` reads no cache"):
        e1.embed("MKTAY", context=e1.prefill("MKT"), devices=["cpu"])
    with pytest.raises(ValueError, match="TurboE1Model has no contact head"):
        e1.embed("MKTAY", include=["contacts"])
