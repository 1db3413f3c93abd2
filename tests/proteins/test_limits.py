"""Lengths of proteins: the warning for long ones, and ranges."""

import warnings

import pytest

from esm_turbo.files.families import FAMILIES
from esm_turbo.proteins.limits import TRAINED_RESIDUES, LongProteinWarning, length_bin, warn_if_long

ESM2 = FAMILIES["esm"]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, "1-100"), (100, "1-100"), (101, "101-200"), (350, "201-350"), (700, "351-700"), (1022, "701-1022")],
)
def test_ranges_of_lengths(length, expected):
    assert length_bin(length) == expected
    assert length_bin(TRAINED_RESIDUES + 1) == "over 1022"


def test_long_proteins_warn_once():
    def task():
        warn_if_long([10, 1023, 2000], ESM2)

    with pytest.warns(LongProteinWarning) as caught:
        task()
    [warning] = caught
    assert str(warning.message) == "2 proteins of up to 2000 residues: ESM-2 was trained on at most 1022"
    # The place that called the task.
    assert warning.filename == __file__
    with pytest.warns(LongProteinWarning, match="^1 protein of up to 1023 residues"):
        warn_if_long(iter([1023]), ESM2)


def test_proteins_as_long_as_those_of_training_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_long([1, TRAINED_RESIDUES], ESM2)
        warn_if_long([], ESM2)


def test_the_limit_is_that_of_the_models_family():
    with pytest.warns(
        LongProteinWarning, match="^1 protein of up to 2047 residues: ESM-C was trained on at most 2046$"
    ):
        warn_if_long([2046, 2047], FAMILIES["esmc"])
