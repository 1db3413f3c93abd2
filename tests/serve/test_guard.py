"""The guard: bodies that are too large, too slow or cut off."""

from __future__ import annotations

import asyncio
import json

import pytest

from esm_turbo.serve import guard as guard_module
from esm_turbo.serve.guard import Guard
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics


def ask(parts, headers=(), **options):
    """Status and body that a guarded application answers; it returns the body's length. `parts` are its messages."""
    sent, left = [], list(parts)

    async def app(scope, receive, send):
        message = await receive()
        text = json.dumps([message["type"], len(message.get("body", b""))]).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text})

    async def receive():
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    async def send(message):
        sent.append(message)

    guard = Guard(app, Limits(body_bytes=10), Metrics(), **options)
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": list(headers)}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def part(body, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_arrives_whole():
    assert ask([part(b"12345", True), part(b"678")]) == (200, b'["http.request", 8]')


@pytest.mark.parametrize(
    ("parts", "headers"),
    [
        ([part(b"12345", True), part(b"678901")], []),
        # An endless one.
        ([part(b"1" * 6, True)] * 100, []),
        # Refused before it arrives.
        ([], [(b"content-length", b"11")]),
    ],
)
def test_a_large_body_is_refused(parts, headers):
    status, body = ask(parts, headers)
    assert status == 413
    assert b"at most 10 bytes" in body


def test_a_slow_body_is_refused(monkeypatch):
    monkeypatch.setattr(guard_module, "_BODY_SECONDS", 0.05)
    assert ask([part(b"1", True)])[0] == 408


def test_a_client_that_leaves_within_the_body():
    assert ask([part(b"1", True), {"type": "http.disconnect"}, {"type": "http.disconnect"}]) == (
        200,
        b'["http.disconnect", 0]',
    )


@pytest.mark.parametrize(
    ("host", "status"), [(b"LOCALHOST:80", 200), (b"[::1]:80", 200), (b"localhost.evil", 421), (b"", 421)]
)
def test_hosts(host, status):
    assert ask([part(b"")], [(b"host", host)], hosts=["localhost", "::1"])[0] == status
