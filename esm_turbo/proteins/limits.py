"""How long the proteins are that ESM-2 was trained on, and the warning for longer ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

TRAINED_RESIDUES = 1022
"""ESM-2 was trained on crops of 1,024 tokens, `<cls>` and `<eos>` among them (Lin et al. 2023)."""

_LENGTH_BOUNDS = (100, 200, 350, 700, TRAINED_RESIDUES)


class LongProteinWarning(UserWarning):
    """Proteins are longer than those of training; the model runs, its answers are less certain."""


def warn_if_long(lengths: Iterable[int], stacklevel: int = 2) -> None:
    """Warns, once for all of them, that some proteins are longer than those of training.

    Args:
        lengths: residues of each protein.
        stacklevel: as of `warnings.warn`, counted from the caller.
    """
    long = [length for length in lengths if length > TRAINED_RESIDUES]
    if long:
        warnings.warn(
            f"{len(long)} protein{'s' if len(long) > 1 else ''} of up to {max(long)} residues: ESM-2 was trained on"
            f" {TRAINED_RESIDUES} at most",
            LongProteinWarning,
            stacklevel=stacklevel + 1,
        )


def length_bin(length: int) -> str:
    """The range of lengths that a protein belongs to, such as `101-200`."""
    lower = 1
    for upper in _LENGTH_BOUNDS:
        if length <= upper:
            return f"{lower}-{upper}"
        lower = upper + 1
    return f"over {_LENGTH_BOUNDS[-1]}"
