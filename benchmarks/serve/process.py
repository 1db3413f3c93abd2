"""`esm-turbo serve` in a process of its own, and a client that needs the standard library alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import status_bytes

SERVING = re.compile(r"serving http://127\.0\.0\.1:(\d+), (.*)")
"""What a service says when it begins: its port, and what it holds."""


@dataclass(frozen=True)
class Answer:
    """An answer of the service."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def fields(self) -> list[list[str | int]]:
        """The fields that are wrong."""
        return [item["loc"] for item in self.json["detail"]]


@dataclass
class Client:
    """Sends requests to a service on this machine, over one connection at a time, which it keeps."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 300
    _connection: HTTPConnection | None = None

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request; once more on a new connection if the kept one was closed."""
        for attempt in (0, 1):
            connection, fresh = self._connection, self._connection is None
            self._connection = None
            if connection is None:
                connection = HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
            try:
                connection.request(method, path, body, self.headers | dict(headers or {}))
                response = connection.getresponse()
                answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
            except (HTTPException, OSError):
                connection.close()
                if fresh or attempt:
                    raise
                continue
            if not response.will_close:
                self._connection = connection
            else:
                connection.close()
            return answer
        raise AssertionError("unreachable")

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Any) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, raw, {"content-type": "application/json"})

    def add(self, sequence: str | Sequence[str]) -> str:
        """Store a context, and return its id."""
        answer = self.post("/v1/contexts", {"sequence": sequence})
        assert answer.status == 200, answer.body
        key: str = answer.json["id"]
        return key

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Process:
    """A running service, on a free port.

    Args:
        *options: of `esm-turbo serve`.

    Attributes:
        port: of the service.
        held: what it says of its contexts when it begins.
    """

    def __init__(self, *options: str | Path) -> None:
        command = [sys.executable, "-m", "esm_turbo.cli.app", "serve", "--port", "0", *map(str, options)]
        environment = {name: value for name, value in os.environ.items() if name != "ESM_TURBO_TOKENS"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self._lines: list[str] = []
        self.port, self.held = 0, ""
        for line in self.process.stderr:
            self._lines.append(line)
            if found := SERVING.search(line):
                self.port, self.held = int(found[1]), found[2]
                break
        else:
            raise RuntimeError("".join(self._lines))
        # Read as it comes, so that the service never waits for a full pipe.
        self._since = len(self._lines)
        self._reader = threading.Thread(target=lambda: self._lines.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)

    def client(self) -> Client:
        return Client(self.port)

    @property
    def said(self) -> str:
        """Its output since it began to serve."""
        return "".join(self._lines[self._since :])

    @property
    def resident_bytes(self) -> int:
        """Memory of the process."""
        return status_bytes("VmRSS", self.process.pid)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and wait; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(600)
        self._reader.join(10)
        return code
