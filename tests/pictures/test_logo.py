"""Logos of designs."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.pictures.logo import design_entropies, design_frequencies, logo_sheet
from esm_turbo.pictures.palettes import RESIDUE_ORDER


def test_shares_and_entropies_of_designs(designs) -> None:
    shares = design_frequencies([[one.sequence[p - 1] for p in one.positions] for one in designs])
    assert shares.shape == (3, 20)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    found = [{RESIDUE_ORDER[i]: row[i] for i in np.flatnonzero(row)} for row in shares]
    assert found == [{"A": 1.0}, {"A": 0.5, "C": 0.25, "G": 0.25}, {"W": 0.75, "H": 0.25}]
    entropies = design_entropies(shares)
    assert entropies.tolist() == pytest.approx([0.0, 1.5, 0.8112781])
    assert not np.signbit(entropies).any()


def test_a_sheet_compares_with_the_input(designs) -> None:
    [tracks] = logo_sheet(designs, "ACDEFGHI", "model x").layout
    logo, entropy, log_probs, kept = tracks.panels
    assert logo.columns == tracks.columns == [2, 3, 7]
    assert tracks.letters == ["C", "D", "H"]
    assert kept.series["kept"].tolist() == [0.0, 0.0, 0.25]
    assert log_probs.series["mean log p"].tolist() == [-1.0, -2.0, -3.0]
    assert entropy.series["entropy"][1] == 1.5


def test_residues_after_the_input_have_no_letter_below(designs) -> None:
    sheet = logo_sheet(designs, "A", "model x")
    [tracks] = sheet.layout
    assert tracks.letters == ["", "", ""] and len(tracks.panels) == 3
    # Larger than what a number of JavaScript holds.
    assert [row[3] for row in sheet.table.rows] == [str(2**62 + n) for n in range(1, 5)]
