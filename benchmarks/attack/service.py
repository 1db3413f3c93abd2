"""What hostile clients, and those that leave, cost a service; --save appends a row to results/service_attack.jsonl.

    python -m benchmarks.attack.service --save

The service runs in a process of its own with the embedded model, on the CPU with one thread. Steps:

    integers: a body of integers where strings belong, as large as the service takes
    stalled: bodies on an unknown path that never end, of clients without a token
    leaving: proteins to embed, whose client leaves after two seconds; another one asks for a score meanwhile
    stopping: SIGTERM while proteins are embedded

Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness import records
from benchmarks.serve.process import Client, Process

BODY = 4 << 20
_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
_SECONDS = 5


class Watch:
    """Asks a service for its health over and over, in a thread.

    Attributes:
        worst: the longest time to an answer, seconds.
        failed: number of questions that got no answer, or another than 200.
    """

    def __init__(self, port: int, pause: float = 0.02) -> None:
        self.worst, self.failed = 0.0, 0
        self._client, self._pause, self._end = Client(port), pause, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._ask()
        self.worst = 0.0
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        self._client.close()

    def _watch(self) -> None:
        while not self._end.is_set():
            self._ask()
            time.sleep(self._pause)

    def _ask(self) -> None:
        begin = time.monotonic()
        try:
            self.failed += self._client.get("/healthz").status != 200
        except OSError:
            self.failed += 1
        self.worst = max(self.worst, time.monotonic() - begin)


def head(method: str, path: str, length: int, **headers: str) -> bytes:
    """The head of a request with a body of `length` bytes."""
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(length)}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (fields | headers).items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def proteins(count: int, residues: int, seed: int) -> list[str]:
    """Random sequences."""
    draw = random.Random(seed)
    return ["".join(draw.choices(_RESIDUES, k=residues)) for _ in range(count)]


def embedding(sequences: Sequence[str]) -> bytes:
    """The body of a request for embeddings."""
    return json.dumps({"input": list(sequences), "model": "esm2-mini"}).encode()


@contextlib.contextmanager
def asked(port: int, path: str, body: bytes) -> Iterator[socket.socket]:
    """A connection on which a request was sent; at the end the client leaves without reading."""
    with socket.create_connection(("127.0.0.1", port), 600) as connection:
        connection.sendall(head("POST", path, len(body)) + body)
        yield connection


def peak_bytes(service: Process, *, forget: bool = False) -> int:
    """Largest resident memory of the process since this was last forgotten."""
    folder = Path(f"/proc/{service.process.pid}")
    if forget:
        (folder / "clear_refs").write_text("5", encoding="ascii")
    [kib] = re.findall(r"^VmHWM:\s+(\d+) kB", (folder / "status").read_text(encoding="ascii"), re.MULTILINE)
    return int(kib) << 10


def seconds_until_idle(service: Process, most: float) -> float:
    """Seconds until the process computes no more, `most` at most."""
    begin = last = time.monotonic()
    stat, before = Path(f"/proc/{service.process.pid}/stat"), -1
    while last - begin < most:
        now = int(stat.read_text(encoding="ascii").rpartition(")")[2].split()[11])
        if before >= 0 and now - before < 0.1 * os.sysconf("SC_CLK_TCK"):
            break
        before, last = now, time.monotonic()
        time.sleep(0.5)
    return last - begin


def integers() -> dict[str, Any]:
    """Blocked seconds and bytes of memory, by endpoint."""
    figures: dict[str, Any] = {}
    with Process("--threads", "1") as service:
        client = service.client()
        key = client.add("ACDEFGHIK")
        for name, path, field in (
            ("score", f"/v1/contexts/{key}/score", "candidates"),
            ("embeddings", "/v1/embeddings", "input"),
        ):
            begin = b'{"model": "esm2-mini", "%b": [1' % field.encode()
            body = begin + b",1" * ((BODY - len(begin) - 2) // 2) + b"]}"
            if name == "score":
                body = body.replace(b'"model": "esm2-mini", ', b"")
            client.get("/healthz")
            before, start = peak_bytes(service, forget=True), time.monotonic()
            with Watch(service.port) as watch:
                answer = service.client().post(path, body)
                seconds = time.monotonic() - start
                time.sleep(0.1)
            figures[name] = {
                "bytes": len(body),
                "status": answer.status,
                "errors": len(answer.json["detail"]),
                "seconds": seconds,
                "healthz_blocked_seconds": watch.worst,
                "peak_bytes": peak_bytes(service) - before,
            }
    return figures


def stalled(clients: int) -> dict[str, Any]:
    """Memory that bodies of clients without a token take while they stall."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file, contextlib.ExitStack() as stack:
        file.write(secrets.token_urlsafe(32))
        file.flush()
        service = stack.enter_context(Process("--threads", "1", "--token-file", file.name))
        service.client().get("/healthz")
        before, sent, open_ones = peak_bytes(service, forget=True), 0, []
        part = b" " * (BODY - 1)
        for _ in range(clients):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 60))
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(head("POST", "/nowhere", BODY) + part)
                sent += 1
            open_ones.append(connection)
        with Watch(service.port) as watch:
            time.sleep(2)
        held = 0
        for connection in open_ones:
            connection.settimeout(0.01)
            try:
                # Until the answer, if there is one, and the end.
                while connection.recv(4096):
                    pass
            except TimeoutError:
                held += 1
            except ConnectionError:
                pass
        return {
            "clients": clients,
            "bytes_each": BODY - 1,
            "taken": sent,
            "held": held,
            "peak_bytes": peak_bytes(service) - before,
            "resident_bytes": service.resident_bytes - before,
            "healthz_blocked_seconds": watch.worst,
        }


def leaving(count: int, residues: int, most: float) -> dict[str, Any]:
    """What a client that leaves costs another one, and the engine."""
    with Process("--threads", "1", "--timeout", "900") as service:
        client = service.client()
        body = {"candidates": ["ACDEFGHIK"]}
        key = client.add(proteins(1, 100, 1)[0])
        path = f"/v1/contexts/{key}/score"
        client.post(path, body)
        begin = time.monotonic()
        client.post(path, body)
        alone = time.monotonic() - begin
        with asked(service.port, "/v1/embeddings", embedding(proteins(count, residues, 0))):
            time.sleep(2)
            begin = time.monotonic()
        answer = client.post(path, body)
        waited = time.monotonic() - begin
        computing = waited + seconds_until_idle(service, most - waited)
        return {
            "proteins": count,
            "residues": residues,
            "score_alone_seconds": alone,
            "score_status": answer.status,
            "score_seconds": waited,
            "computing_after_leaving_seconds": computing,
        }


def stopping(count: int, residues: int) -> dict[str, Any]:
    """Seconds from SIGTERM to the end, with `--timeout` of five, and the exit code."""
    with Process("--threads", "1", "--timeout", str(_SECONDS)) as service:
        service.client().get("/healthz")
        with asked(service.port, "/v1/embeddings", embedding(proteins(count, residues, 0))):
            time.sleep(1)
            begin = time.monotonic()
            code = service.end(signal.SIGTERM)
        return {
            "proteins": count,
            "residues": residues,
            "timeout_seconds": _SECONDS,
            "seconds": time.monotonic() - begin,
            "exit_code": code,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, and print what each found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=400, help="that stall")
    parser.add_argument("--proteins", type=int, default=256, help="to embed, of the client that leaves")
    parser.add_argument("--residues", type=int, default=1022, help="of each")
    parser.add_argument("--most", type=float, default=900, help="seconds to wait for an idle engine")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for name, step in (
        ("integers", integers),
        ("stalled", lambda: stalled(options.clients)),
        ("leaving", lambda: leaving(options.proteins, options.residues, options.most)),
        ("stopping", lambda: stopping(options.proteins // 4, options.residues)),
    ):
        figures[name] = step()
        print(f"{name}: {json.dumps(figures[name])}", flush=True)
    if options.save:
        own = shlex.join(sys.argv[1:] if arguments is None else arguments)
        figures["command"] = f"python -m benchmarks.attack.service {own}".strip()
        records.append(records.RESULTS / "service_attack.jsonl", "service_attack", figures, model="esm2-mini")
    return 0


if __name__ == "__main__":
    sys.exit(main())
