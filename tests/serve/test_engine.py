"""The engine: turns of clients, shared batches, the queue, failures, the end."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from esm_turbo.serve.engine import Engine
from esm_turbo.serve.errors import RequestError
from esm_turbo.serve.jobs import Job
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics

WIDTH, BATCH = 10, 100
TURBO = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))


class Rows(Job):
    """Rows whose results are their own numbers; batches run as the fixture says."""

    kind, batch = "rows", "rows"
    least = WIDTH

    def __init__(self, name: str, rows: int, client: str = "one") -> None:
        super().__init__(rows * WIDTH)
        self.name, self.rows, self.taken, self.got, self.client = name, rows, 0, [], client

    def take(self, turbo, contexts, tokens):
        begin, self.taken = self.taken, min(self.rows, self.taken + max(1, tokens // WIDTH))
        self.left = self.taken < self.rows
        return (self.name, list(range(begin, self.taken))), WIDTH * (self.taken - begin)

    @classmethod
    def run(cls, turbo, contexts, works):
        return BATCHES.run(works)

    def put(self, found):
        self.got += found
        self.advance(WIDTH * len(found))

    def result(self):
        return self.got


class Alone(Rows):
    """Pieces that share no batch."""

    kind, batch = "alone", None


class Batches:
    """The batches that ran, as lists of names and numbers of rows. They run while `gate` is set."""

    def __init__(self) -> None:
        self.seen, self.poison = [], None
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()

    def run(self, works):
        self.begun.set()
        assert self.gate.wait(30)
        names = [(name, len(rows)) for name, rows in works]
        if self.poison in dict(names):
            raise RuntimeError("poison")
        self.seen.append(names)
        yield from enumerate(rows for _, rows in works)


BATCHES = Batches()


@pytest.fixture(autouse=True)
def batches(monkeypatch):
    monkeypatch.setitem(globals(), "BATCHES", Batches())
    return BATCHES


@pytest.fixture
def engine():
    one = Engine(TURBO, None, Limits(queue=12), Metrics(), toks_per_batch=BATCH, wait=0.05)
    one.speeds = {"rows": 1e6, "alone": 1e6}
    one.start()
    yield one
    one.stop(finish=False, timeout=30)


def hold(engine, batches, rows: int = 10) -> Rows:
    """A job that runs until the gate opens, so that others gather behind it."""
    batches.gate.clear()
    job = Rows("first", rows)
    engine.submit(job)
    assert batches.begun.wait(30)
    return job


def names(batches) -> list[str]:
    """Of the jobs whose turns the batches were."""
    return [batch[0][0] for batch in batches.seen]


def test_every_row_runs_once_and_in_order(engine, batches):
    jobs = [Rows(name, rows) for name, rows in (("a", 1), ("b", 25), ("c", 7), ("d", 33))]
    for job in jobs:
        engine.submit(job)
    for job in jobs:
        assert job.future.result(30) == list(range(job.rows))
        assert job.done == job.ran == job.tokens
    assert all(WIDTH * sum(rows for _, rows in batch) <= BATCH for batch in batches.seen)
    assert sum(rows for batch in batches.seen for _, rows in batch) == 66


def test_short_jobs_do_not_wait_for_long_ones(engine, batches):
    first = hold(engine, batches)
    long, short = Rows("long", 1000), Rows("short", 3)
    for job in (long, short):
        engine.submit(job)
    batches.gate.set()
    long.future.result(30)
    assert first.future.done() and short.future.done()
    [number] = [index for index, batch in enumerate(batches.seen) if "short" in dict(batch)]
    assert number <= 3


@pytest.mark.parametrize("kind", [Rows, Alone])
def test_clients_take_turns_however_much_they_ask_for(engine, batches, kind):
    hold(engine, batches)
    greedy = [kind(f"greedy {number}", 40, "greedy") for number in range(5)]
    modest = kind("modest", 40, "modest")
    for job in (*greedy, modest):
        engine.submit(job)
    batches.gate.set()
    for job in (*greedy, modest):
        job.future.result(30)
    turns = [index for index, batch in enumerate(batches.seen) if "modest" in dict(batch)]
    # Every other batch, of which four hold it, after the first one and that which it waited for.
    assert turns[-1] <= 9
    # Jobs of one client take turns among themselves.
    assert len(set(names(batches)[:10])) >= 5


def test_a_batch_takes_a_second_at_the_speed_of_its_kind(engine, batches):
    engine.speeds = {"rows": 55.0, "alone": 1e6}
    jobs = [Rows("slow", 20), Alone("fast", 20)]
    for job in jobs:
        engine.submit(job)
        job.future.result(30)
    sizes = {name: [rows for batch in batches.seen for own, rows in batch if own == name] for name in ("slow", "fast")}
    assert sizes["slow"][0] == 5 and sizes["fast"] == [10, 10]
    # Measured again, each for itself.
    assert engine.speeds["rows"] > 55 and engine.speeds["alone"] > 1000


def test_a_job_that_nobody_waits_for_runs_no_more_pieces(engine, batches):
    job = hold(engine, batches, rows=1000)
    engine.cancel(job)
    assert (engine.jobs, engine.running) == (0, 1)
    other = Rows("other", 3)
    engine.submit(other)
    batches.gate.set()
    assert other.future.result(30) == [0, 1, 2]
    assert names(batches) == ["first", "other"]


def test_small_jobs_share_a_batch(engine, batches):
    hold(engine, batches)
    jobs = [Rows(name, 3) for name in "abc"]
    for job in jobs:
        engine.submit(job)
    batches.gate.set()
    for job in jobs:
        job.future.result(30)
    assert {name for name, _ in batches.seen[1]} == {"a", "b", "c"}


def test_a_failure_reaches_its_own_job_alone(engine, batches):
    hold(engine, batches)
    batches.poison = "bad"
    bad, good = Rows("bad", 3), Rows("good", 3)
    for job in (bad, good):
        engine.submit(job)
    batches.gate.set()
    assert good.future.result(30) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="poison"):
        bad.future.result(30)
    again = Rows("again", 3)
    engine.submit(again)
    assert again.future.result(30) == [0, 1, 2]


@pytest.mark.parametrize("method", ["take", "put", "result"])
def test_a_job_that_cannot_be_cut_or_ended_fails_alone(engine, batches, monkeypatch, method):
    def fail(*_):
        raise ValueError("mine")

    hold(engine, batches)
    bad, good = Rows("bad", 3), Rows("good", 3)
    monkeypatch.setattr(bad, method, fail)
    for job in (bad, good):
        engine.submit(job)
    batches.gate.set()
    assert good.future.result(30) == [0, 1, 2]
    with pytest.raises(ValueError, match="mine"):
        bad.future.result(30)


def test_what_failed_is_freed_before_its_jobs_run_alone(engine, batches, monkeypatch):
    kept, alive = [], []

    def failing(works):
        alive.append([one() is not None for one in kept])
        tensor = torch.ones(len(works))
        kept.append(weakref.ref(tensor))
        raise RuntimeError(f"no room for {tensor}")

    hold(engine, batches)
    jobs = [Rows("one", 3), Rows("other", 3)]
    for job in jobs:
        engine.submit(job)
    monkeypatch.setattr(batches, "run", failing)
    batches.gate.set()
    for job in jobs:
        with pytest.raises(RuntimeError, match="no room for"):
            job.future.result(30)
    # The batch of both is gone when the first of them runs alone.
    assert alive[:2] == [[], [False]]


def test_a_full_queue_refuses_and_a_cancelled_job_frees_its_place(engine, batches):
    first = hold(engine, batches)
    jobs = [Rows(str(number), 1) for number in range(5)]
    for job in jobs:
        engine.submit(job)
    # Half of the queue is for others.
    with pytest.raises(RequestError, match="6 of your requests are waiting") as refused:
        engine.submit(Rows("late", 1))
    assert refused.value.status == 429 and refused.value.retry_after >= 1
    others = [Rows(str(number), 1, "other") for number in range(5, 11)]
    for job in others:
        engine.submit(job)
    with pytest.raises(RequestError, match="12 requests are waiting"):
        engine.submit(Rows("late", 1, "third"))
    engine.cancel(jobs[2])
    engine.cancel(first)
    assert engine.jobs == 10
    engine.submit(Rows("in time", 1))
    batches.gate.set()
    jobs[4].future.result(30)
    assert jobs[2].future.cancelled() and first.future.cancelled()
    assert "2" not in {name for batch in batches.seen for name, _ in batch}


def test_a_long_wait_is_refused_with_the_time_to_come_again(engine, batches):
    hold(engine, batches)
    engine.submit(Rows("long", 100_000))
    engine.speeds = {"rows": 1000.0, "alone": 1.0}
    assert engine.backlog == pytest.approx(1000, rel=0.01)
    for job in (Rows("late", 1), Alone("of another kind", 1)):
        with pytest.raises(RequestError, match="requests wait for about 1000 s") as refused:
            engine.submit(job)
        assert refused.value.retry_after == 600
    # Another client's job waits for a few turns, however much this one has asked for.
    engine.submit(Rows("in time", 1, "other"))
    # What other work has shown says nothing of work that is slower.
    engine.submit(Alone("slow", 10, "other"))
    with pytest.raises(RequestError, match="wait for about 200 s"):
        engine.submit(Rows("behind it", 1, "other"))
    batches.gate.set()


def test_the_engine_survives_what_it_does_not_expect(engine, batches, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(batches, "run", lambda works: [])
        job = Rows("lost", 2)
        engine.submit(job)
        with pytest.raises(RuntimeError, match="a piece was not run"):
            job.future.result(30)
    again = Rows("again", 2)
    engine.submit(again)
    assert again.future.result(30) == [0, 1]


@pytest.mark.parametrize("finish", [True, False])
def test_at_the_end_jobs_are_finished_or_told(batches, finish):
    engine = Engine(TURBO, None, Limits(), Metrics(), toks_per_batch=BATCH)
    engine.start()
    hold(engine, batches)
    waiting = Rows("waiting", 30)
    engine.submit(waiting)
    threading.Timer(0.1, batches.gate.set).start()
    engine.stop(finish=finish, timeout=30)
    assert not engine.alive
    if finish:
        assert waiting.future.result(0) == list(range(30))
    else:
        with pytest.raises(RequestError, match="stopping"):
            waiting.future.result(0)
    with pytest.raises(RequestError, match="stopping"):
        engine.submit(Rows("late", 1))


def test_a_batch_that_does_not_end_keeps_nobody(engine, batches):
    job = hold(engine, batches)
    begin = time.monotonic()
    engine.stop(finish=False, timeout=0.2)
    assert engine.alive and time.monotonic() - begin < 10
    assert engine.batch_seconds >= 0.2
    with pytest.raises(RequestError, match="stopping"):
        job.future.result(0)
    batches.gate.set()
