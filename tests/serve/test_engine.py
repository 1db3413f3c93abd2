"""The engine: turns, shared batches, the queue, failures, the end."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from esm_turbo.serve import engine as engine_module
from esm_turbo.serve.engine import Engine
from esm_turbo.serve.errors import RequestError
from esm_turbo.serve.jobs import CallJob, ContextGroup, RowJob
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics
from esm_turbo.tasks.common.rows import RowBatch, RowGroup

WIDTH, BATCH = 10, 100


@dataclass(frozen=True, kw_only=True)
class Numbered(RowGroup):
    """Rows of tokens that are the row's own number."""

    begin: int
    got: list[float]

    def rows(self, numbers):
        return RowBatch((self.begin + numbers)[:, None].expand(-1, WIDTH), numbers)

    def reduce(self, numbers, log_probs):
        self.got.extend(log_probs[:, 0].tolist())
        return log_probs


class Some(RowJob):
    """Rows whose predictions are their own numbers."""

    kind = "some"

    def __init__(self, name: str, rows: int) -> None:
        super().__init__(rows * WIDTH, rows)
        self.name, self.got = name, []

    def context_groups(self, turbo, contexts):
        half = self.left // 2
        for begin, end in ((0, half), (half, self.left)):
            if end > begin:
                yield self.group(begin, end)

    def group(self, begin: int, end: int) -> ContextGroup:
        group = Numbered(count=end - begin, width=WIDTH, begin=begin, got=self.got)
        return ContextGroup(group, (self.name, begin), None, [])

    def result(self, turbo):
        return self.got


class Whole(CallJob):
    """A job whose result is the number of jobs that it ran with."""

    kind = "whole"

    def __init__(self, merge: str, tokens: int, error: Exception | None = None) -> None:
        super().__init__(tokens)
        self.merge, self.error = merge, error

    def run(self, turbo, contexts, jobs, toks_per_batch):
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [len(jobs)] * len(jobs)


@pytest.fixture
def batches(monkeypatch):
    """The batches that ran, as lists of names and numbers of rows. They run while `batches.gate` is set."""
    seen = SimpleNamespace(batches=[], gate=threading.Event(), begun=threading.Event(), poison=None)
    seen.gate.set()

    def run_rows(turbo, parts):
        seen.begun.set()
        assert seen.gate.wait(30)
        names = [(part.key[0], len(part)) for part in parts]
        if seen.poison in dict(names):
            raise RuntimeError("poison")
        seen.batches.append(names)
        yield from enumerate(part.input_ids[:, :1].float() for part in parts)

    monkeypatch.setattr(engine_module, "run_rows", run_rows)
    return seen


@pytest.fixture
def engine():
    turbo = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    one = Engine(turbo, None, Limits(queue=6), Metrics(), toks_per_batch=BATCH, wait=0.05)
    one.start()
    yield one
    one.stop()


def hold(engine, batches) -> Some:
    """A job that runs until the gate opens, so that others gather behind it."""
    batches.gate.clear()
    job = Some("first", 10)
    engine.submit(job)
    assert batches.begun.wait(30)
    return job


def test_every_row_runs_once_and_in_order(engine, batches):
    jobs = [Some(name, rows) for name, rows in (("a", 1), ("b", 25), ("c", 7), ("d", 33))]
    for job in jobs:
        engine.submit(job)
    for job in jobs:
        assert job.future.result(30) == list(range(job.tokens // WIDTH))
        assert job.done == job.tokens
    assert all(WIDTH * sum(rows for _, rows in batch) <= BATCH for batch in batches.batches)
    assert sum(rows for batch in batches.batches for _, rows in batch) == 66


def test_short_jobs_do_not_wait_for_long_ones(engine, batches):
    first = hold(engine, batches)
    long, short = Some("long", 1000), Some("short", 3)
    ended = []
    for job in (long, short):
        job.future.add_done_callback(lambda _, job=job: ended.append(job.name))
        engine.submit(job)
    batches.gate.set()
    long.future.result(30)
    assert ended == ["short", "long"]
    assert first.future.done()
    [number] = [index for index, batch in enumerate(batches.batches) if "short" in dict(batch)]
    assert number <= 3


def test_small_jobs_share_a_batch(engine, batches):
    hold(engine, batches)
    jobs = [Some(name, 3) for name in "abc"]
    for job in jobs:
        engine.submit(job)
    batches.gate.set()
    for job in jobs:
        job.future.result(30)
    assert {name for name, _ in batches.batches[1]} == {"a", "b", "c"}


def test_whole_jobs_of_one_kind_run_in_one_call(engine, batches):
    hold(engine, batches)
    jobs = [Whole("x", 40), Whole("x", 40), Whole("y", 10), Whole("x", 40)]
    for job in jobs:
        engine.submit(job)
    batches.gate.set()
    # The last one does not fit into the batch.
    assert [job.future.result(30) for job in jobs] == [2, 2, 1, 1]


def test_a_failure_reaches_its_own_job_alone(engine, batches):
    hold(engine, batches)
    batches.poison = "bad"
    bad, good = Some("bad", 3), Some("good", 3)
    wholes = [Whole("x", 1), Whole("x", 1, ValueError("mine")), Whole("x", 1)]
    for job in (bad, good, *wholes):
        engine.submit(job)
    batches.gate.set()
    assert good.future.result(30) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="poison"):
        bad.future.result(30)
    with pytest.raises(ValueError, match="mine"):
        wholes[1].future.result(30)
    assert [job.future.result(30) for job in (wholes[0], wholes[2])] == [1, 1]
    again = Some("again", 3)
    engine.submit(again)
    assert again.future.result(30) == [0, 1, 2]


def test_what_failed_is_freed_before_its_jobs_run_alone(engine, batches, monkeypatch):
    kept, alive = [], []

    def failing(turbo, parts):
        alive.append([one() is not None for one in kept])
        tensor = torch.ones(len(parts))
        kept.append(weakref.ref(tensor))
        raise RuntimeError(f"no room for {tensor}")

    hold(engine, batches)
    jobs = [Some("one", 3), Some("other", 3)]
    for job in jobs:
        engine.submit(job)
    monkeypatch.setattr(engine_module, "run_rows", failing)
    batches.gate.set()
    for job in jobs:
        with pytest.raises(RuntimeError, match="no room for"):
            job.future.result(30)
    # The batch of both is gone when the first of them runs alone.
    assert alive[:2] == [[], [False]]


def test_a_full_queue_refuses_and_a_discarded_job_frees_its_place(engine, batches):
    first = hold(engine, batches)
    jobs = [Some(str(number), 1) for number in range(5)]
    for job in jobs:
        engine.submit(job)
    with pytest.raises(RequestError, match="6 requests are waiting") as refused:
        engine.submit(Some("late", 1))
    assert refused.value.status == 429 and refused.value.retry_after >= 1
    engine.discard(jobs[2])
    engine.discard(first)
    assert engine.jobs == 4
    engine.submit(Some("in time", 1))
    batches.gate.set()
    jobs[4].future.result(30)
    assert jobs[2].future.cancelled() and first.future.cancelled()
    assert "2" not in {name for batch in batches.batches for name, _ in batch}


def test_a_long_wait_is_refused_with_the_time_to_come_again(engine, batches):
    hold(engine, batches)
    engine.submit(Some("long", 100_000))
    engine.tokens_per_second = 1000.0
    with pytest.raises(RequestError, match="requests wait for about 1000 s") as refused:
        engine.submit(Some("late", 1))
    assert refused.value.retry_after == 600
    batches.gate.set()


def test_what_is_not_finite_is_an_error(engine, batches, monkeypatch):
    monkeypatch.setattr(
        engine_module, "run_rows", lambda turbo, parts: enumerate([torch.full((1, 1), torch.nan)] * len(parts))
    )
    job = Some("nan", 2)
    engine.submit(job)
    with pytest.raises(RequestError, match="not finite"):
        job.future.result(30)


def test_the_engine_survives_what_it_does_not_expect(engine, batches, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "run_rows", lambda turbo, parts: [])
        job = Some("lost", 2)
        engine.submit(job)
        with pytest.raises(RuntimeError, match="rows were not run"):
            job.future.result(30)
    again = Some("again", 2)
    engine.submit(again)
    assert again.future.result(30) == [0, 1]


@pytest.mark.parametrize("finish", [True, False])
def test_at_the_end_jobs_are_finished_or_told(batches, finish):
    turbo = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    engine = Engine(turbo, None, Limits(), Metrics(), toks_per_batch=BATCH)
    engine.start()
    hold(engine, batches)
    waiting = Some("waiting", 30)
    engine.submit(waiting)
    threading.Timer(0.1, batches.gate.set).start()
    engine.stop(finish=finish)
    assert not engine.alive
    if finish:
        assert waiting.future.result(0) == list(range(30))
    else:
        with pytest.raises(RequestError, match="stopping"):
            waiting.future.result(0)
    with pytest.raises(RequestError, match="stopping"):
        engine.submit(Some("late", 1))
