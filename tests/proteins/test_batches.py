"""Batches: the same ones after an interruption, and token ids as the tokenizer makes them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.proteins.batches import encode_rows, remaining_batches
from esm_turbo.proteins.fasta import RESIDUES, token_batches

lengths = st.lists(st.integers(1, 60), max_size=30)


@given(lengths=lengths, toks=st.integers(1, 200), data=st.data())
def test_missing_sequences_are_batched_once_within_the_budget(lengths, toks, data):
    done = data.draw(st.sets(st.integers(0, 29)))
    batches = remaining_batches(lengths, toks, done)
    assert sorted(index for batch in batches for index in batch) == [i for i in range(len(lengths)) if i not in done]
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= toks
    longest = [max(lengths[index] for index in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)


@given(lengths=lengths, toks=st.integers(1, 200), data=st.data())
def test_batches_that_are_wholly_missing_stay_as_they_are(lengths, toks, data):
    whole = remaining_batches(lengths, toks)
    assert sorted(whole) == sorted(token_batches(lengths, toks))
    stopped = data.draw(st.integers(0, len(whole)))
    done = {index for batch in whole[:stopped] for index in batch}
    assert remaining_batches(lengths, toks, done) == whole[stopped:]


def test_wrong_budget():
    with pytest.raises(ValueError, match="`toks_per_batch` must be at least 1"):
        remaining_batches([3], 0)
    assert remaining_batches([], 5) == []


sequences = st.lists(st.sampled_from([*RESIDUES, *RESIDUES.lower(), "<mask>", "<MASK>", " "]), min_size=1).map("".join)


@given(sequence=sequences.filter(str.strip), eos=st.booleans())
def test_rows_are_those_of_the_tokenizer(turbo, sequence, eos):
    [row] = encode_rows(turbo.codes, [sequence], eos=eos)
    text = sequence.upper().replace("<MASK>", "<mask>").replace(" ", "")
    expected = turbo.tokenizer(text).input_ids
    assert row.tolist() == (expected if eos else expected[:-1])


@pytest.mark.parametrize(
    ("sequence", "message"),
    [("", "sequence 2: holds no residues"), ("MKJ", "sequence 2: position 3 is 'J'"), ("M-K", "position 2 is '-'"),
     ("MK<msk>", "sequence 2: position 3 is '<'"), ("MKé", "sequence 2: position 3")],
)  # fmt: skip
def test_bad_letters(turbo, sequence, message):
    with pytest.raises(ValueError, match=message):
        encode_rows(turbo.codes, ["MKT", sequence])


def test_rows_of_one_batch(turbo):
    rows = encode_rows(turbo.codes, ["MKTAY", "GS"])
    input_ids, attention_mask = turbo.codes.batch(rows)
    expected = turbo.tokenizer(["MKTAY", "GS"], padding=True, return_tensors="pt")
    assert torch.equal(input_ids, expected.input_ids)
    assert torch.equal(attention_mask, expected.attention_mask)
    assert input_ids.dtype == attention_mask.dtype == torch.int64
