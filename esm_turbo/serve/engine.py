"""The one thread that owns the model: it fills batches from the jobs of many clients.

Jobs take turns. The first in line gives rows to a batch of limited size, others fill the room that it leaves, and a job
with rows left goes to the end of the line. So a short job waits for a few batches at most, however long others are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.errors import busy, stopping
from esm_turbo.serve.jobs import CallJob, Job, RowJob, RowSlice
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics
from esm_turbo.serve.rows import run_rows
from esm_turbo.tasks.common.forwards import batch_tokens

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

_log = logging.getLogger("esm_turbo")
# Jobs that take turns; each keeps a context in memory. Further ones come in where a batch has room left.
_ACTIVE = 8
# Weight of the last batch in the moving average of tokens per second.
_LATEST = 0.1


class Engine:
    """Runs jobs in a thread of its own.

    Args:
        turbo: the model, which nothing else may use meanwhile.
        contexts: likewise.
        limits: of the queue.
        metrics: counts batches and tokens.
        toks_per_batch: tokens per batch; None chooses by device, as the tasks do.
        wait: seconds that a batch with room left waits for further jobs.
    """

    def __init__(
        self,
        turbo: ContextModel,
        contexts: Contexts,
        limits: Limits,
        metrics: Metrics,
        toks_per_batch: int | None = None,
        wait: float = 0.002,
    ) -> None:
        self.turbo = turbo
        self.contexts = contexts
        self.limits = limits
        self.metrics = metrics
        self.wait = wait
        self.toks_per_batch = batch_tokens(toks_per_batch, "turbo", turbo.model.device)
        self.tokens_per_second = 0.0
        self._waiting: deque[Job] = deque()
        self._active: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="esm-turbo engine", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def stop(self, *, finish: bool = True) -> None:
        """End the thread, once all jobs are finished, or only the batch that runs."""
        with self._changed:
            self._stopping = True
            for job in [] if finish else self._unfinished():
                job.fail(stopping())
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs are run."""
        return self._thread.is_alive()

    @property
    def jobs(self) -> int:
        """Number of jobs that wait or run."""
        with self._changed:
            return len(self._unfinished())

    def submit(self, job: Job) -> None:
        """Put a job into the queue.

        Raises:
            RequestError: the queue is full, the job would have to wait for too long, or the service is stopping.
        """
        with self._changed:
            if self._stopping or not self.alive:
                raise stopping()
            waiting = self._unfinished()
            backlog = self._seconds(sum(one.tokens - one.done for one in waiting))
            if len(waiting) >= self.limits.queue:
                raise busy(f"{len(waiting):,} requests are waiting, the limit; try again later", backlog / 2)
            if backlog > self.limits.seconds:
                over = backlog - self.limits.seconds
                raise busy(f"requests wait for about {backlog:.0f} s; try again later", over)
            self._waiting.append(job)
            self._changed.notify()

    def discard(self, job: Job) -> None:
        """Take a job out of the queue, since nobody waits for it any more; if it runs, its next rows do not."""
        job.future.cancel()
        with self._changed:
            for queue in (self._waiting, self._active):
                if job in queue:
                    queue.remove(job)

    def _unfinished(self) -> list[Job]:
        queues = (self._running, self._active, self._waiting)
        return [job for queue in queues for job in queue if not job.over]

    def _seconds(self, tokens: int) -> float:
        """Time that tokens take, about; 0 if that is not known yet."""
        return tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            _log.error("the engine failed: %s: %s", type(error).__name__, error)
            raise
        finally:
            with self._changed:
                self._stopping = True
                left = [*self._running, *self._active, *self._waiting]
                for queue in (self._running, self._active, self._waiting):
                    queue.clear()
            for job in left:
                job.fail(stopping())

    def _turn(self) -> bool:
        """Run one batch; False once all is done and no more is to come."""
        with self._changed:
            while (first := self._next(lambda job: True)) is None:
                if self._stopping:
                    return False
                self._changed.wait()
        begin = time.monotonic()
        tokens = 0
        try:
            if isinstance(first, CallJob):
                tokens = self._run_call(first)
            elif isinstance(first, RowJob):
                tokens = self._run_rows(first)
        except Exception as error:
            for job in self._running:
                job.fail(error)
        seconds = time.monotonic() - begin
        if tokens:
            rate, known = tokens / max(seconds, 1e-6), self.tokens_per_second
            self.tokens_per_second = known + _LATEST * (rate - known) if known else rate
            self.metrics.batch(tokens, len(self._running), seconds)
        with self._changed:
            self._active.extend(job for job in self._running if not job.over)
            self._running.clear()
        return True

    def _next(self, fits: Callable[[Job], bool]) -> Job | None:
        """The next job that fits, which is now running; None if there is none. Needs the lock.

        Jobs that had a turn come before new ones, as long as enough of them are there.
        """
        while self._waiting and len(self._active) < _ACTIVE:
            self._active.append(self._waiting.popleft())
        for queue in (self._active, self._waiting):
            for job in queue:
                if not job.over and fits(job):
                    queue.remove(job)
                    self._running.append(job)
                    job.began = True
                    return job
        return None

    def _fill(self, first: Job, fits: Callable[[Job], bool]) -> Job | None:
        """As `_next`, but waits a moment for a job if there is none."""
        with self._changed:
            while (job := self._next(fits)) is None:
                left = first.arrived + self.wait - time.monotonic()
                if left <= 0 or self._stopping:
                    return None
                self._changed.wait(left)
            return job

    def _run_call(self, first: CallJob) -> int:
        """Run a job and others like it; the number of their tokens."""
        jobs, tokens = [first], first.tokens

        def fits(job: Job) -> bool:
            alike = isinstance(job, CallJob) and job.merge == first.merge
            return alike and tokens + job.tokens <= self.toks_per_batch

        while tokens < self.toks_per_batch and isinstance(job := self._fill(first, fits), CallJob):
            jobs.append(job)
            tokens += job.tokens
        results: Sequence[object] | None = None
        try:
            results = first.run(self.turbo, self.contexts, jobs, self.toks_per_batch)
        except Exception as error:
            if len(jobs) == 1:
                first.fail(error)
                return 0
        if results is None:
            # One after the other, for the reasons given in `_run_batch`.
            results = [self._alone(job) for job in jobs]
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, BaseException):
                job.fail(result)
            else:
                job.advance(job.tokens)
                job.succeed(result)
        return tokens

    def _alone(self, job: CallJob) -> object:
        try:
            return job.run(self.turbo, self.contexts, [job], self.toks_per_batch)[0]
        except Exception as error:
            return error

    def _run_rows(self, first: RowJob) -> int:
        """Run a batch of rows of a job and of others; the number of its tokens."""
        batch: list[RowSlice] = []
        job, tokens = first, 0
        while tokens < self.toks_per_batch:
            if job.left == 0:
                found = self._fill(first, lambda one: isinstance(one, RowJob))
                if not isinstance(found, RowJob):
                    break
                job = found
            try:
                taken = job.take(self.turbo, self.contexts, self.toks_per_batch - tokens)
            except Exception as error:
                job.fail(error)
                job.left = 0
                continue
            batch.append(taken)
            tokens += taken.rows.input_ids.numel()
        self._run_batch([taken for taken in batch if not taken.job.over])
        return tokens

    def _run_batch(self, batch: Sequence[RowSlice]) -> None:
        left = dict(enumerate(batch))
        try:
            for index, predicted in run_rows(self.turbo, [taken.rows for taken in batch]):
                self._put(left.pop(index), predicted)
            if left:
                raise RuntimeError("rows were not run")
        except Exception as error:
            if len({taken.job for taken in left.values()}) == 1:
                next(iter(left.values())).job.fail(error)
                return
        # What is wrong with one of them must not reach the others. Not while the error is handled: it holds the frames
        # of the failed run, and these its tensors.
        for job in dict.fromkeys(taken.job for taken in left.values()):
            self._run_batch([taken for taken in left.values() if taken.job is job])

    def _put(self, taken: RowSlice, predicted: Tensor) -> None:
        """Give a job its predictions; with its last ones it ends, whatever else is in the batch."""
        job = taken.job
        try:
            taken.put(predicted)
            if not (job.over or job.missing):
                job.succeed(job.result(self.turbo))
        except Exception as error:
            job.fail(error)
