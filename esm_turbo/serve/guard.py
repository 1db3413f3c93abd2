"""What every request passes first: who asks, for which host, and with how large a body."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from esm_turbo.serve.errors import RequestError, printable
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("esm_turbo")
_PROTECTED = ("/v1/", "/metrics")
# Seconds for a body to arrive.
_BODY_SECONDS = 30.0
# The page and the documentation come from the service alone.
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Guard:
    """Middleware around the whole application.

    Args:
        app: the application.
        limits: of bodies.
        metrics: counts all answers.
        tokens: bearer tokens, one of which every request for data must have; none lets everybody in.
        hosts: names by which clients may call the service; none allows any. Without it, a page of another site could
            reach a service on localhost by a name that its owner points there.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, tokens: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> None:
        self.app = app
        self.limits = limits
        self.metrics = metrics
        # Of equal length, so that comparing them takes the same time whatever is given.
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, await self._whole_body(scope, receive), noting)
        except RequestError as error:
            await _answer(noting, error)
        except Exception as error:
            _log.error(
                "%s %s failed: %s: %s", scope["method"], scope["path"], type(error).__name__, printable(str(error))
            )
            if not status:
                await _answer(noting, RequestError(500, "the service failed; its log has the reason"))
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.request(route, status or 499, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and _without_port(host) not in self._hosts:
            raise RequestError(421, f"this service does not answer for the host {host[:80]!r}; see --allowed-host")
        if self._digests and scope["path"].startswith(_PROTECTED):
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            given = hashlib.sha256(token.strip()).digest()
            # All of them are compared, so that the time does not say which one it is.
            known = sum(hmac.compare_digest(given, digest) for digest in self._digests)
            if kind.lower() != b"bearer" or not known:
                raise RequestError(401, "a bearer token is needed: Authorization: Bearer TOKEN")

    async def _whole_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body, and return what gives it to the application, and then tells that the client has gone."""
        most = self.limits.body_bytes
        too_large = RequestError(413, f"a body may have at most {most:,} bytes")
        with contextlib.suppress(ValueError):
            if int(dict(scope["headers"]).get(b"content-length", b"0")) > most:
                raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return receive
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return replay


def _without_port(host: str) -> str:
    """The name in a Host header, without brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def _answer(send: Send, error: RequestError) -> None:
    body = json.dumps(error.to_dict()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    headers |= error.headers | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
