"""Screens in pieces: contexts read ahead, failures, ends, and runs that continue, of candidates and of variants."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from esm_turbo.files.journal import Journal
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common import forwards, memory, row_engine
from esm_turbo.tasks.common import pieces as pieces_module
from esm_turbo.tasks.common.memory import NotEnoughMemoryError
from esm_turbo.tasks.common.pieces import InProcessRunner, Plan, Runner, Shard
from esm_turbo.tasks.common.progress import silent
from esm_turbo.tasks.scoring import records as scoring
from esm_turbo.tasks.scoring.records import Candidate
from esm_turbo.tasks.variants import records as variants
from tests.helpers.shelf import Shelf

PROTEINS = [
    ProteinRecord(str(number), residues)
    for number, residues in enumerate(["MKTAYIAKQRQISFVKSHFS", "GSWKDLAEPLGSWKDLAEPL", "ACDEFGHIKLMNPQRSTVWY"])
]
CANDIDATE = Candidate("a", "ACDEF")
Screen = Callable[..., Any]


@pytest.fixture(params=["score", "variants"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A screen of the proteins, a piece each."""
    # The smallest piece has a 32th: the 200 tokens of a protein's variants.
    monkeypatch.setattr(pieces_module, "TOKENS_PER_PIECE", {"score": 1, "variants": 32 * 200}[request.param])

    def score(turbo: TurboEsm, arms: Sequence[Any] = ("turbo",), **options: Any) -> Any:
        if request.param == "score":
            return scoring.score_records(turbo, PROTEINS, [CANDIDATE], arms, **options)
        return variants.score_records(turbo, PROTEINS, None, arms, **options)

    return score


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


class Elsewhere(Runner):
    """Runs pieces on a model of its own, as another process does; `changes` of it follow each."""

    def __init__(self, turbo: TurboEsm, changes: Callable[[TurboEsm], None]) -> None:
        self.turbo, self.changes = copy.deepcopy(turbo), changes

    def results(self, task: Any, pieces: Any, units: Any, progress: Any) -> Iterator[Any]:
        task = pickle.loads(pickle.dumps(task))
        for index, piece in enumerate(pieces):
            yield index, next(task.run(self.turbo, [piece], silent))
            self.changes(self.turbo)


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
            one_by_one = screen(turbo, arms, store=other, runner=OneByOne(turbo))
            assert screen(turbo, arms, store=store) == one_by_one


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

    def fail(number: int) -> None:
        if shelf.asked_for(turbo, PROTEINS[1].sequence):
            raise OSError("the disk is gone")

    shelf.before = fail
    with pytest.raises(OSError, match="the disk is gone"):
        screen(turbo, store=shelf, journal=Journal(tmp_path))
    assert threads() == before
    shelf.before = lambda number: None
    assert screen(turbo, store=shelf, journal=(journal := Journal(tmp_path))) == expected
    assert journal.found == 1


def test_a_stopped_run_continues_with_the_bits_of_a_whole_one(
    turbo: TurboEsm, screen: Screen, shelf: Shelf, tmp_path: Path
) -> None:
    arms, sequences = ("turbo", "frozen"), [one.sequence for one in PROTEINS]
    whole, totals = screen(turbo, arms, store=shelf), list[int]()

    def stop(stage: str, done: int, total: int) -> None:
        totals.append(total)
        if done > total // len(PROTEINS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        screen(turbo, arms, store=shelf, journal=Journal(tmp_path), progress=stop)
    assert set(totals) == {2 * 3 * (20 if isinstance(whole, variants.VariantsRun) else len(CANDIDATE.sequence))}
    shelf.asked.clear()
    rest = screen(turbo, arms, store=shelf, journal=(journal := Journal(tmp_path)))
    assert journal.found == 1 and rest == whole
    assert [shelf.asked_for(turbo, one) for one in sequences] == [0, 2, 2]
    # All of it is there, and nothing is computed again.
    shelf.asked.clear()
    assert screen(turbo, arms, store=shelf, journal=Journal(tmp_path)) == whole and shelf.asked == []
    # Other options or arms are other runs, and leave what is there.
    for other, options in ((arms, {"refresh": 3}), (("frozen",), {}), (arms, {"toks_per_batch": 50})):
        with pytest.raises(
            ValueError, match=f"{tmp_path}: holds results of a run that was stopped, of other inputs, opt"
        ):
            screen(turbo, other, store=shelf, journal=Journal(tmp_path), **options)
    assert screen(turbo, arms, store=shelf, journal=Journal(tmp_path)) == whole and shelf.asked == []


def bend(turbo: TurboEsm) -> None:
    """Change one weight, without a trace."""
    turbo.model.base_model.encoder.layer[3].attention.self.value.weight.data[0, 0] += 1


@pytest.mark.parametrize("arms", [("full",), ("frozen",)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_nothing_is_kept_or_returned_of_a_model_that_changes(
    turbo: TurboEsm, tmp_path: Path, screen: Screen, arms: Sequence[Any], elsewhere: bool
) -> None:
    whole, own = screen(turbo, arms), copy.deepcopy(turbo)

    def change(stage: str, done: int, total: int) -> None:
        if done > total // len(PROTEINS) and not elsewhere:
            bend(own)

    runner = Elsewhere(own, bend) if elsewhere else None
    match = "is not that of the run: the weights differ" if elsewhere else "has changed since the run began"
    with pytest.raises(ValueError, match=match):
        screen(own, arms, runner=runner, journal=Journal(tmp_path), progress=change)
    rest = screen(turbo, arms, journal=(journal := Journal(tmp_path)))
    assert journal.found and rest == whole


def test_what_failed_is_tried_again(
    turbo: TurboEsm, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda device: 10)
        run = screen(turbo, journal=Journal(tmp_path))
        assert [one.record for one in run.failed] == [one.id for one in PROTEINS] and run.results == []
    run = screen(turbo, journal=Journal(tmp_path))
    assert [one.record for one in run.results] == PROTEINS and run.failed == []


@pytest.mark.parametrize("arm", ["turbo", "full"])
def test_a_protein_that_does_not_fit_does_not_stop_the_others(
    turbo: TurboEsm, screen: Screen, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    expected = screen(turbo, (arm,))

    def small(model: object, tokens: int, **options: object) -> None:
        if tokens > 30:
            raise NotEnoughMemoryError(f"{tokens} tokens are too many")

    monkeypatch.setattr(pieces_module, "TOKENS_PER_PIECE", 2**17)
    for module in (forwards, row_engine):
        monkeypatch.setattr(module, "check_memory", small)
    long = ProteinRecord("long", "MKTAYIAKQRQISFVKSHFSRQLEERLGLI")
    monkeypatch.setitem(globals(), "PROTEINS", [long, *PROTEINS])
    run = screen(turbo, (arm,))
    [failed] = run.failed
    assert failed.record == "long" and failed.reason.endswith("tokens are too many")
    assert [one.record for one in run.results] == [one.record for one in expected.results]


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
    candidates = [Candidate(residues, residues) for residues in ["ACDEF", "GGG", "WTCW"]]
    with ContextStore(tmp_path / "store") as store:
        run = scoring.score_records(turbo, PROTEINS[:1], candidates, ["turbo"], store=store, place="empty")
    [result] = run.results
    # In their order, though the shortest run first.
    assert list(result.candidates) == candidates
    assert [one.candidate for one in result.scores["turbo"].scores] == ["ACDEF", "GGG", "WTCW"]
    assert computed == [1]


def test_shards_share_a_large_protein_and_keep_its_parts(
    turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pieces_module, "TOKENS_PER_PIECE", 1)
    proteins = [ProteinRecord("long", PROTEINS[0].sequence * 4), PROTEINS[1]]
    whole = variants.score_records(turbo, proteins, None, ["turbo"])
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    shards = [
        variants.score_records(turbo, proteins, None, ["turbo"], plan=Plan(Shard(number, 2)), journal=Journal(folder))
        for number, folder in enumerate(folders, start=1)
    ]
    assert ["long" in [one.wild_type.id for one in run.results] for run in shards] == [True, True]
    assert sum(len((folder / "results.jsonl").read_text().splitlines()) for folder in folders) > 4
    joined = variants.VariantsRun.of_shards(run.to_state(proteins) for run in shards)
    assert [one.variants for one in joined.results] == [one.variants for one in whole.results]
    assert [one.scores for one in joined.results] == [one.scores for one in whole.results]
