"""Contexts of E1: a query after a cached context is the end of the whole, whatever comes after the homologs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from tests.helpers.e1 import plain_forward
from tests.test_modeling_e1_turbo import REFERENCE, texts

HOMOLOGS = ["MKTAYIAKQRQISFVKSHFSRQ", "MKSAYLAKQRHISFIKAHFSRQLEE", "MRTAFIAKQ", "GSWKDMKTAYIAR"]
QUERY = "MKTAYIAKQ?QISFVKSHF"
SEVERAL = [index for index, text in sorted(texts().items()) if "," in text]


def whole(e1: TurboEsm, *sequences: str) -> Tensor:
    """Logits of the last sequence, of all its tokens, by the plain implementation."""
    rows = [e1.codes.whole(e1.codes.encode(sequence, "it")) for sequence in sequences]
    _, logits = plain_forward(e1.model.config, dict(e1.model.named_parameters()), torch.tensor([*chain(*rows)]))
    return logits[-len(rows[-1]) :]


@pytest.mark.parametrize("index", SEVERAL)
def test_logits_after_a_context_are_those_of_the_reference_code(e1: TurboEsm, index: str) -> None:
    context, _, query = texts()[index].rpartition(",")
    output = e1.extend(e1.prefill(context), query)
    expected = load_file(REFERENCE)[f"{index}.logits"][-len(query) - 4 :]
    torch.testing.assert_close(output.logits[0], expected, rtol=0, atol=1e-4)
    assert output.attention_mask.sum() == len(query) + 4


def test_only_the_global_layers_are_stored(e1: TurboEsm) -> None:
    cache = e1.prefill(",".join(HOMOLOGS))
    tokens = sum(map(len, HOMOLOGS)) + 4 * len(HOMOLOGS)
    assert len(cache.layers) == 4 and cache.lengths.tolist() == [tokens]
    # Four layers of keys and values in float32; an id, and the number of its sequence, per token; a length.
    assert cache.nbytes == tokens * (4 * 2 * 256 * 4 + 1 + 4) + 8


@pytest.mark.parametrize("index", [None, [2, 0, 0, 1]])
def test_many_contexts_in_a_batch(e1: TurboEsm, index: list[int] | None) -> None:
    contexts = [",".join(HOMOLOGS), HOMOLOGS[1], ",".join(HOMOLOGS[2:])]
    cache = e1.prefill(contexts)
    assert cache.next_chains.tolist() == [4, 1, 2]
    queries = [QUERY, "MK", "GGSW?", "MKTA"]
    chosen = [0, 1, 2] if index is None else index
    queries = queries[: len(chosen)]
    output = e1.extend(cache, queries, context_index=index)
    for number, (row, query) in enumerate(zip(chosen, queries, strict=True)):
        expected = whole(e1, *contexts[row].split(","), query)
        torch.testing.assert_close(output.logits[number, : len(query) + 4], expected, rtol=0, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    homologs=st.lists(st.text("ACDEFGHIKLMNPQRSTVWYXBUZO", min_size=1, max_size=40), min_size=1, max_size=5),
    queries=st.lists(st.text("ACDEFGHIKLMNPQRSTVWY?", min_size=1, max_size=40), min_size=1, max_size=3),
)
def test_one_context_serves_any_queries(e1: TurboEsm, homologs: list[str], queries: list[str]) -> None:
    output = e1.extend(e1.prefill(",".join(homologs).replace("X", "A")), queries)
    for row, query in enumerate(queries):
        expected = whole(e1, *(one.replace("X", "A") for one in homologs), query)
        torch.testing.assert_close(output.logits[row, : len(query) + 4], expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_x_is_left_out_and_keeps_its_position(e1: TurboEsm, tmp_path: Path) -> None:
    """As in the scorer of the reference: `remove_X_tokens`."""
    context, query = "MKXXTAYX,XGSW", "MXKT?"
    cache = e1.prefill(context)
    assert cache.lengths.tolist() == [8 + 4 - 3 + 4 + 4 - 1] and cache.next_positions.tolist() == [12 + 8]
    output = e1.extend(cache, query)
    ids = [e1.codes.whole(e1.codes.encode(one, "it")) for one in (*context.split(","), query)]
    kept = [(token, place) for place, token in enumerate(chain(*ids)) if token != 31]
    tokens, places = (torch.tensor([column]) for column in zip(*kept, strict=True))
    expected = e1.model(tokens, position_ids=places).logits[0, -8:]
    torch.testing.assert_close(output.logits[0], expected, rtol=0, atol=1e-4)
    # A store does not take it for a context without X.
    with ContextStore(tmp_path) as store:
        for one in ("MKXXTAYX,XGSW", "MKTAY,GSW"):
            found, again = (store.get_or_prefill(e1, [one]) for _ in range(2))
            assert torch.equal(e1.extend(found, query).logits, e1.extend(e1.prefill(one), query).logits)
            assert found.next_positions.tolist() == again.next_positions.tolist()


def test_refresh_and_eos_have_no_effect(e1: TurboEsm) -> None:
    cache = e1.prefill(",".join(HOMOLOGS))
    assert torch.equal(e1.extend(cache, QUERY).logits, e1.extend(cache, QUERY, refresh=3, eos=False).logits)


def test_a_query_that_is_appended_is_a_homolog_of_the_next(e1: TurboEsm) -> None:
    cache = e1.prefill(",".join(HOMOLOGS[:2]))
    e1.extend(cache, HOMOLOGS[2], append=True)
    assert cache.next_chains.tolist() == [3]
    torch.testing.assert_close(e1.extend(cache, QUERY).logits[0], whole(e1, *HOMOLOGS[:3], QUERY), rtol=0, atol=1e-4)


def test_saved_loaded_joined_and_selected(e1: TurboEsm, tmp_path: Path) -> None:
    caches = [e1.prefill(context) for context in (",".join(HOMOLOGS), HOMOLOGS[1])]
    expected = [e1.extend(cache, QUERY).logits for cache in caches]
    caches[0].save(tmp_path / "cache")
    joined = TurboKVCache.cat([caches[1], TurboKVCache.load(tmp_path / "cache", model=e1.model)])
    torch.testing.assert_close(e1.extend(joined, [QUERY] * 2).logits, torch.cat(expected[::-1]), rtol=0, atol=1e-4)
    joined.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(e1.extend(joined, QUERY).logits, expected[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_model_itself_extends(e1: TurboEsm) -> None:
    """As a Hugging Face model: positions and sequences follow from the tokens."""
    rows = [e1.codes.whole(e1.codes.encode(one, "it")) for one in [*HOMOLOGS[:2], QUERY]]
    output = e1.model(torch.tensor([rows[0] + rows[1]]), use_cache=True)
    extended = e1.model(torch.tensor([rows[2]]), past_key_values=output.past_key_values)
    torch.testing.assert_close(extended.logits[0], whole(e1, *HOMOLOGS[:2], QUERY), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="new tokens after a context must be one sequence per row"):
        e1.model(torch.tensor([rows[0] + rows[1]]), past_key_values=output.past_key_values)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("", "context 1: holds no residues"),
        ("MKT,,GSW", "context 1, homolog 2: holds no residues"),
        ("MKT,", "context 1, homolog 2: holds no residues"),
        ("MKT,G?W", "context 1, homolog 2: position 2 is a mask, which only a query may have"),
        ("M<mask>T", "context 1: position 2 is a mask"),
        ("MKT,G-W", "context 1, homolog 2: position 2 is '-', not one of the 25 residue codes"),
        ("MKT,GJW", "context 1, homolog 2: position 2 is 'J'"),
        (",".join(["M"] * 513), "context 1: 513 sequences are too many; the model reads at most 512"),
        ("MK," + "A" * 8193, "context 1, homolog 2: 8,193 residues are too many; the model reads at most 8,192"),
        (",".join(["A" * 8192] * 8), "context 1: 65,568 positions are too many; the model reads at most 65,536"),
    ],
    ids=lambda text: text[:20],
)
def test_bad_contexts_are_refused(e1: TurboEsm, tmp_path: Path, context: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        e1.prefill(context)
    with ContextStore(tmp_path) as store:
        with pytest.raises(ValueError, match=message.replace("context 1", "context 2")):
            store.get_or_prefill(e1, ["MKT", context])
        assert store.info()["contexts"] == 0


def test_bad_queries_are_refused(e1: TurboEsm) -> None:
    cache = e1.prefill("MKT")
    for query, message in (
        ("", "sequence 2: holds no residues"),
        ("MK,T", "sequence 2: .*position 3 is ','"),
        ("A" * 8193, "sequence 2: 8,193 residues are too many"),
    ):
        with pytest.raises(ValueError, match=message):
            e1.extend(cache, ["MK", query])
    full = e1.prefill(",".join(["M"] * 512))
    with pytest.raises(ValueError, match="sequence 1 and its context: 513 sequences are too many"):
        e1.extend(full, "MK")


def test_a_context_of_another_model_is_refused(e1: TurboEsm) -> None:
    other = TurboEsm.from_pretrained(device="cpu")
    with pytest.raises(ValueError, match="for model type 'esm', the model is 'E1'"):
        e1.extend(other.prefill("MKT"), "MK")
    with pytest.raises(ValueError, match="for model type 'E1', the model is 'esm'"):
        other.extend(e1.prefill("MKT"), "MK")


@pytest.mark.parametrize(
    "task",
    [
        lambda e1: e1.score("MKT", ["AY"]),
        lambda e1: e1.score_pairs(["MKT"], ["AY"]),
        lambda e1: e1.generate("MKT", max_new_tokens=2),
        lambda e1: e1.embed("MKT", return_cache=True),
        lambda e1: e1.embed("MKT", window=16),
    ],
    ids=["score", "score_pairs", "generate", "embed_caches", "embed_windows"],
)
def test_tasks_that_read_on_are_refused(e1: TurboEsm, task: Callable[[TurboEsm], object]) -> None:
    with pytest.raises(ValueError, match=r"E1 does not support .*: its contexts are whole homologs"):
        task(e1)
