"""Lengths of proteins: the limits of training, the warning beyond them, and ranges for reports."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from esm_turbo.files.families import FAMILIES, Family

TRAINED_RESIDUES = min(family.trained_residues for family in FAMILIES.values())
"""Residues of the longest proteins that models of all families were trained on."""

_LENGTH_BOUNDS = (100, 200, 350, 700, TRAINED_RESIDUES)


class UntrainedInputWarning(UserWarning):
    """A model is given inputs of a kind that it was not trained on."""


class LongProteinWarning(UntrainedInputWarning):
    """Proteins are longer than those of training; the model runs, but its predictions are less reliable."""


def warn_if_long(lengths: Iterable[int], family: Family, stacklevel: int = 2) -> None:
    """Warn once if some proteins are longer than those of training.

    Args:
        lengths: residues per protein.
        family: of the model.
        stacklevel: as for `warnings.warn`, counted from the caller.
    """
    most = family.trained_residues
    long = [length for length in lengths if length > most]
    if long:
        warnings.warn(
            f"{len(long)} protein{'s' if len(long) > 1 else ''} of up to {max(long)} residues: {family.name} was"
            f" trained on at most {most}",
            LongProteinWarning,
            stacklevel=stacklevel + 1,
        )


def length_bin(length: int) -> str:
    """The range of lengths that a protein belongs to, such as `101-200`."""
    return range_of(length, _LENGTH_BOUNDS)


def range_of(number: int, bounds: Sequence[int]) -> str:
    """The range that a number from 1 belongs to, such as `101-200`.

    Args:
        number: at least 1.
        bounds: the last number of each range, ascending; larger numbers are `over` the last one.
    """
    index = bisect_left(bounds, number)
    if index == len(bounds):
        return f"over {bounds[-1]}"
    return f"{bounds[index - 1] + 1 if index else 1}-{bounds[index]}"
