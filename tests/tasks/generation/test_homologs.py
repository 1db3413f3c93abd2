"""Generation after homologs: every draw by a plain loop, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esm_turbo import ContextStore, TurboEsm

CONTEXTS = ["MKTAYIAKQRQISFVKSHFSRQ,MKSAYLAKQRHISFIKAHFSRQLEE", "MRTAXIAKQRNISFLKSHFT"]
PROTEIN = "MKTA?IAK?RQISF?KSHF"


@torch.no_grad()
def log_probs_at(e1: TurboEsm, protein: str, contexts: list[str], position: int) -> torch.Tensor:
    """Log-probabilities at a position: their mean over contexts, normalised."""
    if not contexts:
        ids = torch.tensor([e1.codes.whole(e1.codes.encode(protein, "it"))])
        return e1.model(ids).logits[0, 1 + position].log_softmax(-1)
    found = [e1.extend(e1.prefill(one), protein).logits[0, 1 + position].log_softmax(-1) for one in contexts]
    # A distribution again.
    return torch.stack(found).mean(dim=0).log_softmax(-1)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_most_likely_residues_are_those_of_a_plain_loop(e1: TurboEsm, number: int) -> None:
    """In the order of the sequence, each given those before it; the log-probabilities are those of each draw."""
    contexts = CONTEXTS[:number]
    made = e1.generate([PROTEIN, "M?"], order="left_to_right", temperature=0, context=contexts or None)
    for given, sequence, positions, log_probs in zip(
        [PROTEIN, "M?"], made.sequences, made.positions, made.log_probs, strict=True
    ):
        protein, standard = given, [e1.codes.residues[letter] for letter in "ACDEFGHIKLMNPQRSTVWY"]
        assert positions == [i for i, letter in enumerate(given, start=1) if letter == "?"]
        for position, log_prob in zip(positions, log_probs, strict=True):
            expected = log_probs_at(e1, protein, contexts, position)
            best = standard[int(expected[standard].argmax())]
            assert sequence[position - 1] == e1.codes.decode([best])
            assert log_prob == pytest.approx(float(expected[best]), abs=1e-4)
            protein = protein[: position - 1] + sequence[position - 1] + protein[position:]
        assert sequence == protein


def test_samples_seeds_and_sweeps(e1: TurboEsm, tmp_path: Path) -> None:
    options = {"num_return_sequences": 3, "sweeps": 2, "per_step": 2, "order": "confidence", "banned": "C"}
    made = e1.generate(PROTEIN, seed=5, context=CONTEXTS[0], **options)
    assert len(made.sequences) == 3 and not any(set(new) & set("C?") for new in made.new_residues)
    assert all(len(one) == len(PROTEIN) for one in made.sequences)
    # Fixed residues stay.
    for one in made.sequences:
        assert [a for a, b in zip(one, PROTEIN, strict=True) if b != "?"] == [b for b in PROTEIN if b != "?"]
    assert e1.generate(PROTEIN, seed=5, context=e1.prefill(CONTEXTS[0]), **options).sequences == made.sequences
    with ContextStore(tmp_path) as store:
        for _ in range(2):
            again = e1.generate(PROTEIN, seed=5, context=CONTEXTS[0], store=store, **options)
            assert again.sequences == made.sequences
        assert store.info()["contexts"] == 1


def test_what_cannot_be_is_refused(e1: TurboEsm) -> None:
    for call, message in (
        (lambda: e1.generate("MKT", max_new_tokens=2, context="MKT"), "E1 does not support appended residues"),
        (lambda: e1.generate(e1.prefill("MKT")), "E1 does not support appended residues"),
        (lambda: e1.generate("MKT", context="MKT"), r"sequence 1: has no \?, so there is nothing to generate"),
        (lambda: e1.generate("M?X", context="MKT"), "sequence 1 has X at position 3, which E1 leaves out"),
        (lambda: e1.generate("M?", context=["MKT", "MJ"]), "context 2: position 2 is 'J'"),
        (lambda: e1.generate("M?", context=",".join(["M"] * 512)), "sequence 1 and context 1: 513 sequences"),
        (lambda: e1.generate("?" + "A" * 8192), "sequence 1: 8,193 residues are too many"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
