"""Clients that keep a service busy, and requests that come at a steady rate."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.serve.process import Client
from benchmarks.serve.workload import Ask, answered, difference


@dataclass
class Outcome:
    """Outcomes of requests.

    Attributes:
        seconds: from each request to its answer, by kind.
        errors: answers other than 200, and connections that failed.
        worst: largest difference of a value from the library's.
        other_residues: answers with other generated residues than the library's, see `difference`.
        elapsed: seconds from the first request to the last answer.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    worst: float = 0.0
    other_residues: int = 0
    elapsed: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """Number of good answers."""
        return sum(map(len, self.seconds.values()))

    def ask(self, client: Client, ask: Ask, keys: Sequence[str], expected: Sequence[float], since: float) -> None:
        """Send a request, and note what comes of it; its time counts from `since`."""
        try:
            answer = client.post(ask.path(keys), ask.body)
        except Exception as error:
            with self._lock:
                self.errors.append(f"{ask.kind}: {type(error).__name__}: {error}")
            return
        seconds = time.perf_counter() - since
        if answer.status != 200:
            with self._lock:
                self.errors.append(f"{ask.kind}: {answer.status} {answer.body[:200]!r}")
            return
        worst, other = difference(ask.kind, answered(ask.kind, answer.json), expected)
        with self._lock:
            self.seconds.setdefault(ask.kind, []).append(seconds)
            self.worst = max(self.worst, worst)
            self.other_residues += other


@dataclass(frozen=True)
class Load:
    """Requests, and what each must get.

    Attributes:
        asks: the requests.
        expected: the library's numbers for each.
        keys: ids of the contexts that they read.
    """

    asks: Sequence[Ask]
    expected: Sequence[Sequence[float]]
    keys: Sequence[str]

    def busy(self, port: int, clients: int, seconds: float) -> Outcome:
        """Clients that each send the next request as soon as they have an answer, until the time is over."""
        outcome, begin = Outcome(), time.perf_counter()
        turn, lock = iter(range(10**9)), threading.Lock()

        def work() -> None:
            client = Client(port)
            while time.perf_counter() - begin < seconds:
                with lock:
                    number = next(turn)
                self._ask(outcome, client, number, time.perf_counter())
            client.close()

        threads = [threading.Thread(target=work) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcome.elapsed = time.perf_counter() - begin
        return outcome

    def steady(self, port: int, rate: float, seconds: float, seed: int) -> Outcome:
        """Requests that come at random times, `rate` per second, whether or not earlier ones have been answered."""
        draw, outcome, begin = random.Random(seed), Outcome(), time.perf_counter()
        free: list[Client] = []
        lock = threading.Lock()

        def work(number: int, due: float) -> None:
            with lock:
                client = free.pop() if free else Client(port)
            self._ask(outcome, client, number, due)
            with lock:
                free.append(client)

        threads: list[threading.Thread] = []
        due = begin
        while (due := due + draw.expovariate(rate)) - begin < seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            threads.append(threading.Thread(target=work, args=(len(threads), due)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        for client in free:
            client.close()
        outcome.elapsed = time.perf_counter() - begin
        return outcome

    def _ask(self, outcome: Outcome, client: Client, number: int, since: float) -> None:
        number %= len(self.asks)
        outcome.ask(client, self.asks[number], self.keys, self.expected[number], since)
