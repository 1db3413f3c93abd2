"""Peptides for a target: the recipe of PepMLM, and their ranking."""

from __future__ import annotations

import math

import pytest
import torch

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.binders import Binders, generate_binders

TARGET = "MKTAYIAKQRQISFVK"


@pytest.fixture(scope="module")
def found(turbo: TurboEsm) -> Binders:
    return generate_binders(turbo, TARGET.lower(), 5, num_return_sequences=12, seed=3)


def test_residues_are_among_the_most_likely_in_one_forward(turbo: TurboEsm, found: Binders) -> None:
    ids = turbo.tokenizer(TARGET + "<mask>" * 5, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = turbo.model(ids).logits[0, 1 + len(TARGET) : -1]
    logits = logits[:, [turbo.codes.residues[residue] for residue in "ACDEFGHIKLMNPQRSTVWY"]]
    best = [{"ACDEFGHIKLMNPQRSTVWY"[i] for i in row.topk(3).indices} for row in logits]
    assert 3 < len(found.binders) <= 12
    for one in found.binders:
        assert len(one.sequence) == 5
        assert all(residue in allowed for residue, allowed in zip(one.sequence, best, strict=True))


def test_they_are_ranked_by_their_scores(turbo: TurboEsm, found: Binders) -> None:
    sequences = [one.sequence for one in found.binders]
    assert len(set(sequences)) == len(sequences)
    scores = turbo.score(TARGET, sequences)
    for one, expected in zip(found.binders, scores.pseudo_perplexities, strict=True):
        assert one.score.pseudo_perplexity == pytest.approx(expected, rel=1e-4)
    perplexities = [one.score.pseudo_perplexity for one in found.binders]
    assert perplexities == sorted(perplexities)
    assert (found.arm, found.preset, found.target) == (scores.arm, scores.preset, TARGET)


def test_a_seed_reproduces_its_peptide(turbo: TurboEsm, found: Binders) -> None:
    one = found.binders[0]
    again = turbo.generate(TARGET + "<mask>" * 5, per_step=5, top_k=3, seed=[one.seed])
    assert again.new_residues == [one.sequence]
    assert again.mean_log_probs[0] == pytest.approx(one.mean_log_prob, abs=1e-4)
    # Batches do not matter.
    split = generate_binders(turbo, TARGET, 5, num_return_sequences=12, seed=3, toks_per_batch=60)
    assert [one.sequence for one in split.binders] == [one.sequence for one in found.binders]


def test_options_reach_their_tasks(turbo: TurboEsm, tmp_path) -> None:
    store = ContextStore(tmp_path)
    options = {"temperature": 0.0, "banned": "K", "allowed": "KR", "arm": "frozen", "refresh": 2, "per_step": 1}
    made = turbo.generate_binders(TARGET, 3, num_return_sequences=4, store=store, **options)
    assert [one.sequence for one in made.binders] == ["RRR"]
    assert (made.arm, made.preset) == ("frozen", "exact") and store.info()["contexts"] == 1


def test_they_show_themselves(found: Binders) -> None:
    assert repr(found) == (
        f"Binders({len(found.binders)} binders, best {found.binders[0].sequence}, model='esm2-mini', arm='turbo',"
        " preset='turbo3')"
    )
    frame = found.to_frame()
    assert frame["binder"].tolist() == [one.sequence for one in found.binders]
    assert frame["rank"].tolist() == list(range(1, len(found.binders) + 1))
    first = found.to_dict()["binders"][0]
    assert math.fsum(first["log_probabilities"]) == pytest.approx(first["pseudo_log_likelihood"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "`length` must be an integer of at least 1, got 0"),
        ({"num_return_sequences": 0}, "`num_return_sequences` must be an integer of at least 1, got 0"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        ({"length": None}, "give the `length` of the peptides, or a `template`"),
        ({"template": "GXXXP"}, "`length` is 3, but `template` has 5 residues; leave one out"),
        ({"length": None, "template": "GSP"}, "`template` 'GSP' leaves nothing to draw"),
        ({"length": None, "template": "G[KRX"}, "templates are written as"),
        ({"sort_by": "specificity"}, "`sort_by` 'specificity' needs a `background`"),
        ({"rescore": -1}, "`rescore` must be an integer of at least 0, got -1"),
        ({"rescore": 2, "arm": "full"}, "`rescore` scores the best again by the arm 'full', but that scores all"),
        ({"background": "targets"}, "`background` 'targets' needs several targets"),
        ({"target": "M1"}, "the target: position 2 is '1'"),
    ],
)
def test_invalid_arguments(turbo: TurboEsm, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_binders(turbo, **({"target": TARGET, "length": 3} | arguments))


def test_a_template_keeps_residues_and_allows_some(turbo: TurboEsm) -> None:
    found = generate_binders(
        turbo, TARGET, template="g-x-[KR]-x-{ACDEFGHIKLMNPQRSTVW}-P", num_return_sequences=12, seed=5
    )
    assert len(found.binders) > 2
    for one in found.binders:
        sequence = one.sequence
        assert (sequence[0], sequence[4:], len(sequence)) == ("G", "YP", 6) and sequence[2] in "KR"
    # What is kept is seen: with the rest most likely in one forward.
    best = generate_binders(turbo, TARGET, template="GX[KR]XXP", temperature=0.0, num_return_sequences=1).binders[0]
    ids = turbo.tokenizer(TARGET + "G" + "<mask>" * 4 + "P", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = turbo.model(ids).logits[0, 1 + len(TARGET) + 1]
    letters = "ACDEFGHIKLMNPQRSTVWY"
    assert best.sequence[1] == max(letters, key=lambda letter: float(logits[turbo.codes.residues[letter]]))


def test_specificity_ranks_peptides(turbo: TurboEsm) -> None:
    decoys = ["GSWKDLAEGSWKD", "MLLNPPWFY"]
    options = {"num_return_sequences": 8, "seed": 1, "background": decoys}
    ranked = generate_binders(turbo, TARGET, 4, sort_by="specificity", **options)
    plain = generate_binders(turbo, TARGET, 4, **options)
    values = [one.score.specificity for one in ranked.binders]
    assert values == sorted(values, reverse=True) and len(values) > 2
    assert {one.sequence for one in ranked.binders} == {one.sequence for one in plain.binders}
    assert [one.score.pseudo_perplexity for one in plain.binders] == sorted(
        one.score.pseudo_perplexity for one in plain.binders
    )
    assert ranked.to_frame()["specificity"].tolist() == values and ranked.to_dict()["background"] == "decoys"


@pytest.mark.parametrize("sort_by", ["likelihood", "specificity"])
def test_the_best_are_scored_again(turbo: TurboEsm, sort_by: str) -> None:
    options = {"num_return_sequences": 12, "seed": 3, "background": ["GSWKDLAEGSWKD", "MLLNPPWFY"], "sort_by": sort_by}
    found = generate_binders(turbo, TARGET, 5, rescore=3, **options)
    plain = generate_binders(turbo, TARGET, 5, **options)
    assert [one.sequence for one in found.binders] == [one.sequence for one in plain.binders]
    rows = found.to_frame()
    assert rows["full_pseudo_perplexity"].notna().tolist() == [True] * 3 + [False] * (len(found.binders) - 3)
    best = [one.sequence for one in found.binders[:3]]
    exact = turbo.score(TARGET, best, arm="full", background=options["background"])
    assert rows["full_pseudo_perplexity"][:3].tolist() == pytest.approx(exact.pseudo_perplexities, rel=1e-4)
    # The background is scored again where it ranks.
    specificities = [one.specificity if sort_by == "specificity" else None for one in exact.scores]
    assert rows["full_specificity"][:3].tolist() == pytest.approx(specificities, abs=1e-4)
    by = rows["full_specificity"][:3] if sort_by == "specificity" else -rows["full_pseudo_perplexity"][:3]
    assert rows["full_rank"][:3].tolist() == by.rank(ascending=False).tolist()
    assert found.to_dict()["binders"][0]["full_pseudo_perplexity"] == rows["full_pseudo_perplexity"][0]
    assert "full_rank" not in plain.columns()


def test_masks_of_the_target_stay(turbo: TurboEsm) -> None:
    target = "MKTAYIA<mask>QRQISFVK"
    found = generate_binders(turbo, target, 5, num_return_sequences=4, toks_per_batch=40)
    assert found.target == target
    assert {len(one.sequence) for one in found.binders} == {5}
    with pytest.raises(ValueError, match="toks_per_batch"):
        generate_binders(turbo, target, 5, toks_per_batch=0)
