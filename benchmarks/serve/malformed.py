"""Requests that are none, or wrong: every one must be refused as such."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

_PATHS = ("/v1/contexts", "/v1/contexts/{key}/score", "/v1/contexts/{key}/variants", "/v1/embeddings", "/v1/generate")
_FIELDS = (
    "sequence", "candidates", "variants", "input", "model", "refresh", "place", "method", "positions", "temperature",
    "max_new_tokens", "seed", "stream", "context", "allowed", "__class__",
)  # fmt: skip
_STRINGS = ("", " ", "A1C", "<mask>", "ACD\x00", "\ud800", "../../etc/passwd", "' OR 1=1", "{{7*7}}", "日本", "J" * 50)
_JSON = "application/json"


def malformed(count: int, key: str, seed: int) -> Iterator[bytes]:
    """Raw requests, each wrong in some way; `key` is the id of a context that there is."""
    draw = random.Random(seed)
    kinds = (_wrong_fields, _wrong_json, _wrong_http, _wrong_path, _too_much)
    for number in range(count):
        yield kinds[number % len(kinds)](draw, key)


def status_of(port: int, raw: bytes) -> int:
    """Send bytes, and read the status of the answer; 0 if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        answer = b""
        # Where it refuses before all was sent, the answer may be there.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(raw)
        with contextlib.suppress(ConnectionResetError):
            while b"\r\n" not in answer and (part := connection.recv(4096)):
                answer += part
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def head(method: str, path: str, length: int, kind: str = _JSON, **headers: str) -> bytes:
    """The head of a request with a body of `length` bytes."""
    fields = {"Host": "localhost", "Content-Type": kind, "Content-Length": str(length)} | headers
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _request(method: str, path: str, body: bytes, kind: str = _JSON, **headers: str) -> bytes:
    return head(method, path, len(body), kind, Connection="close", **headers) + body


def _value(draw: random.Random, depth: int = 0) -> Any:
    simple = [None, True, -1, 1.5, 10**18, float("nan"), float("inf"), *_STRINGS]
    if depth < 3 and draw.random() < 0.4:
        size = draw.randint(0, 3)
        if draw.random() < 0.5:
            return [_value(draw, depth + 1) for _ in range(size)]
        return {draw.choice(_FIELDS): _value(draw, depth + 1) for _ in range(size)}
    return draw.choice(simple)


def _wrong_fields(draw: random.Random, key: str) -> bytes:
    body = {name: _value(draw) for name in draw.sample(_FIELDS, draw.randint(0, 4))} | {"wrong": _value(draw)}
    return _request("POST", draw.choice(_PATHS).format(key=key), json.dumps(body).encode())


def _wrong_json(draw: random.Random, key: str) -> bytes:
    bodies = (
        b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"[" * 50_000, b'{"sequence": ' + b"9" * 9000 + b"}",
        b'{"sequence": "ACD"', b'{"a": 1}' * 2, b"sequence=ACD", draw.randbytes(200),
    )  # fmt: skip
    kind = draw.choice((_JSON, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
    return _request("POST", draw.choice(_PATHS).format(key=key), draw.choice(bodies), kind)


def _wrong_http(draw: random.Random, key: str) -> bytes:
    good = _request("POST", "/v1/contexts", b'{"sequence": "ACD"}')
    return draw.choice(
        (
            b"\x16\x03\x01" + draw.randbytes(100) + b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST /v1/contexts HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"POST /v1/contexts HTTP/1.1\r\n\r\n",
            good.replace(b"Content-Length: 19", b"Content-Length: -1"),
            good.replace(b"Content-Length: 19", b"Content-Length: x"),
            good.replace(b"Content-Length: 19", b"Transfer-Encoding: chunked") + b"zz\r\n",
            b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/one\r\nHost: localhost\r\n\r\n",
            _request("POST", "/v1/contexts", b"", Host="evil.example"),
        )
    )


def _wrong_path(draw: random.Random, key: str) -> bytes:
    paths = ("/v1/contexts/{bad}/score", "/v1/contexts/{bad}", "/v1/{bad}", "/static/{bad}", "/{bad}")
    bad = draw.choice(
        ("..%2f..%2fetc%2fpasswd", "../../etc/passwd", "0" * 64, key[:-1], key.upper(), "%00", "%ff", "x")
    )
    path = draw.choice(paths).format(bad=bad)
    return _request(draw.choice(("GET", "PUT", "DELETE", "PATCH")), path, b"{}")


def _too_much(draw: random.Random, key: str) -> bytes:
    bodies = (
        {"sequence": "A" * 5000},
        {"candidates": ["ACD"] * 5000},
        {"candidates": ["A" * 5000]},
        {"variants": ["A1C"] * 30_000},
        {"input": ["ACD"] * 5000, "model": "esm2-mini"},
        {"sequence": "ACD", "max_new_tokens": 10**6},
        {"sequence": "ACD" * 2_000_000},
    )
    return _request("POST", draw.choice(_PATHS).format(key=key), json.dumps(draw.choice(bodies)).encode())
