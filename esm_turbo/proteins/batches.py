"""Batches of rows: encoded once at one byte per token, bounded in size, reproducible after an interruption."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from esm_turbo.proteins.tokens import TokenCodes

TokenRow = npt.NDArray[np.uint8]
"""Token ids of one protein, special tokens included."""


def encode_rows(codes: TokenCodes, sequences: Iterable[str], *, eos: bool = True) -> list[TokenRow]:
    """Token ids of proteins, with what stands around the residues, such as `<cls>` and `<eos>`.

    Args:
        codes: of the model's tokenizer.
        sequences: residues; `<mask>` may stand for one.
        eos: whether rows end as whole proteins do.

    Raises:
        ValueError: a sequence is empty or has letters that are not residue codes.
    """
    begin, end = codes.before, codes.after if eos else ()
    return [
        np.array([*begin, *codes.encode(sequence, f"sequence {number}"), *end], dtype=np.uint8)
        for number, sequence in enumerate(sequences, start=1)
    ]


def token_batches(lengths: Sequence[int], toks_per_batch: int) -> list[list[int]]:
    """Group sequences of similar length into padded batches of a bounded number of tokens.

    Args:
        lengths: Tokens per sequence, including special tokens if the budget should count them.
        toks_per_batch: Maximum padded size of a batch in tokens: its longest sequence times its number of sequences. A
            longer sequence forms a batch of its own.

    Returns:
        Indices into `lengths`, each exactly once, from the shortest sequence to the longest; equal lengths keep their
        order.

    Raises:
        ValueError: `toks_per_batch` is below 1, or a length is negative.
    """
    if toks_per_batch < 1:
        raise ValueError(f"`toks_per_batch` must be at least 1, got {toks_per_batch}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"`lengths` must not be negative, got {min(lengths)}")
    batches: list[list[int]] = []
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > toks_per_batch:
            batches.append(batch)
            batch = []
        batch.append(index)
    if batch:
        batches.append(batch)
    return batches


def remaining_batches(lengths: Sequence[int], toks_per_batch: int, done: Container[int] = ()) -> list[list[int]]:
    """Batches of the sequences that are not done yet, longest first, so that a lack of memory shows at once.

    A resumed run computes the same batches as an uninterrupted one, since the rounding of a result depends on its
    batch. Therefore all sequences are batched: finished batches are left out, and the rest of partly finished ones is
    batched again.

    Args:
        lengths: tokens per sequence.
        toks_per_batch: maximum padded tokens per batch; a longer sequence forms a batch of its own.
        done: indices of the sequences that are done.

    Returns:
        Indices into `lengths`, each that is not done exactly once.

    Raises:
        ValueError: `toks_per_batch` is below 1.
    """
    batches, left = [], []
    for batch in token_batches(lengths, toks_per_batch):
        missing = [index for index in batch if index not in done]
        if len(missing) == len(batch):
            batches.append(batch)
        else:
            left += missing
    for batch in token_batches([lengths[index] for index in left], toks_per_batch):
        batches.append([left[index] for index in batch])
    return sorted(batches, key=lambda batch: lengths[batch[-1]], reverse=True)
