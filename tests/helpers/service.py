"""A service that runs in a thread of this process, and a client for it that needs the standard library alone."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.server import Server, open_socket
from esm_turbo.serve.service import Service


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
    """Sends requests, each on a connection of its own."""

    port: int
    service: Service | None = None
    server: Server | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, body, self.headers | dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Any) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, raw, {"content-type": "application/json"})

    def add(self, sequence: str) -> str:
        """Store a context, and return its id."""
        answer = self.post("/v1/contexts", {"sequence": sequence})
        assert answer.status == 200, answer.body
        key: str = answer.json["id"]
        return key


@contextlib.contextmanager
def running(
    turbo: TurboEsm,
    folder: Path,
    limits: Limits | None = None,
    tokens: Sequence[str] = (),
    hosts: Sequence[str] = (),
    **options: Any,
) -> Iterator[Client]:
    """A service with its store in a folder. Do not use the model while it has requests."""
    with ContextStore(folder) as store:
        service = Service(turbo, store, limits, **options)
        listener = open_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        begun = threading.Event()
        server = Server(service, listener, tokens, hosts, begun.set)
        thread = threading.Thread(target=server.run)
        thread.start()
        assert begun.wait(30)
        try:
            yield Client(port, service, server)
        finally:
            server.stop()
            thread.join(60)
        assert not thread.is_alive()
