"""Residues to token ids, compared with the tokenizer where it is reliable, and batches of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import EsmConfig, EsmTokenizer

from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.files.families import FAMILIES
from esm_turbo.proteins.batches import encode_rows, remaining_batches, token_batches
from esm_turbo.proteins.fasta import RESIDUES, ProteinRecord
from esm_turbo.proteins.tokens import TokenCodes


@pytest.fixture(scope="module")
def tokenizer() -> EsmTokenizer:
    return EsmTokenizer.from_pretrained(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def codes(tokenizer: EsmTokenizer) -> TokenCodes:
    return TokenCodes.of(tokenizer, FAMILIES["esm"])


def test_the_vocabulary(codes: TokenCodes) -> None:
    """Lin et al. 2023: `<cls>`, `<pad>`, `<eos>`, `<unk>`, the residues from 4, `<mask>` last."""
    assert (codes.cls, codes.pad, codes.eos, codes.mask) == (0, 1, 2, 32)
    assert codes.residues == {residue: 4 + index for index, residue in enumerate(RESIDUES)}


sequences = st.lists(st.sampled_from([*RESIDUES, *RESIDUES.lower(), "<mask>", "<MASK>", " "]), min_size=1).map("".join)


@given(sequence=sequences.filter(str.strip), eos=st.booleans())
def test_rows_are_those_of_the_tokenizer(turbo, sequence, eos):
    [row] = encode_rows(turbo.codes, [sequence], eos=eos)
    text = sequence.upper().replace("<MASK>", "<mask>").replace(" ", "")
    expected = turbo.tokenizer(text).input_ids
    assert row.tolist() == (expected if eos else expected[:-1])


@given(parts=st.lists(st.sampled_from([*RESIDUES, *RESIDUES.lower(), " ", "*", "<mask>"]), min_size=1, max_size=9))
def test_decoding_inverts_encoding(codes: TokenCodes, parts: list[str]) -> None:
    """Sequences of residues alone take a way of their own."""
    sequence = "".join(parts)
    try:
        ids = codes.encode(sequence, "it")
    except ValueError:
        assert "*" in sequence or not sequence.strip()
        return
    assert codes.decode(ids) == sequence.replace(" ", "").removesuffix("*").upper().replace("<MASK>", "<mask>")
    assert codes.decode(np.array(ids)) == codes.decode(ids)


@pytest.mark.parametrize("text", ["MKT", "mkt", " M K\tT\n", "MKT*", ProteinRecord("a", "MKT")])
def test_accepted_spellings(codes: TokenCodes, text: str | ProteinRecord) -> None:
    assert codes.encode(text, "it") == [20, 15, 11]


@pytest.mark.parametrize("text", ["M<mask>T", "m<MASK>t*", "M <mask> T"])
def test_masks(codes: TokenCodes, text: str) -> None:
    assert codes.encode(text, "it") == [20, 32, 11]


@pytest.mark.parametrize(
    ("text", "position"),
    [("MKJT", 3), ("M<mask>-T", 3), ("<mask><mask>1", 3), ("MK.", 3), ("<mask", 1), ("M<cls>", 2), ("M*K", 2)],
)
def test_bad_symbols_are_refused_at_their_position(codes: TokenCodes, text: str, position: int) -> None:
    """The tokenizer accepts all of these. Positions count from 1; a mask counts as one residue."""
    with pytest.raises(ValueError, match=rf"^sequence 7: .*position {position}\b"):
        codes.encode(text, "sequence 7")


@pytest.mark.parametrize(
    ("sequence", "error"),
    [*[(text, ValueError) for text in ("", "  \n", "*")], *[(one, TypeError) for one in (None, 1.5, b"MKT", ["M"])]],
)
def test_what_is_no_sequence_is_refused(codes: TokenCodes, sequence: Any, error: type[Exception]) -> None:
    reason = "a sequence must be a string" if error is TypeError else "holds no residues"
    with pytest.raises(error, match=f"sequence 7: {reason}"):
        codes.encode(sequence, "sequence 7")


@pytest.mark.parametrize(
    ("text", "remedy"), [("MK-T", "remove gaps, as by sequence.replace('-', '')"), ("MJ", "with X")]
)
def test_remedies_are_those_of_a_call(codes: TokenCodes, text: str, remedy: str) -> None:
    """No option of a file is named, which a call does not have."""
    for encode in (codes.encode, lambda sequence, name: encode_rows(codes, [sequence])):
        with pytest.raises(ValueError, match=rf"; .*{re.escape(remedy)}$"):
            encode(text, "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:5], lines[5] + lines[6], *lines[7:]], "token 5 is 'AG', not 'A'"),
        (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], "token 4 is 'A', not 'L'"),
        (lambda lines: [line.replace("K", "J") for line in lines], "token 15 is 'J', not 'K'"),
        (lambda lines: [*lines, "<extra>"], "token 33 is '<extra>', not None"),
        (lambda lines: [*lines[:29], *lines[30:]], "token 29 is '-', not '.'"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    lines = (EMBEDDED_MODEL / "vocab.txt").read_text().split()
    (tmp_path / "vocab.txt").write_text("\n".join(change(lines)))
    with pytest.raises(ValueError, match=rf"vocab.txt is not ESM-2's: {re.escape(message)}; copy it again"):
        TokenCodes.of(EsmTokenizer.from_pretrained(tmp_path), FAMILIES["esm"])


@pytest.mark.parametrize("name", ["cls_token", "pad_token", "eos_token", "mask_token"])
def test_other_special_tokens_are_refused(name: str) -> None:
    tokenizer = EsmTokenizer.from_pretrained(EMBEDDED_MODEL, **{name: "A"})
    with pytest.raises(ValueError, match=f"tokenizer_config.json is not ESM-2's: {name} is 'A', not '<"):
        TokenCodes.of(tokenizer, FAMILIES["esm"])


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "mask_token_id", "pad_token_id"])
def test_a_model_with_other_special_tokens_is_refused(codes: TokenCodes, name: str) -> None:
    """They decide which tokens are protected, and what token dropout counts."""
    config = EsmConfig.from_pretrained(EMBEDDED_MODEL)
    codes.check(config)
    setattr(config, name, 2**31)
    with pytest.raises(
        ValueError, match=f"config.json has {name} 2147483648, which the vocabulary has at [0-9]+; copy"
    ):
        codes.check(config)


def test_the_bad_one_of_several_rows_is_named(codes: TokenCodes) -> None:
    with pytest.raises(ValueError, match="sequence 2: position 3 is 'J'"):
        encode_rows(codes, ["MKT", "MKJ"])


def test_rows_of_one_batch(turbo):
    rows = encode_rows(turbo.codes, ["MKTAY", "GS"])
    input_ids, attention_mask = turbo.codes.batch(rows)
    expected = turbo.tokenizer(["MKTAY", "GS"], padding=True, return_tensors="pt")
    assert torch.equal(input_ids, expected.input_ids)
    assert torch.equal(attention_mask, expected.attention_mask)
    assert input_ids.dtype == attention_mask.dtype == torch.int64


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
