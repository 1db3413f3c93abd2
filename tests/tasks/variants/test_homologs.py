"""Scores of variants after homologs: those of E1's own scorer, of every arm, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from esm_turbo.proteins.alignments import HomologContext
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.homologs import freeze_query
from esm_turbo.tasks.common.scoring_task import score_items
from esm_turbo.tasks.variants.many import VariantsTask, WildType
from esm_turbo.tasks.variants.records import score_records
from esm_turbo.tasks.variants.score import FrozenQueryRows
from tests.helpers.models import E1_MINI

# Scores of `E1Scorer` (github.com/Profluent-AI/E1, commit 219c7c7) on e1-mini in float32: the autocast of its predictor
# is left out. The protein and its contexts are of one family of UniProt and PDB sequences that the model has not seen.
REFERENCE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "e1_scores.json").read_text())
WILD_TYPE, VARIANTS, CONTEXTS = (REFERENCE[name] for name in ("wild_type", "variants", "contexts"))


def assert_close(values: list[float], expected: list[float], atol: float = 1e-4) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("arm", ["full", "frozen", "turbo"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("method", ["masked", "wild_type"])
def test_scores_are_those_of_the_reference_scorer(e1: TurboEsm, method: str, number: int, arm: str) -> None:
    """One context, and several averaged, in one of which X is left out."""
    found = e1.score_variants(WILD_TYPE, VARIANTS, method=method, arm=arm, context=CONTEXTS[:number])
    assert_close(found.values, REFERENCE["scores"][f"{method} {number}"])
    assert (found.contexts, found.refresh, found.arm) == (number, 0, arm)


def test_compressed_homologs_change_scores_little() -> None:
    """The error of the codec alone: by the default preset, of scores over several nats."""
    calibrated = TurboEsm.from_pretrained(E1_MINI, device="cpu")
    exact, found = (
        calibrated.score_variants(WILD_TYPE, VARIANTS, arm=arm, context=CONTEXTS) for arm in ("frozen", None)
    )
    assert (found.arm, found.preset) == ("turbo", "turbo3")
    assert 0 < np.abs(np.subtract(found.values, exact.values)).max() < 0.5
    stored = calibrated.score_variants(WILD_TYPE, VARIANTS, context=calibrated.prefill(CONTEXTS))
    assert_close(stored.values, found.values, 0.05)


@torch.no_grad()
def test_parts_of_a_frozen_query_see_what_the_whole_sees(e1: TurboEsm) -> None:
    """Where nothing is masked, freezing changes nothing: one in the middle, at either end, and after X in homologs."""
    context = "MKXXTAYX,XGSW," + CONTEXTS[0]
    cache, ids = e1.prefill(context), e1.codes.whole(e1.codes.encode(WILD_TYPE, "it"))
    expected = e1.extend(cache, WILD_TYPE).logits[0]
    whole, frozen = freeze_query(e1, cache, ids)
    assert cache.lengths.item() == whole.lengths.item() - len(ids)
    rows = FrozenQueryRows(
        codes=e1.codes, ids=ids, first=2, positions=torch.tensor([0, 50, len(WILD_TYPE) - 1]), method="wild_type",
        count=3, width=9, context=[0] * cache.next_positions.item(), kept=whole.lengths.item(),
    ).rows(torch.arange(3))  # fmt: skip
    mask = torch.cat([rows.visible, torch.ones_like(rows.input_ids)], dim=1)
    found = e1.model(rows.input_ids, mask, rows.position_ids, past_key_values=whole, frozen_query=frozen).logits
    own = torch.tensor([[*range(2, 11)], [*range(48, 57)], [*range(len(ids) - 11, len(ids) - 2)]])
    torch.testing.assert_close(found, expected[own], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arm", ["frozen", "turbo"])
@pytest.mark.parametrize("method", ["masked", "pseudo_perplexity"])
def test_a_frozen_query_costs_accuracy_that_refreshing_gives_back(e1: TurboEsm, arm: str, method: str) -> None:
    given = {"method": method, "arm": arm, "context": CONTEXTS}
    protein, variants = (WILD_TYPE, VARIANTS) if method == "masked" else (WILD_TYPE[:30], ["M1A"])
    exact = e1.score_variants(protein, variants, **given)
    errors = []
    for refresh in (0, 32, 1000):
        found = e1.score_variants(protein, variants, **given, freeze_query=True, refresh=refresh)
        assert (found.refresh, found.contexts) == (min(refresh, len(protein) - 1), len(CONTEXTS))
        errors.append(np.abs(np.subtract(found.values, exact.values)).mean())
    assert errors[0] > errors[1] > 0 and errors[2] < 0.5 * errors[0]


@pytest.mark.parametrize("arm", ["frozen", "turbo"])
def test_a_frozen_query_leaves_homologs_in_a_store_as_they_are(e1: TurboEsm, tmp_path: Path, arm: str) -> None:
    given = {"arm": arm, "context": CONTEXTS, "freeze_query": True}
    expected = e1.score_variants(WILD_TYPE, VARIANTS, **given)
    for _ in range(2):
        with ContextStore(tmp_path) as store:
            for _ in range(2):
                assert_close(e1.score_variants(WILD_TYPE, VARIANTS, **given, store=store).values, expected.values)
    with ContextStore(tmp_path) as store:
        exact = e1.score_variants(WILD_TYPE, VARIANTS, context=CONTEXTS, store=store)
    assert_close(exact.values, REFERENCE["scores"]["masked 3"])


@pytest.mark.parametrize(
    "given", [{}, {"context": CONTEXTS[0], "arm": "full"}, {"context": CONTEXTS[0], "method": "wild_type"}], ids=str
)
def test_nothing_to_freeze(e1: TurboEsm, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a frozen query is for masked residues after stored homologs"):
        e1.score_variants(WILD_TYPE, VARIANTS, **given, freeze_query=True)


def test_other_families_freeze_no_query(turbo: TurboEsm) -> None:
    with pytest.raises(ValueError, match="`freeze_query` reuses a protein after its homologs; give a `context`"):
        turbo.score_variants(WILD_TYPE, VARIANTS, freeze_query=True)


@pytest.mark.parametrize("method", ["masked", "wild_type"])
def test_scores_of_the_protein_alone_are_those_of_the_reference_scorer(e1: TurboEsm, method: str) -> None:
    found = e1.score_variants(WILD_TYPE, VARIANTS, method=method)
    assert_close(found.values, REFERENCE["scores"][f"{method} 0"])
    assert (found.arm, found.preset, found.contexts) == ("full", None, 0)
    many = e1.score_many_variants([WILD_TYPE, WILD_TYPE[:9]], [VARIANTS, ["M1A"]], method=method)
    assert_close(many[0].values, found.values, 1e-5)


@pytest.mark.parametrize("method", ["masked", "wild_type"])
def test_several_proteins_after_the_same_contexts(e1: TurboEsm, method: str) -> None:
    """Rows with several predictions share no batch with others."""
    proteins = {WILD_TYPE: VARIANTS, WILD_TYPE[:9]: ["M1A"], WILD_TYPE[:7]: ["M1A", "M1C"]}
    items = [WildType(one, 1, names, CONTEXTS[:2]) for one, names in proteins.items()]
    found = score_items(e1, VariantsTask(("frozen",), method=method), items, in_pieces=False)
    for index, item in enumerate(items):
        alone = e1.score_variants(item.sequence, item.variants, context=CONTEXTS[:2], method=method)
        assert_close(found[index].scores["frozen"].values, alone.values, 1e-5)


@pytest.mark.parametrize("context", ["MKTAYIAKQR", HomologContext("MKTAYIAKQR,MKTYIAKR", ("a", "b"), 0, 40, 1, 0, 2)])
def test_one_context_of_records_is_no_list_of_letters(e1: TurboEsm, context: str | HomologContext) -> None:
    record = ProteinRecord("a", WILD_TYPE[:9])
    for contexts in (context, [context]):
        [found] = score_records(e1, [record], None, ["frozen"], contexts=contexts).results
        assert found.scores["frozen"] == e1.score_variants(record.sequence, context=context, arm="frozen")


def test_a_cache_of_contexts_and_a_store(e1: TurboEsm, tmp_path: Path) -> None:
    expected = REFERENCE["scores"]["masked 3"]
    cache = e1.prefill(CONTEXTS)
    assert_close(e1.score_variants(WILD_TYPE, VARIANTS, context=cache).values, expected)
    assert cache.batch_size == 3
    with ContextStore(tmp_path) as store:
        for _ in range(2):
            found = e1.score_variants(WILD_TYPE, VARIANTS, context=CONTEXTS, store=store)
            assert_close(found.values, expected)
        assert store.info()["contexts"] == 3
        # `prefill` and scores know a context by the same name.
        store.get_or_prefill(e1, CONTEXTS)
        assert store.info()["contexts"] == 3


@pytest.mark.parametrize("options", [{}, {"freeze_query": True}])
def test_contexts_of_the_same_tokens_are_told_apart(e1: TurboEsm, options: dict[str, Any]) -> None:
    """Two caches of the same homolog, read after another one that has been dropped."""
    caches = [e1.prefill(f"{first},{CONTEXTS[0]}") for first in ("MKTAY", "GSWKD")]
    for cache in caches:
        cache.drop_front(len(e1.codes.whole([0] * 5)))
    both = TurboKVCache.cat(caches)
    each = [e1.score_variants(WILD_TYPE, VARIANTS, context=one, **options).values for one in caches]
    assert not np.allclose(*each, atol=1e-3)
    found = e1.score_variants(WILD_TYPE, VARIANTS, context=both, **options)
    assert_close(found.values, np.mean(each, axis=0).tolist())


def test_contexts_that_differ_in_what_is_left_out_are_told_apart(e1: TurboEsm) -> None:
    contexts = ["MVSTXXPELKK", "MVSTPELKK"]
    each = [e1.score_variants(WILD_TYPE, ["M1A", "V2L"], context=one, arm="full").values for one in contexts]
    assert not np.allclose(*each, atol=1e-3)
    both = e1.score_variants(WILD_TYPE, ["M1A", "V2L"], context=e1.prefill(contexts))
    assert_close(both.values, np.mean(each, axis=0).tolist())


@settings(max_examples=10, deadline=None)
@given(
    protein=st.text("ACDEFGHIKLMNPQRSTVWYBUZO", min_size=1, max_size=25),
    contexts=st.lists(
        st.lists(st.text("ACDEFGHIKLMNPQRSTVWYXBUZO", min_size=1, max_size=25), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    method=st.sampled_from(["masked", "wild_type"]),
)
def test_all_substitutions_as_by_extending_each_context(
    e1: TurboEsm, protein: str, contexts: list[list[str]], method: str
) -> None:
    texts = [",".join(one) for one in contexts]
    found = e1.score_variants(protein, method=method, context=texts)
    mean = torch.zeros(len(protein), 34, dtype=torch.float64)
    for text in texts:
        queries = [protein[:i] + "?" + protein[i + 1 :] for i in range(len(protein))]
        logits = e1.extend(e1.prefill(text), queries if method == "masked" else [protein]).logits
        rows = range(len(protein)) if method == "masked" else [0] * len(protein)
        at = torch.stack([logits[row, 2 + place] for place, row in enumerate(rows)])
        mean += at.double().log_softmax(-1) / len(texts)
    letters = e1.codes.residues
    expected = [
        float(
            mean[int(v.variant[1:-1]) - 1, letters[v.variant[-1]]]
            - mean[int(v.variant[1:-1]) - 1, letters[v.variant[0]]]
        )
        for v in found.scores
    ]
    assert len(expected) == sum(19 if one in "ACDEFGHIKLMNPQRSTVWY" else 20 for one in protein)
    assert_close(found.values, expected)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ([], "`contexts` must hold at least one context"),
        ("", "context 1: holds no residues"),
        (["MKT", "MKT,"], "context 2, homolog 2: holds no residues"),
        ("MKT,G?W", "context 1, homolog 2: position 2 is a mask, which only a query may have"),
        (["MKT", "MKJT"], "context 2: position 3 is 'J', not one of the 25 residue codes"),
        ("MK-T", "context 1: position 3 is '-'"),
        ("MKT," + "A" * 8193, "context 1, homolog 2: 8,193 residues are too many; the model reads at most 8,192"),
        (",".join(["M"] * 512), "the wild type and context 1: 513 sequences are too many; the model reads at most 512"),
        (",".join(["A" * 8188] * 8), "the wild type and context 1: 65,5.. positions are too many"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_bad_contexts_are_refused(e1: TurboEsm, tmp_path: Path, context: object, message: str) -> None:
    with ContextStore(tmp_path) as store:
        with pytest.raises(ValueError, match=message):
            e1.score_variants("MKTAY", ["M1A"], context=context, store=store)
        assert store.info()["contexts"] == 0


def test_other_kinds_of_contexts_are_refused(e1: TurboEsm) -> None:
    with pytest.raises(TypeError, match="context 2: a context must be a string, got int"):
        e1.score_variants("MKTAY", ["M1A"], context=["MKT", 3])
    other = TurboEsm.from_pretrained(device="cpu")
    with pytest.raises(ValueError, match="ESM-2 reads one protein at a time and no homologs"):
        other.score_variants("MKTAY", ["M1A"], context="MKTAY")
    with pytest.raises(ValueError, match="for model type 'esm', the model is 'E1'"):
        e1.score_variants("MKTAY", ["M1A"], context=other.prefill("MKT"))
    with pytest.raises(ValueError, match="the wild type must be a sequence; a cache of homologs is a `context`"):
        e1.score_variants(e1.prefill("MKTAY"), ["M1A"])
    begun = e1.prefill(["MKT", "MKTAY"])
    begun.crop(7)
    with pytest.raises(ValueError, match="row 1 of the cache does not hold whole homologs"):
        e1.score_variants("MKTAY", ["M1A"], context=begun)
    with pytest.raises(ValueError, match="a cache of preset 'exact' is for arm 'frozen'"):
        e1.score_variants("MKTAY", ["M1A"], context=e1.prefill("MKT"), arm="full")
    empty: TurboKVCache = e1.model.new_cache()
    with pytest.raises(ValueError, match="the cache is empty"):
        e1.score_variants("MKTAY", ["M1A"], context=empty)


def test_bad_wild_types_are_refused(e1: TurboEsm) -> None:
    for wild_type, message in (
        ("MKXAY", "the wild type has X at position 3, which E1 leaves out; give the residue"),
        ("MK?AY", r"the wild type holds a \?; give residues only"),
        ("MK,AY", "the wild type: position 3 is ','"),
        ("A" * 8193, "the wild type: 8,193 residues are too many"),
    ):
        with pytest.raises(ValueError, match=message):
            e1.score_variants(wild_type, [f"{wild_type[0]}1G"], context="MKT")
    with pytest.raises(ValueError, match="arm 'turbo' stores homologs, and there are none: give a `context`"):
        e1.score_variants("MKTAY", ["M1A"], arm="turbo")
    with pytest.raises(ValueError, match="residue 1 is M"):
        e1.score_variants("MKTAY", ["K1A"], context="MKT")


def test_pseudo_perplexities_after_homologs(e1: TurboEsm) -> None:
    """Of insertions and deletions, too: the mean log-probability of each residue where it is masked."""
    contexts = CONTEXTS[1:]
    names = ["M1A", "K3del", "M1_V2insGS"]
    proteins = ["MVKTA", "AVKTA", "MVTA", "MGSVKTA"]

    def mean(protein: str) -> float:
        queries = [protein[:i] + "?" + protein[i + 1 :] for i in range(len(protein))]
        found = [e1.extend(e1.prefill(one), queries).logits.double().log_softmax(-1) for one in contexts]
        own = [e1.codes.residues[letter] for letter in protein]
        return float(np.mean([[one[i, 2 + i, own[i]] for i in range(len(protein))] for one in found]))

    expected = [mean(one) - mean(proteins[0]) for one in proteins[1:]]
    for arm in ("full", "frozen"):
        found = e1.score_variants("MVKTA", names, method="pseudo_perplexity", arm=arm, context=contexts)
        assert_close(found.values, expected)
