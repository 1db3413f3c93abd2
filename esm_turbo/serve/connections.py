"""Connections of clients, which are closed where no request comes or no answer is taken."""

from __future__ import annotations

import asyncio

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from esm_turbo.serve.errors import RequestError


class Connection(H11Protocol):
    """Closes unless the head of a request arrives within `timeout_keep_alive` seconds of connecting or the last answer.

    uvicorn's own limit begins only after an answer and ends with the first byte of the next request, so clients that
    say nothing, or a byte at a time, would hold all places; nor does it limit those that do not read their answer.
    Where there are as many connections as `limit_concurrency`, or a single address has half of them, requests get 503.
    """

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        own = sum(_address(other) == _address(self) for other in self.connections)
        # uvicorn's own answer would be plain text.
        most, self.limit_concurrency = self.limit_concurrency or 1024, None
        if len(self.connections) >= most or own > max(1, most // 2):
            self.app = _crowded
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        _stop(self._deadline)
        _stop(self._unread)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Wait no longer once a request has begun."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            _stop(self._deadline)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, which may be there already."""
        self._wait_for_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait until the client takes more of its answer."""
        super().pause_writing()
        self._unread = self.loop.call_later(2 * self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """Wait no longer for the client to read."""
        _stop(self._unread)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the shape of all other errors."""
        response = RequestError(400, msg).response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        events = h11.Response(status_code=400, headers=headers), h11.Data(data=bytes(response.body)), h11.EndOfMessage()
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        _stop(self._deadline)
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        if self.transport.get_write_buffer_size():
            # Closing would wait until the client has read all of it.
            self.transport.abort()
        else:
            self.timeout_keep_alive_handler()


def _address(connection: object) -> object:
    client = getattr(connection, "client", None)
    return client and client[0]


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    response = RequestError(503, "too many connections; try again later", retry_after=5).response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)
