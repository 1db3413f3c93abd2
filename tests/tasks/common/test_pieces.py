"""Runs in pieces: who does which, and progress over all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.tasks.common.pieces import (
    CPU_COST_PER_PIECE,
    TOKENS_PER_PIECE,
    InProcessRunner,
    Plan,
    Shard,
    balanced,
    forward_cost,
    packed,
    piece_limit,
)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_parts_hold_every_piece_once_and_about_the_same(costs: list[int], parts: int) -> None:
    shares = balanced(costs, parts)
    assert len(shares) == parts
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    # Each is given to the part that has least: none is ahead of another by more than one piece.
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert shares == balanced(costs, parts)


def test_a_shard_is_read() -> None:
    assert Shard.parse("3/16") == (3, 16) and str(Shard(3, 16)) == "3/16"
    for text in ("0/4", "5/4", "1", "1/0", "-1/4", "1/4/2", "a/b", ""):
        with pytest.raises(ValueError, match="a shard is written K/N with K from 1 to N"):
            Shard.parse(text)


def test_a_plan_tells_runs_apart() -> None:
    names, costs, single = ["a", "b", "c"], [5, 1, 4], [[0], [1], [2]]
    plans = [Plan(Shard(number, 2)) for number in (1, 2)]
    assert [plan.choose(single, names, costs) for plan in plans] == [[[0]], [[1], [2]]]
    assert plans[0].digest == plans[1].digest and {plan.total for plan in plans} == {3}
    for shard, *others in (((1, 2), ["a", "b", "d"], costs), ((1, 2), names, [5, 1, 3]), ((1, 3), names, costs)):
        (other := Plan(Shard(*shard))).choose(single, *others)
        assert other.digest != plans[0].digest


def test_pieces_in_this_process(turbo) -> None:
    class Lengths:
        def run(self, turbo, pieces, progress):
            for piece in pieces:
                progress("", 1, len(piece))
                yield len(piece)

    calls: list[int] = []
    runner = InProcessRunner(turbo)
    found = dict(
        runner.run(
            Lengths(), ["ab", "c"], stage="s", units=[2, 1], progress=lambda stage, done, total: calls.append(done)
        )
    )
    assert found == {0: 2, 1: 1}
    assert calls == [0, 1, 2, 3]
    assert runner.shares_files and runner.devices is None


def test_cost_grows_with_tokens_and_what_they_see(turbo) -> None:
    assert forward_cost(turbo, 20, 100) == 2 * forward_cost(turbo, 10, 100) < 2 * forward_cost(turbo, 10, 1000)


@pytest.mark.parametrize(
    ("pieces", "limit"),
    [(1, 1 / 4), (2, 1 / 4), (4, 1 / 2), (8, 1), (64, 1), (128, 2), (10**7, 4)],
    ids=lambda number: f"{number:g}",
)
def test_a_piece_is_a_part_of_a_screen_within_limits(pieces: int, limit: float) -> None:
    tokens = pieces * TOKENS_PER_PIECE
    assert piece_limit(tokens, 10 * tokens) == limit * 10 * TOKENS_PER_PIECE
    on_a_cpu = piece_limit(tokens // 8, 10 * (tokens // 8), on_cuda=False)
    assert on_a_cpu == min(limit, 1) * 10 * TOKENS_PER_PIECE // 8


def test_a_piece_of_a_large_model_takes_a_minute_on_a_cpu(turbo) -> None:
    assert piece_limit(10**6, 10**16, on_cuda=False) == CPU_COST_PER_PIECE < piece_limit(10**6, 10**16)
    assert piece_limit(0, 0, on_cuda=False) == 0

    class Large:
        model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=33, hidden_size=1280))

    # Twice the parameters of its layers; 2,300 tokens are a dozen peptides.
    assert forward_cost(Large, 1, 0) == 2 * 33 * 12 * 1280**2
    assert 2200 < CPU_COST_PER_PIECE / forward_cost(Large, 1, 300) < 2400


def test_shards_of_a_small_screen_have_about_the_same_share() -> None:
    tokens = [1000] * 480
    pieces = packed(range(480), tokens, piece_limit(sum(tokens), sum(tokens), on_cuda=False))
    shares = [sum(len(pieces[index]) for index in part) for part in balanced([len(one) for one in pieces], 3)]
    assert max(shares) - min(shares) <= 32


def test_items_are_packed_in_their_order() -> None:
    assert packed("abcde", [3, 3, 9, 1, 2], 6) == [("a", "b"), ("c",), ("d", "e")]
    assert packed("", [], 6) == []
