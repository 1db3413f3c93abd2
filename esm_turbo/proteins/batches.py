"""Batches of proteins: encoded once at a byte a token, of bounded size, and the same ones after an interruption."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from esm_turbo.proteins.fasta import normalize_sequence, token_batches
from esm_turbo.proteins.tokens import TokenCodes

TokenRow = npt.NDArray[np.uint8]
"""Token ids of one protein, special tokens included."""


def encode_rows(codes: TokenCodes, sequences: Iterable[str], *, eos: bool = True) -> list[TokenRow]:
    """Token ids of proteins with `<cls>`, and with `<eos>` unless told otherwise.

    Args:
        codes: of the model's tokenizer.
        sequences: residues; `<mask>` may stand for one.
        eos: end with `<eos>`.

    Raises:
        ValueError: a sequence is empty or has letters that are no residues.
    """
    table = bytearray(256)
    for residue, index in codes.residues.items():
        table[ord(residue)] = index
    rows = []
    end = bytes([codes.eos]) if eos else b""
    for number, sequence in enumerate(sequences, start=1):
        name = f"sequence {number}"
        if "<" in sequence:
            ids = bytes(codes.encode(sequence, name))
        else:
            ids = normalize_sequence(sequence, name=name).encode("ascii").translate(table)
        rows.append(np.frombuffer(bytes([codes.cls]) + ids + end, dtype=np.uint8))
    return rows


def remaining_batches(lengths: Sequence[int], toks_per_batch: int, done: Container[int] = ()) -> list[list[int]]:
    """Batches of what is not done yet, the longest first: what does not fit into memory is known at once.

    A run that goes on where another stopped shall compute the same batches as one that never stopped, since the
    rounding of a result depends on its batch. So batches are made of all sequences; those that are done as a whole are
    left out, and what is missing of the others is batched anew.

    Args:
        lengths: tokens of each sequence.
        toks_per_batch: padded tokens of a batch; a longer sequence forms a batch of its own.
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
