"""Contexts of the next piece of a screen are read while this one runs: when, and what failures and ends do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from esm_turbo import ContextStore, TurboConfig, TurboEsm, TurboKVCache
from esm_turbo.files.journal import Journal
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common import pieces as pieces_module
from esm_turbo.tasks.common import row_engine
from esm_turbo.tasks.common.pieces import InProcessRunner
from esm_turbo.tasks.common.progress import silent
from esm_turbo.tasks.scoring import records as scoring
from esm_turbo.tasks.scoring.records import Candidate
from esm_turbo.tasks.variants import records as variants

PROTEINS = [
    ProteinRecord(str(number), residues)
    for number, residues in enumerate(["MKTAYIAKQRQISFVKSHFS", "GSWKDLAEPLGSWKDLAEPL", "ACDEFGHIKLMNPQRSTVWY"])
]
CANDIDATE = Candidate("a", "ACDEF")
Screen = Callable[..., Any]


@pytest.fixture(params=["score", "variants"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A screen of the proteins, a piece each; its results, which can be compared."""
    monkeypatch.setattr(pieces_module, "TOKENS_PER_PIECE", 1)

    def score(turbo: TurboEsm, arms: Sequence[Any] = ("turbo",), **options: Any) -> Any:
        if request.param == "score":
            return list(scoring.score_records(turbo, PROTEINS, [CANDIDATE], arms, **options).rows())
        return list(variants.score_records(turbo, PROTEINS, None, arms, **options).rows())

    return score


class Shelf:
    """A store of contexts in memory, which knows what it was asked for.

    Attributes:
        asked: tokens of all contexts that were looked up.
        before: called with the number of each look-up, from 1, before it is answered.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.before: Callable[[int], object] = lambda number: None
        self._kept: dict[Any, TurboKVCache] = {}

    def find(self, turbo: Any, token_ids: Sequence[Sequence[int]], config: TurboConfig, /) -> list[TurboKVCache | None]:
        assert threading.current_thread() is not threading.main_thread()
        return [self._find(tuple(ids), config) for ids in token_ids]

    def _find(self, ids: tuple[int, ...], config: TurboConfig) -> TurboKVCache | None:
        self.asked.append(ids)
        self.before(len(self.asked))
        found = self._kept.get((config.name, *ids))
        return None if found is None else found.select(0)

    def failing_at(self, protein: ProteinRecord, turbo: TurboEsm) -> Callable[[int], None]:
        """For `before`: the contexts of a protein cannot be read."""
        residues = turbo.codes.encode(protein.sequence, "a protein")

        def fail(number: int) -> None:
            if list(self.asked[-1][1 : 1 + len(residues)]) == residues:
                raise OSError("the disk is gone")

        return fail

    def keep(self, turbo: Any, token_ids: Sequence[Sequence[int]], cache: TurboKVCache, config: Any, /) -> None:
        self._kept |= {(config.name, *ids): cache.select(row) for row, ids in enumerate(token_ids)}

    def get_or_compute(self, turbo: Any, token_ids: Sequence[int], config: Any, compute: Any, /) -> TurboKVCache:
        raise AssertionError("not one by one")

    def get_or_prefill(self, turbo: Any, sequences: Sequence[str], /) -> TurboKVCache:
        raise AssertionError("not of tokens")


@pytest.fixture
def shelf(turbo: TurboEsm, screen: Screen) -> Shelf:
    """Has all contexts."""
    made = Shelf()
    screen(turbo, store=made)
    assert len(made.asked) == len(PROTEINS)
    made.asked.clear()
    return made


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


class OneByOne(InProcessRunner):
    """Runs each piece by itself, so that nothing is read ahead."""

    def run(self, work: Any, pieces: Any, **options: Any) -> Iterator[Any]:
        for index, piece in enumerate(pieces):
            [result] = work.run(self.turbo, [piece], silent)
            yield index, result


class Taken(InProcessRunner):
    """Keeps the work and the pieces of a run, and runs nothing."""

    work: Any
    pieces: Sequence[Any] = ()

    def run(self, work: Any, pieces: Any, **options: Any) -> Iterator[Any]:
        self.work, self.pieces = work, pieces
        raise InterruptedError
        yield


def work_and_pieces(turbo: TurboEsm, screen: Screen, shelf: Shelf) -> tuple[Any, Sequence[Any]]:
    runner = Taken(turbo)
    with pytest.raises(InterruptedError):
        screen(turbo, store=shelf, runner=runner)
    assert len(runner.pieces) == len(PROTEINS)
    return runner.work, runner.pieces


@pytest.mark.parametrize("arms", [("turbo",), ("frozen", "turbo"), ("turbo", "full")])
def test_results_are_those_of_pieces_one_by_one(
    turbo: TurboEsm, tmp_path: Path, screen: Screen, arms: Sequence[Any]
) -> None:
    for _ in ("contexts are computed", "contexts are there"):
        with ContextStore(tmp_path / "one") as store, ContextStore(tmp_path / "other") as other:
            assert screen(turbo, arms, store=store) == screen(turbo, arms, store=other, runner=OneByOne(turbo))


def test_the_next_piece_is_read_while_this_one_runs(
    turbo: TurboEsm, screen: Screen, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, begun, seen = row_engine.log_probabilities, threading.Event(), list[int]()

    def waiting(*arguments: Any, **options: Any) -> Tensor:
        begun.wait(20)
        seen.append(len(shelf.asked))
        return original(*arguments, **options)

    monkeypatch.setattr(row_engine, "log_probabilities", waiting)
    shelf.before = lambda number: number == 2 and begun.set()
    screen(turbo, store=shelf)
    # One ahead, and none twice.
    assert seen[0] == 2 and seen[-1] == len(shelf.asked) == len(PROTEINS)


def test_a_read_that_fails_is_an_error_of_its_own_piece(
    turbo: TurboEsm, screen: Screen, shelf: Shelf, tmp_path: Path
) -> None:
    before, expected = threads(), screen(turbo)

    shelf.before = shelf.failing_at(PROTEINS[1], turbo)
    with pytest.raises(OSError, match="the disk is gone"):
        screen(turbo, store=shelf, journal=Journal(tmp_path))
    assert threads() == before
    shelf.before = lambda number: None
    assert screen(turbo, store=shelf, journal=(journal := Journal(tmp_path))) == expected
    assert journal.found == 1


def test_an_interruption_leaves_no_thread(
    turbo: TurboEsm, screen: Screen, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads()
    work, pieces = work_and_pieces(turbo, screen, shelf)
    results = work.run(turbo, pieces, silent)
    next(results)
    assert threads() > before
    results.close()
    assert threads() == before

    def stop(*arguments: Any, **options: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(row_engine, "log_probabilities", stop)
    with pytest.raises(KeyboardInterrupt):
        screen(turbo, store=shelf)
    assert threads() == before


def test_pieces_that_share_a_context_compute_it_once(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "TOKENS_PER_PIECE", 1)
    original, computed = row_engine.prefill_rows, list[int]()

    def counted(turbo: Any, rows: Sequence[Any], config: Any) -> TurboKVCache:
        computed.append(len(rows))
        return original(turbo, rows, config)

    monkeypatch.setattr(row_engine, "prefill_rows", counted)
    candidates = [Candidate(str(number), residues) for number, residues in enumerate(["ACDEF", "GGGSG", "WTCWT"])]
    with ContextStore(tmp_path / "store") as store:
        run = scoring.score_records(turbo, PROTEINS[:1], candidates, ["turbo"], store=store)
    assert [len(one.candidates) for one in run.results] == [3]
    assert computed == [1]
