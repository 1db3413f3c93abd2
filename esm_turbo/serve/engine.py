"""A thread that fills batches with pieces of the jobs of many clients: one owns the model, another checks requests.

Clients take turns. In each, a job gives a piece to a batch, which takes about a second at most, and jobs of others fill
the room that it leaves. So a short job waits for a few batches, however long others are and however many their client
has sent, and a job whose client has left takes no time beyond the piece that runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.errors import busy, stopping
from esm_turbo.serve.jobs import Job
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics
from esm_turbo.serve.turns import Turns
from esm_turbo.tasks.common.forwards import batch_tokens

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

_log = logging.getLogger("esm_turbo")
# Seconds that a batch may take, at the speed of earlier work of its kind.
_SECONDS = 1.0
# Part of a full batch for work of a kind that never ran.
_FIRST = 0.25
# Weight of the last batch in the moving average of tokens per second.
_LATEST = 0.1


class Engine:
    """Runs jobs in a thread of its own.

    Args:
        turbo: the model, which nothing else may run meanwhile.
        contexts: likewise.
        limits: of the queue.
        metrics: counts batches and tokens.
        toks_per_batch: tokens per batch; None chooses by device, as the tasks do.
        wait: seconds that a batch with room left waits for further jobs.

    Attributes:
        speeds: tokens per second, by kind of work.
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
        self.speeds: dict[str, float] = {}
        self._turns = Turns()
        self._running: list[Job] = []
        self._since: float | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="esm-turbo engine", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def stop(self, *, finish: bool = True, timeout: float | None = None) -> None:
        """End the thread once all jobs are finished, or with the batch that runs.

        Args:
            finish: finish all jobs; otherwise they fail.
            timeout: seconds to wait for the end of the thread; None waits for as long as it takes.
        """
        if not finish:
            self.give_up()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout)

    def give_up(self) -> None:
        """Fail all jobs, and take no more."""
        with self._changed:
            self._stopping = True
            for job in self._unfinished():
                job.fail(stopping())
            self._changed.notify()

    @property
    def alive(self) -> bool:
        """Whether jobs are run."""
        return self._thread.is_alive()

    @property
    def jobs(self) -> int:
        """Number of jobs that wait or run."""
        with self._changed:
            return len(self._unfinished())

    @property
    def running(self) -> int:
        """Number of jobs in the batch that runs, those that nobody waits for any more among them."""
        with self._changed:
            return len(self._running)

    @property
    def batch_seconds(self) -> float:
        """Time for which the batch that runs has been running; 0 if none is."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def backlog(self) -> float:
        """Seconds that all jobs together still take, as far as the speed of their kinds is known."""
        with self._changed:
            return sum(map(self._seconds, self._unfinished()))

    def submit(self, job: Job) -> None:
        """Put a job into the queue.

        Raises:
            RequestError: the queue is full, or half full of jobs of this client, or the job would have to wait for too
                long, or the service is stopping.
        """
        with self._changed:
            if self._stopping or not self.alive:
                raise stopping()
            waiting = self._unfinished()
            own, most = sum(one.client == job.client for one in waiting), self.limits.queue
            seconds = self._wait(job, waiting)
            if len(waiting) >= most:
                raise busy(f"{len(waiting):,} requests are waiting, the limit; try again later", seconds / 2)
            if own >= max(1, most // 2):
                # The rest of the queue is for other clients.
                raise busy(f"{own:,} of your requests are waiting, the limit; try again later", seconds / 2)
            if seconds > self.limits.seconds:
                over = seconds - self.limits.seconds
                raise busy(f"requests wait for about {seconds:.0f} s; try again later", over)
            self._turns.add(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Take a job out of the queue, since nobody waits for it any more; if it runs, its next piece does not."""
        job.future.cancel()
        with self._changed:
            self._turns.remove(job)

    def _unfinished(self) -> list[Job]:
        return [job for job in (*self._running, *self._turns) if not job.over]

    def _seconds(self, job: Job) -> float:
        """Time that a job still takes; 0 if no work of its kind has run."""
        speed = self.speeds.get(job.kind)
        return max(0, job.tokens - job.done) / speed if speed else 0.0

    def _wait(self, job: Job, waiting: Iterable[Job]) -> float:
        """Time that a job waits for others: in the same time, each other client gets as many turns as its own."""
        by_client = Counter[str]()
        for one in waiting:
            by_client[one.client] += self._seconds(one)  # type: ignore[assignment]
        before = by_client.pop(job.client, 0.0)
        own = max(_SECONDS, before + self._seconds(job))
        return before + sum(min(seconds, own) for seconds in by_client.values())

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
                left = [*self._running, *self._turns.clear()]
                self._running.clear()
            for job in left:
                job.fail(stopping())

    def _turn(self) -> bool:
        """Run one batch; False once all is done and no more is to come."""
        with self._changed:
            while (first := self._next(lambda job: True)) is None:
                if self._stopping:
                    return False
                self._changed.wait()
        self._since = begin = time.monotonic()
        before = {first: first.ran}
        try:
            self._run(self._collect(first, before))
        except Exception as error:
            for job in self._running:
                job.fail(error)
        seconds = max(time.monotonic() - begin, 1e-6)
        ran = sum(job.ran - earlier for job, earlier in before.items())
        if ran:
            for kind in {job.kind for job in before}:
                known = self.speeds.get(kind, ran / seconds)
                self.speeds[kind] = known + _LATEST * (ran / seconds - known)
            self.metrics.batch(ran, len(before), seconds)
        with self._changed:
            self._since = None
            for job in self._running:
                if not job.over:
                    self._turns.add_again(job)
            self._running.clear()
        return True

    def _next(self, fits: Callable[[Job], bool]) -> Job | None:
        """The next job that fits, which is now running; None if there is none. Needs the lock."""
        job = self._turns.take(fits)
        if job is not None:
            self._running.append(job)
            job.began = True
        return job

    def _fill(self, first: Job, fits: Callable[[Job], bool]) -> Job | None:
        """As `_next`, but waits a moment for a job if there is none."""
        with self._changed:
            while (job := self._next(fits)) is None:
                left = first.arrived + self.wait - time.monotonic()
                if left <= 0 or self._stopping:
                    return None
                self._changed.wait(left)
            return job

    def _collect(self, first: Job, before: dict[Job, int]) -> list[tuple[Job, Any]]:
        """The pieces of a batch, each with its job: of the first one, and of others while there is room.

        Args:
            first: the job whose turn it is.
            before: of each job in the batch, the number of tokens that had run; jobs are added.
        """
        speed = self.speeds.get(first.kind, _FIRST * self.toks_per_batch / _SECONDS)
        room = max(1, min(self.toks_per_batch, int(_SECONDS * speed)))
        batch: list[tuple[Job, Any]] = []
        job: Job | None = first
        while job is not None:
            before.setdefault(job, job.ran)
            try:
                work, tokens = job.take(self.turbo, self.contexts, room)
                batch.append((job, work))
                room -= tokens
            except Exception as error:
                job.fail(error)
            if room <= 0 or first.batch is None:
                break
            job = self._fill(first, lambda one: one.batch == first.batch and one.least <= room)  # noqa: B023
        return [(job, work) for job, work in batch if not job.over]

    def _run(self, batch: Sequence[tuple[Job, Any]]) -> None:
        if not batch:
            return
        left = dict(enumerate(batch))
        try:
            for index, found in batch[0][0].run(self.turbo, self.contexts, [work for _, work in batch]):
                self._put(left.pop(index)[0], found)
            if left:
                raise RuntimeError("a piece was not run")
        except Exception as error:
            if len(left) == 1:
                next(iter(left.values()))[0].fail(error)
                return
        # What is wrong with one of them must not reach the others. Not while the error is handled: it holds the frames
        # of the failed run, and these its tensors.
        for piece in left.values():
            self._run([piece])

    def _put(self, job: Job, found: Any) -> None:
        """Give a job what a piece of it has found; with the last piece it ends, whatever else is in the batch."""
        try:
            job.put(found)
            if not (job.over or job.left):
                job.succeed()
        except Exception as error:
            job.fail(error)
