"""What every request passes first: who asks, for which host, and with how large a body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esm_turbo.serve.errors import RequestError, busy, failure, printable, stopping
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics

_log = logging.getLogger("esm_turbo")
_PROTECTED = ("/v1/", "/metrics")
# Seconds for a body to arrive.
_BODY_SECONDS = 30.0
# Seconds for which a client that was refused may go on to send.
_DISCARD_SECONDS = 1.0
# Bytes of each body that count for nobody; those beyond are limited over all requests, and over those of a client.
_SMALL_BODY = 64 << 10
_CLIENT_BODIES, _ALL_BODIES = 4, 32
# The page and the documentation come from the service alone.
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_CLOSE = (b"connection", b"close")


class Guard:
    """Middleware around the whole application.

    A request is refused by its head alone, before anything of its body is read, and the application reads bodies of
    known endpoints only; wherever a body was not read to its end, the connection is closed with the answer.

    Args:
        app: the application. It finds the client's name in `request.state.client`.
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
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.monotonic(), 0
        headers = dict(scope["headers"])
        kind, digest = _authorization(headers)
        client = digest.hex() if self._digests else str((scope.get("client") or ("",))[0])
        body = _Body(self.limits, self._held, client, headers, receive)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = _HEADERS if body.whole else [*_HEADERS, _CLOSE]
                message["headers"] = [*message.get("headers", []), *more]
            elif not (body.whole or message.get("more_body", False)):
                # The client has the answer, which it would not get to read if the connection broke while it sends.
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self._check_host(headers)
            if scope["path"].startswith(_PROTECTED):
                self._check_token(kind, digest)
            body.check_length()
            scope.setdefault("state", {})["client"] = client
            await self.app(scope, body.receive, noting)
        except RequestError as error:
            await error.response()(scope, receive, noting)
        except asyncio.CancelledError:
            # The service ends: nobody waits for the rest of a body, or for a client to read.
            if not status:
                status = 503
                await stopping().response()(scope, receive, send)
        except Exception as error:
            _log.error(
                "%s %s failed: %s: %s", scope["method"], scope["path"], type(error).__name__, printable(str(error))
            )
            if not status:
                await failure().response()(scope, receive, noting)
        finally:
            body.forget()
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.request(route, status or 499, time.monotonic() - begin)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and _without_port(host) not in self._hosts:
            raise RequestError(421, f"this service does not answer for the host {host[:80]!r}; see --allowed-host")

    def _check_token(self, kind: bytes, given: bytes) -> None:
        # All of them are compared, so that the time does not say which one it is.
        known = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        if self._digests and not (kind == b"bearer" and known):
            raise RequestError(401, "a bearer token is needed: Authorization: Bearer TOKEN")


class _Body:
    """The body of a request as the application reads it, within limits.

    Attributes:
        whole: whether all of it was read.
    """

    def __init__(
        self, limits: Limits, held: Counter[str], client: str, headers: dict[bytes, bytes], receive: Receive
    ) -> None:
        self._client, self._limits, self._receive, self._all_held = client, limits, receive, held
        self._expected = 0
        with suppress(ValueError):
            self._expected = int(headers.get(b"content-length", b"0"))
        self.whole = not self._expected and b"transfer-encoding" not in headers
        self._size = self._items = self._held = 0
        self._deadline = asyncio.get_running_loop().time() + _BODY_SECONDS

    def check_length(self) -> None:
        """Refuse a body by its length alone."""
        if max(self._expected, self._size) > self._limits.body_bytes:
            raise RequestError(413, f"a body may have at most {self._limits.body_bytes:,} bytes")

    async def receive(self) -> Message:
        """The next message of the client; of a body that is too large, too slow or has too many values, an error."""
        if self.whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None
        part = message.get("body", b"")
        self._size += len(part)
        self.check_length()
        # An upper bound, whatever the encoding; validating each would take a thousand times as long.
        self._items += sum(map(part.count, (b",", b"[", b"{")))
        if self._items > self._limits.items:
            raise RequestError(413, f"a body may hold at most {self._limits.items:,} values")
        self._hold(max(0, self._size - _SMALL_BODY) - self._held)
        self.whole = message["type"] == "http.request" and not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Take what comes for a moment, and keep none of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while (message := await self._receive())["type"] == "http.request" and message.get("more_body", False):
                    pass

    def forget(self) -> None:
        """The request has ended."""
        self._all_held[self._client] -= self._held
        if not self._all_held[self._client]:
            del self._all_held[self._client]

    def _hold(self, more: int) -> None:
        largest = self._limits.body_bytes
        if more and (
            self._all_held[self._client] + more > _CLIENT_BODIES * largest
            or self._all_held.total() + more > _ALL_BODIES * largest
        ):
            raise busy("too many large bodies at once; send one after the other", 1)
        self._held += more
        self._all_held[self._client] += more


def _authorization(headers: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """The scheme of the header `Authorization`, and a digest of the token in it."""
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    return kind.lower(), hashlib.sha256(token.strip()).digest()


def _without_port(host: str) -> str:
    """The name in a Host header, without brackets of IPv6; empty if it is no such header."""
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^][:]+))(?::\d*)?", host)
    return "" if found is None else found[1] or found[2]
