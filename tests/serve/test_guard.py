"""The guard: bodies that are too large, too slow or cut off."""

from __future__ import annotations

import asyncio
import json

import pytest

from esm_turbo.serve import guard as guard_module
from esm_turbo.serve.guard import Guard
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics

LIMITS = Limits(body_bytes=10)
TOKEN = "a" * 20


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(guard_module, "_DISCARD_SECONDS", 0.01)


async def reading(scope, receive, send):
    """An application that reads the body and returns its length and whether the client was there to its end."""
    length, more = 0, True
    while more:
        message = await receive()
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = json.dumps([message["type"], length, scope["state"]["client"]]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text})


async def ignoring(scope, receive, send):
    """An application that answers without the body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def guarded(app=reading, limits=LIMITS, **options):
    return Guard(app, limits, Metrics(), **options)


async def send_parts(guard, parts, headers=(), path="/v1/x", client="1.2.3.4", begun=None):
    """Status, headers and body that a guarded application answers, and the number of messages it read before."""
    sent, read, left = [], [], list(parts)

    async def receive():
        if not left:
            if begun is not None:
                begun.set_result(sent[0]["status"] if sent else None)
            await asyncio.sleep(60)
        return left.pop(0)

    async def send(message):
        sent.append(message)
        read.append(len(parts) - len(left))

    length = b"%d" % sum(len(one.get("body", b"")) for one in parts)
    fields = {b"content-length": length} | dict(headers)
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(fields.items()), "client": (client, 1)}
    await guard(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"], read[0]


def ask(parts, headers=(), path="/v1/x", **options):
    """As `send_parts`, of a guard of its own."""
    return asyncio.run(send_parts(guarded(**options), parts, headers, path))


def part(body, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_arrives_whole():
    status, headers, body, _ = ask([part(b"12345", True), part(b"678")])
    assert (status, json.loads(body)) == (200, ["http.request", 8, "1.2.3.4"])
    assert b"connection" not in headers


@pytest.mark.parametrize(
    ("parts", "headers", "read"),
    [
        ([part(b"12345", True), part(b"678901")], [(b"content-length", b"8")], 2),
        # An endless one.
        ([part(b"1" * 6, True)] * 100, [(b"content-length", b"x"), (b"transfer-encoding", b"chunked")], 2),
        # Refused before any of it arrives.
        ([part(b"1" * 11)], [], 0),
    ],
)
def test_a_large_body_is_refused(parts, headers, read):
    status, headers, body, got = ask(parts, headers)
    assert (status, headers[b"connection"], got) == (413, b"close", read)
    assert b"at most 10 bytes" in body


@pytest.mark.parametrize("body", [b"1,", b"[", b'{"":', ",".encode("utf-16-le")])
def test_a_body_of_many_values_is_refused_before_it_is_parsed(body):
    limits = Limits(candidates=1, variants=1, inputs=1, residues=1)
    assert ask([part(body * limits.items)], limits=limits)[0] == 200
    status, headers, answer, _ = ask([part(body * limits.items, True), part(body)], limits=limits)
    assert (status, headers[b"connection"]) == (413, b"close")
    assert b"at most 1,004 values" in answer


def test_a_slow_body_is_refused(monkeypatch):
    monkeypatch.setattr(guard_module, "_BODY_SECONDS", 0.05)
    status, headers, _, _ = ask([part(b"1", True)], [(b"content-length", b"9")])
    assert (status, headers[b"connection"]) == (408, b"close")


def test_a_client_that_leaves_within_the_body():
    parts = [part(b"1", True), {"type": "http.disconnect"}]
    assert json.loads(ask(parts, [(b"content-length", b"9")])[2])[0] == "http.disconnect"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/x", []),
        ("/v1/x", [(b"authorization", b"Bearer no")]),
        ("/metrics", [(b"authorization", b"Basic " + TOKEN.encode())]),
        ("/v1/x", [(b"host", b"evil.example"), (b"authorization", b"Bearer " + TOKEN.encode())]),
    ],
)
def test_who_may_not_ask_is_refused_by_the_head_alone(path, headers):
    host = [(b"host", b"localhost")]
    status, answered, _, read = ask([part(b"12345")], host + headers, path, tokens=[TOKEN], hosts=["localhost"])
    assert (status, answered[b"connection"], read) == (421 if len(headers) == 2 else 401, b"close", 0)


def test_a_body_that_nothing_reads_closes_the_connection():
    status, headers, _, read = ask([part(b"12345")], app=ignoring, tokens=[TOKEN], path="/nowhere")
    assert (status, headers[b"connection"], read) == (200, b"close", 0)
    status, headers, _, _ = ask([], app=ignoring)
    assert (status, b"connection" in headers) == (200, False)


def test_large_bodies_are_limited_by_client_and_over_all(monkeypatch):
    """Each client has room for four of the largest, all together for five, beside what is small of each."""
    monkeypatch.setattr(guard_module, "_SMALL_BODY", 2)
    monkeypatch.setattr(guard_module, "_ALL_BODIES", 5)

    async def run():
        guard, waiting = guarded(), []

        async def begin(client):
            """The status, if the first ten bytes have one: eight beyond the small part."""
            begun = asyncio.get_running_loop().create_future()
            parts, headers = [part(b"1" * 10, True)], [(b"content-length", b"10")]
            waiting.append(asyncio.ensure_future(send_parts(guard, parts, headers, client=client, begun=begun)))
            return await begun

        statuses = [await begin("a") for _ in range(6)] + [await begin("b") for _ in range(2)]
        # What is small always has room.
        small = await send_parts(guard, [part(b"12")], client="b")
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return [*statuses, small[0], (await send_parts(guard, [part(b"1" * 10)], client="b"))[0]]

    assert asyncio.run(run()) == [None] * 5 + [429, None, 429, 200, 200]


@pytest.mark.parametrize(
    ("host", "status"),
    [(b"LOCALHOST:80", 200), (b"localhost", 200), (b"[::1]:80", 200), (b"[::1]", 200)]
    + [
        (host, 421)
        for host in (b"localhost.evil", b"", b"[::1].evil", b"[::1", b"localhost:evil", b"[localhost]", b"::1")
    ],
)
def test_hosts(host, status):
    assert ask([part(b"")], [(b"host", host)], hosts=["localhost", "::1"])[0] == status
