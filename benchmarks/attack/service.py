"""A service whose clients send nonsense, leave, stall, take all they can get, or are there when it is told to stop.

In every trial, another client asks meanwhile: it gets the same numbers as before, in time; nothing runs for those who
left; and SIGTERM ends the service within its `--timeout`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from benchmarks.attack.commands import References, protein
from benchmarks.attack.trial import Finding, Running, faults, start_command
from benchmarks.serve.malformed import head
from benchmarks.serve.process import SERVING, Answer, Client

# What an answer may take on a busy machine: a hundred times what it does. Without pieces and turns, it took minutes.
_SECONDS = 30.0
_START_SECONDS = 60.0
_SCORE = {"candidates": ["ACDEFGHIK", "GSGS"]}
_TOLERANCE = 1e-3
_JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def watched(port: int) -> Iterator[list[float]]:
    """Ask a service for its health over and over, in a thread: seconds to each answer, infinite for one that failed."""
    seconds: list[float] = []
    client, end = Client(port), threading.Event()

    def watch() -> None:
        while not end.is_set():
            begin = time.monotonic()
            try:
                healthy = client.get("/healthz").status == 200
            except OSError:
                healthy = False
            seconds.append(time.monotonic() - begin if healthy else math.inf)
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        end.set()
        thread.join()
        client.close()


def embedding(sequences: Sequence[str]) -> bytes:
    """The body of a request for embeddings."""
    return json.dumps({"input": list(sequences), "model": "esm2-mini"}).encode()


@dataclass(frozen=True)
class Served:
    """A service in a fork.

    Attributes:
        running: its process.
        port: of it.
        timeout: its `--timeout`.
        tokens: of a hostile client, and of another one.
        key: of a context.
    """

    running: Running
    port: int
    timeout: float
    tokens: tuple[str, str]
    key: str = ""

    def client(self, number: int) -> Client:
        """The hostile client, or the other one."""
        return Client(self.port, {"authorization": f"Bearer {self.tokens[number]}"}, _SECONDS)

    def ask(self, stack: ExitStack, path: str, body: bytes, length: int | None = None) -> socket.socket:
        """Send a request of the hostile client, see `send`."""
        fields = {"Authorization": f"Bearer {self.tokens[0]}"}
        return self.send(stack, head("POST", path, len(body) if length is None else length, **fields) + body)

    def send(self, stack: ExitStack, data: bytes) -> socket.socket:
        """Send bytes on a connection of their own, which stays open as long as the stack."""
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), _SECONDS))
        # A request may be refused by its head.
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return connection

    def score(self) -> Answer:
        """A small request of the other client."""
        client = self.client(1)
        try:
            return client.post(f"/v1/contexts/{self.key}/score", _SCORE)
        finally:
            client.close()

    def check_others(self, before: Answer) -> list[Finding]:
        """What is wrong with the answers to the other client."""
        found = []
        for _ in range(3):
            begin = time.monotonic()
            try:
                answer = self.score()
            except (OSError, HTTPException) as error:
                found.append(Finding("no answer", f"{type(error).__name__} after {time.monotonic() - begin:.0f} s"))
                continue
            if answer.status != 200:
                found.append(Finding("refused", f"{answer.status}: {answer.body[:200]!r}"))
            elif _differ(answer, before):
                found.append(Finding("different", f"{answer.body[:200]!r}, {before.body[:200]!r} before"))
        return found

    def check_idle(self) -> list[Finding]:
        """Whether it goes on to compute though nobody waits."""
        end = time.monotonic() + _SECONDS
        while True:
            health = self.client(1).get("/healthz")
            if health.status == 200 and health.json["queue"]["requests"] == health.json["queue"]["running"] == 0:
                return []
            if time.monotonic() > end:
                return [Finding("computes for nobody", f"after {_SECONDS:.0f} s: {health.body[:300]!r}")]
            time.sleep(0.1)

    def end(self, slack: float = 15.0) -> list[Finding]:
        """Stop it; what is wrong with how it ended."""
        begin = time.monotonic()
        os.kill(self.running.pid, signal.SIGTERM)
        outcome = self.running.wait(begin - self.running.begin + self.timeout + _SECONDS)
        seconds = time.monotonic() - begin
        found = faults(outcome)
        if outcome.code:
            found.append(Finding("exit", f"exit code {outcome.code}: {outcome.err[-200:]}"))
        if seconds > self.timeout + slack:
            found.append(Finding("slow end", f"{seconds:.0f} s for --timeout {self.timeout:g}"))
        return found


Disturb = Callable[[random.Random, Served, ExitStack], list[Finding]]


@contextlib.contextmanager
def served(folder: Path, timeout: float) -> Iterator[Served]:
    """A service on a free port, with a context; killed at the end if it still runs."""
    folder.mkdir()
    tokens = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    (folder / "tokens.txt").write_text("\n".join(tokens))
    options = ("--port", 0, "--store", "store", "--token-file", "tokens.txt", "--threads", 1, "--timeout", timeout)
    running = start_command(folder, ["serve", *map(str, options)])
    try:
        service = Served(running, _port(running), timeout, tokens)
        key = service.client(1).add(protein(random.Random(1), 60, 60))
        yield replace(service, key=key)
    finally:
        # A process that was waited for is gone, and its number may be another's.
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(running.pid, os.WNOHANG) == (0, 0):
                os.kill(running.pid, signal.SIGKILL)
                running.wait()


def _port(running: Running) -> int:
    """Wait until a service says where it serves."""
    said, end = "", time.monotonic() + _START_SECONDS
    while not (found := SERVING.search(said)):
        ready, _, _ = select.select([running.streams[1]], (), (), max(0.0, end - time.monotonic()))
        data = os.read(running.streams[1], 2**16) if ready else b""
        if not data:
            raise RuntimeError(f"the service does not start: {said}")
        said += data.decode(errors="replace")
    return int(found[1])


def _trial(disturb: Disturb) -> Callable[[random.Random, Path, References], list[Finding]]:
    def run(rng: random.Random, folder: Path, references: References) -> list[Finding]:
        with served(folder, 30.0) as service:
            before = service.score()
            with ExitStack() as stack:
                found = disturb(rng, service, stack)
                found += service.check_others(before)
            return [*found, *service.check_idle(), *service.end()]

    return run


def _send_nonsense(rng: random.Random, service: Served, stack: ExitStack) -> list[Finding]:
    found = []
    with watched(service.port) as healthy:
        for _ in range(15):
            path, body = _nonsense(rng, service.key)
            begin = time.monotonic()
            try:
                answer = service.client(0).send("POST", path, body, _JSON)
            except (OSError, HTTPException) as error:
                found.append(Finding("no answer", f"{path}, {body[:80]!r}: {type(error).__name__}"))
                continue
            if not (400 <= answer.status < 500 and _is_error(answer)):
                found.append(Finding("answer", f"{path}, {body[:80]!r}: {answer.status}, {answer.body[:200]!r}"))
            if time.monotonic() - begin > _SECONDS / 2:
                found.append(Finding("slow", f"{path}, {body[:80]!r}: {time.monotonic() - begin:.0f} s"))
    if max(healthy, default=math.inf) > _SECONDS / 2:
        found.append(Finding("healthz", f"the slowest of {len(healthy)} answers took {max(healthy, default=0):.0f} s"))
    return found


def _leave(rng: random.Random, service: Served, stack: ExitStack) -> list[Finding]:
    for _ in range(rng.randrange(1, 5)):
        with ExitStack() as left:
            service.ask(left, *_large(rng, service.key))
            time.sleep(rng.choice((0.0, 0.05, 0.5, 2.0)))
    return []


def _stall(rng: random.Random, service: Served, stack: ExitStack) -> list[Finding]:
    for _ in range(rng.randrange(20, 200)):
        path, body = _large(rng, service.key)
        how = rng.choice(("connect", "head", "body", "unknown", "unread"))
        if how in ("connect", "head"):
            service.send(stack, b"" if how == "connect" else head("POST", path, 10)[: rng.randrange(1, 60)])
        elif how == "body":
            service.ask(stack, path, body[: rng.randrange(len(body))], len(body))
        elif how == "unknown":
            service.ask(stack, "/nowhere", b" " * 100_000, 4 << 20)
        else:
            service.send(stack, b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    return []


def _take_all(rng: random.Random, service: Served, stack: ExitStack) -> list[Finding]:
    for _ in range(rng.randrange(1, 40)):
        service.ask(stack, *_large(rng, service.key))
    time.sleep(rng.choice((0.0, 0.5)))
    return []


def stopped(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """SIGTERM while requests wait and run: each is answered, and the service ends in time."""
    found = []
    with served(folder, 4.0) as service, ExitStack() as stack:
        asked = [service.ask(stack, *_large(rng, service.key)) for _ in range(rng.randrange(1, 10))]
        # Until all of them have been read.
        time.sleep(rng.choice((1.0, 1.5, 3.0)))
        found += service.end()
        for one in asked:
            try:
                response = HTTPResponse(one)
                response.begin()
                answer = Answer(response.status, {}, response.read())
            except (OSError, HTTPException) as error:
                found.append(Finding("no answer", f"{type(error).__name__} for a request before SIGTERM"))
                continue
            # Too much to do (429), or more time than a request may take (504), is told before, too, and what is wrong.
            known = answer.status in (422, 429, 503, 504) and _is_error(answer)
            # One line, or several of a stream.
            if not (known or (answer.status == 200 and [json.loads(line) for line in answer.body.splitlines()])):
                found.append(Finding("answer", f"{answer.status}, {answer.body[:200]!r}"))
    return found


def _large(rng: random.Random, key: str) -> tuple[str, bytes]:
    """A request that takes long, if only until it is refused: its path and its body."""
    kind = rng.choice(("embeddings", "generate", "variants", "score", "misnumbered"))
    if kind == "misnumbered":
        variants = [f"A{number}C" for number in range(5000, 25_000)]
        return "/v1/variants", json.dumps({"sequence": "A" * 1022, "variants": variants}).encode()
    if kind == "embeddings":
        residues = rng.randrange(100, 1022)
        return "/v1/embeddings", embedding([protein(rng, residues, residues) for _ in range(rng.randrange(20, 256))])
    if kind == "generate":
        body: dict[str, Any] = {"sequence": protein(rng, 300, 600), "max_new_tokens": 50, "num_return_sequences": 8}
        if rng.random() < 0.5:
            body = {"sequence": protein(rng, 300, 600), "positions": list(range(1, 200)), "num_return_sequences": 2}
        return "/v1/generate", json.dumps(body).encode()
    if kind == "variants":
        return f"/v1/contexts/{key}/variants", json.dumps({"stream": rng.random() < 0.5}).encode()
    candidates = [protein(rng, 5, 30) for _ in range(1000)]
    return f"/v1/contexts/{key}/score", json.dumps({"candidates": candidates}).encode()


def _nonsense(rng: random.Random, key: str) -> tuple[str, bytes]:
    """A request that cannot be answered: its path and its body, of up to 4 MiB."""
    fields = {
        f"/v1/contexts/{key}/score": "candidates",
        f"/v1/contexts/{key}/variants": "variants",
        "/v1/embeddings": "input",
        "/v1/contexts": "sequence",
        "/v1/generate": "positions",
    }
    path = rng.choice(list(fields))
    field, size = fields[path].encode(), rng.choice((10, 1000, 30_000, 1_000_000))
    items = rng.choice((b"1", b"null", b"[]", b"{}", b'"\\ud800"', b"1e999", b"true", b'"A-"'))
    bodies = [
        b'{"%b": [' % field + (items + b",") * (size // len(items)) + items + b"]}",
        b"[" * size,
        b'{"a":' * (size // 5),
        b'{"%b": "' % field + b"!" * size + b'"}',
        b'{"%b": ' % field + b"9" * size + b"}",
        b'{"%b": NaN}' % field,
        b'{"%b": ["A"], "%b": 7}' % (field, field),
        json.dumps({secrets.token_hex(4): None for _ in range(1 + size // 100)}).encode(),
        rng.randbytes(size),
        embedding(["ACD"] * (size // 10))[: -rng.randrange(1, 20)],
        b"",
    ]
    return path, rng.choice(bodies)[: 4 << 20]


def _is_error(answer: Answer) -> bool:
    """Whether an answer has the documented shape of errors."""
    try:
        detail = answer.json["detail"]
        shapes = [set(one) == {"loc", "msg", "type"} and isinstance(one["msg"], str) for one in detail]
    except (ValueError, KeyError, TypeError):
        return False
    return 0 < len(shapes) <= 20 and all(shapes)


def _differ(answer: Answer, before: Answer) -> bool:
    """Whether scores are others than before, up to rounding."""
    own, theirs = ([one["pseudo_log_likelihood"] for one in x.json["candidates"]] for x in (answer, before))
    return len(own) != len(theirs) or any(abs(a - b) > _TOLERANCE for a, b in zip(own, theirs, strict=True))


nonsense, leaving, stalling, starving = map(_trial, (_send_nonsense, _leave, _stall, _take_all))
