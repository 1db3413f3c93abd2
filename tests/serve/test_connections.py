"""Connections on which no request comes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse

import pytest

from esm_turbo.serve import server
from esm_turbo.serve.limits import Limits
from tests.helpers.service import running

SECONDS = 0.5
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 10) as one:
        yield one


def status(one: socket.socket) -> int:
    """Of the next answer, which is read to its end."""
    with HTTPResponse(one) as response:
        response.begin()
        response.read()
        return response.status


def test_clients_that_ask_nothing_do_not_keep_others_out(turbo, tmp_path, monkeypatch: pytest.MonkeyPatch):
    # Long enough for four connections to be made meanwhile.
    monkeypatch.setattr(server, "_KEEP_ALIVE", 4)
    with running(turbo, tmp_path / "store", Limits(connections=6)) as client, ExitStack() as stack:
        silent, slow, second = (stack.enter_context(connected(client.port)) for _ in range(3))
        slow.sendall(HEALTH[:20])
        second.sendall(HEALTH)
        assert status(second) == 200
        second.sendall(HEALTH[:20])
        with connected(client.port) as other:
            other.sendall(HEALTH)
            assert status(other) == 503
        # An empty answer: the service has closed the connection.
        assert [one.recv(1) for one in (silent, slow, second)] == [b"", b"", b""]
        with connected(client.port) as other:
            other.sendall(HEALTH)
            assert status(other) == 200


def test_a_head_that_comes_byte_by_byte_has_no_more_time(turbo, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_KEEP_ALIVE", SECONDS)
    with running(turbo, tmp_path / "store") as client, connected(client.port) as one:
        one.settimeout(SECONDS / 10)
        begin = time.monotonic()
        closed = False
        while not closed and time.monotonic() - begin < 10:
            try:
                one.sendall(b"G")
                closed = one.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                closed = True
        assert closed


def test_a_request_that_has_begun_is_answered(turbo, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_KEEP_ALIVE", SECONDS)
    body = json.dumps({"sequence": "MKTAYIAKQRQISFVKSHFSRQ"}).encode()
    head = f"POST /v1/contexts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with running(turbo, tmp_path / "store") as client, connected(client.port) as one:
        one.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body[:5])
        time.sleep(2 * SECONDS)
        one.sendall(body[5:])
        assert status(one) == 200
