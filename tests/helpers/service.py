"""A service that runs in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve.process import Client
from esm_turbo import ContextStore, TurboEsm
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.server import Server, open_socket
from esm_turbo.serve.service import Service


@dataclass
class ServiceClient(Client):
    """A client, and the service that it asks."""

    service: Service | None = None


@contextlib.contextmanager
def running(
    turbo: TurboEsm,
    folder: Path,
    limits: Limits | None = None,
    tokens: Sequence[str] = (),
    hosts: Sequence[str] = (),
    **options: Any,
) -> Iterator[ServiceClient]:
    """A service with its store in a folder. Do not use the model while it has requests."""
    with ContextStore(folder) as store:
        service = Service(turbo, store, limits, **options)
        listener = open_socket("127.0.0.1", 0)
        client = ServiceClient(listener.getsockname()[1], service=service)
        begun = threading.Event()
        server = Server(service, listener, tokens, hosts, begun.set)
        thread = threading.Thread(target=server.run)
        thread.start()
        assert begun.wait(30)
        try:
            yield client
        finally:
            client.close()
            server.stop()
            thread.join(60)
        assert not thread.is_alive()
