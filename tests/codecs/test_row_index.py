"""Rows that name their contexts: which ones follow each other, and in which order they all do."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.codecs.row_index import Group, RowIndex, of_rows

CPU = torch.device("cpu")


def test_groups_are_runs_of_rows() -> None:
    index = RowIndex(np.array([4, 4, 0, 2, 2, 2]))
    assert len(index) == 6
    assert index.groups == [Group(4, 0, 2), Group(0, 2, 3), Group(2, 3, 6)]
    grouped, order = index.grouped(CPU)
    assert grouped is index
    assert order is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_grouped_rows_keep_their_contexts(contexts: list[int]) -> None:
    index = RowIndex(np.array(contexts))
    grouped, order = index.grouped(CPU)
    seen = [group.context for group in grouped.groups]
    assert len(set(seen)) == len(seen)
    assert sum(group.stop - group.start for group in grouped.groups) == len(contexts)
    rows = list(range(len(contexts))) if order is None else order.tolist()
    assert sorted(rows) == list(range(len(contexts)))
    assert [contexts[row] for row in rows] == grouped.contexts.tolist()
    # Rows of a context stay in their order.
    assert all(rows[group.start : group.stop] == sorted(rows[group.start : group.stop]) for group in grouped.groups)


def test_what_rows_read() -> None:
    x = torch.arange(6).view(3, 2)
    index = RowIndex(np.array([2, 0, 2, 1]))
    assert index.take(x).tolist() == [[4, 5], [0, 1], [4, 5], [2, 3]]
    assert torch.equal(of_rows(x, index), index.take(x))
    assert of_rows(x, None) is x
