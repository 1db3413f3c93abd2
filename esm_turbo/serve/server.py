"""Running the service: the socket, the signals, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from esm_turbo.files.identity import owned
from esm_turbo.serve.app import make_app
from esm_turbo.serve.connections import Connection
from esm_turbo.serve.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048
# Seconds for which a connection stays open without the head of a request.
_KEEP_ALIVE = 15
# Seconds before the end in which no request runs any more.
_MARGIN = 2.0


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: name or address.
        port: 0 takes a free one.

    Raises:
        ValueError: the address does not exist here, or is in use.
    """
    try:
        if not 0 <= port < 1 << 16:
            # Otherwise taken modulo 65,536.
            raise OverflowError("ports are 0 to 65535")
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket, for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def loopback_names(listener: socket.socket) -> list[str]:
    """Names by which a socket is called that only this machine reaches; none if others do, too.

    Whoever calls it by another name may have been led there by a page of another site.
    """
    address = listener.getsockname()[0].partition("%")[0]
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ["localhost", "127.0.0.1", "::1", address, str(ip)] if ip.is_loopback else []


class Server:
    """A service on a socket.

    Args:
        service: it is started and stopped here.
        listener: see `open_socket`; it is closed at the end.
        tokens: see `Guard`, and so are `hosts`.
        ready: called when requests are taken.
    """

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        tokens: Sequence[str] = (),
        hosts: Sequence[str] = (),
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.service = service
        self.listener = listener
        config = uvicorn.Config(
            make_app(service, tokens, hosts),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            # Errors are logged by `Guard`; a request that is none, or is cut off at the end, is no error.
            log_level="critical",
            access_log=False,
            limit_concurrency=service.limits.connections,
            timeout_keep_alive=_KEEP_ALIVE,
            server_header=False,
        )
        self._server = _Uvicorn(config, ready, service)

    def run(self) -> None:
        """Serve until `stop`, SIGINT or SIGTERM; then take no more requests, finish those that run, and return.

        All of that takes as long as a request may; requests that need longer get 503. The engine may be alive still if
        a single batch takes longer.
        """
        # Otherwise each look into the store would read all weights.
        with owned(self.service.turbo.model.base_model):
            for engine in self.service.engines:
                engine.start()
            try:
                self._server.run(sockets=[self.listener])
            finally:
                for engine in self.service.engines:
                    engine.stop(finish=not self._server.force_exit, timeout=self._server.seconds_left)
                self.listener.close()

    def stop(self) -> None:
        """Stop as a signal does; the second time, without finishing what runs. Any thread may call it."""
        self._server.stop()


class _Uvicorn(uvicorn.Server):
    """uvicorn's, which would end the process by the signal that stops it, and wait for as long as requests take."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], service: Service) -> None:
        super().__init__(config)
        self._ready = ready
        self._service, self._seconds = service, service.limits.seconds
        self._margin = min(_MARGIN, self._seconds / 4)
        self._end: float | None = None

    @property
    def seconds_left(self) -> float:
        """Time to end in."""
        return self._seconds if self._end is None else max(0.0, self._end - time.monotonic())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def stop(self, *_: object) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            # Python takes a moment to end, too.
            self._end = time.monotonic() + self._seconds - self._margin / 4
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A third of the margin for those to take their answer that were told.
        left = max(0.0, self.seconds_left - self._margin / 3)
        self.config.timeout_graceful_shutdown = left  # type: ignore[assignment]
        timer = asyncio.get_running_loop().call_later(left - self._margin / 3, self._give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        for engine in self._service.engines:
            engine.give_up()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            # Signals reach the main thread alone.
            yield
            return
        before = {number: signal.signal(number, self.stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
