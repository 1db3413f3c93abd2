"""Maps of embeddings, and contacts."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from esm_turbo.pictures.embeddings import contact_sheet, map_sheet, principal_components
from esm_turbo.proteins.fasta import ProteinRecord


def test_components_are_those_of_scikit_learn_but_for_signs() -> None:
    means = np.random.default_rng(0).normal(size=(9, 6)) * [5, 3, 1, 1, 1, 1] + 7
    expected = PCA(2).fit(means)
    places, shares = principal_components(means)
    np.testing.assert_allclose(np.abs(places), np.abs(expected.transform(means)), rtol=1e-9)
    assert shares == pytest.approx(expected.explained_variance_ratio_)
    assert (places[np.abs(places).argmax(axis=0), [0, 1]] > 0).all()


def test_two_proteins_and_equal_ones_have_a_place() -> None:
    places, shares = principal_components(np.array([[0.0, 1.0], [4.0, 1.0]]))
    assert sorted(places[:, 0]) == pytest.approx([-2.0, 2.0]) and shares[0] == pytest.approx(1.0)
    places, shares = principal_components(np.ones((3, 4)))
    assert places.tolist() == [[0.0, 0.0]] * 3 and shares == (0.0, 0.0)


def test_groups_colour_the_map_and_stand_in_the_table() -> None:
    means = np.random.default_rng(0).normal(size=(3, 4))
    sheet = map_sheet(["a", "b", "c"], means, "model x", ["u", "v", "u"], "family")
    [[points]] = sheet.layout
    assert points.groups == ["u", "v", "u"] and points.group_label == "family"
    assert points.labels == {0: "a", 1: "b", 2: "c"}
    assert sheet.table.columns == ["id", "PC1", "PC2", "family"]
    assert [row[3] for row in sheet.table.rows] == ["u", "v", "u"]


def test_contacts_are_listed_with_the_most_likely_first() -> None:
    contacts = np.zeros((9, 9))
    contacts[0, 8] = contacts[8, 0] = 0.9
    contacts[0, 1] = contacts[1, 0] = 1.0
    sheet = contact_sheet(ProteinRecord("wt", "MKTAYIAKQ", "first_position=24"), contacts, "model x")
    [[panel]] = sheet.layout
    assert panel.square and panel.range == (0.0, 1.0) and panel.columns == list(range(24, 33))
    assert panel.names[0][8] == "M24 - Q32"
    # Neighbours are no contacts worth a row.
    assert sheet.table.rows[0] == ["M24", "Q32", 8, 0.9] and len(sheet.table.rows) == 6
