"""Rows that name their contexts: which ones follow each other, and in which order they all do."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.codecs.row_index import Group, RowIndex, StaticRowIndex, of_rows

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


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 40), st.sampled_from([1, 8, 16]))
def test_tiles_cover_every_query_once(contexts: list[int], num_tokens: int, queries: int) -> None:
    """No tile crosses from one context to the next."""
    index, _ = RowIndex(np.array(contexts)).grouped(CPU)
    table = index.tiles(num_tokens, queries, CPU)
    assert table.dtype == torch.int32
    seen = []
    for context, first, end in table.tolist():
        assert 0 < end - first <= queries
        for query in range(first, end):
            row = query // num_tokens
            assert index.contexts[row] == context
            seen.append(query)
    assert seen == list(range(len(contexts) * num_tokens))
    assert index.tiles(num_tokens, queries, CPU) is table
    of_read, read = index.of_read(CPU)
    assert read.tolist() == sorted(set(contexts))
    assert read[torch.from_numpy(of_read.contexts)].tolist() == index.contexts.tolist()
    assert index.of_read(CPU)[0] is of_read
    assert index.most_rows == max(group.stop - group.start for group in index.groups)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 20))
def test_a_static_index_keeps_its_tensors(loads: list[list[int]], num_tokens: int) -> None:
    """Contexts are loaded into the same tensors: their tiles, then empty ones; further rows repeat the last."""
    static = StaticRowIndex(6, 4)
    tiles, on = static.tiles(num_tokens, 8, CPU), static.on(CPU)
    for contexts in loads:
        index, _ = RowIndex(np.array(contexts)).grouped(CPU)
        static.load(index)
        padded = RowIndex(np.array([*index.contexts, *[index.contexts[-1]] * (6 - len(contexts))]))
        expected = padded.tiles(num_tokens, 8, CPU)
        count = len(expected)
        assert torch.equal(tiles[:count], expected)
        assert not tiles[count:].any()
        assert on.tolist() == padded.contexts.tolist()
        assert static.tiles(num_tokens, 8, CPU) is tiles
        assert static.on(CPU) is on
        assert (static.most_rows, static.groups) == (6, padded.groups)


def test_contexts_in_the_order_of_their_ranks() -> None:
    index, order = RowIndex(np.array([0, 0, 1, 2])).grouped(CPU, np.array([2, 0, 1]))
    assert order is not None
    assert (order.tolist(), index.contexts.tolist()) == ([2, 3, 0, 1], [1, 2, 0, 0])
    assert index.grouped(CPU, np.array([2, 0, 1]))[1] is None


def test_what_rows_read() -> None:
    x = torch.arange(6).view(3, 2)
    index = RowIndex(np.array([2, 0, 2, 1]))
    assert index.take(x).tolist() == [[4, 5], [0, 1], [4, 5], [2, 3]]
    assert torch.equal(of_rows(x, index), index.take(x))
    assert of_rows(x, None) is x
