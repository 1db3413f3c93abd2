"""`esm-turbo serve`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from esm_turbo.cli.console import say
from esm_turbo.cli.inputs import announce, check_minimum, load_model
from esm_turbo.cli.options import AutoBatchTokens, BackendOption, CacheOptions, OptionalInput, StoreFolder
from esm_turbo.config import Backend
from esm_turbo.files.extras import install_hint
from esm_turbo.files.paths import check_writable
from esm_turbo.files.tabular import counted
from esm_turbo.files.writing import LOCK_FILE
from esm_turbo.serve.limits import Limits

_DEFAULTS = Limits()
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
# Seconds for which the engine's thread, running Python, may keep others from answering: as long as an answer takes.
_SWITCH_SECONDS = 0.001


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    store: StoreFolder = None,
    token_file: OptionalInput = None,
    allowed_host: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    max_residues: int = _DEFAULTS.residues,
    max_candidates: int = _DEFAULTS.candidates,
    max_contexts: int = _DEFAULTS.contexts,
    queue: int = _DEFAULTS.queue,
    timeout: float = _DEFAULTS.seconds,
    resident_mib: int = 1024,
    toks_per_batch: AutoBatchTokens = None,
    model: CacheOptions = CacheOptions(),
    backend: BackendOption = Backend.AUTO,
) -> int:
    """Serve the model over HTTP, with a page for the browser, until Ctrl-C or SIGTERM; what runs is then finished.

    Requests of many clients share batches. Without tokens, everybody who reaches the address may use it: it is
    localhost unless --host says otherwise. Tokens are read from --token-file or the variable ESM_TURBO_TOKENS.

    Args:
        host: Address to listen on; 0.0.0.0 is all of this machine.
        port: Port to listen on; 0 takes a free one.
        store: Folder of contexts, created if needed, which keeps them after a restart. By default, a temporary one.
        token_file: File of bearer tokens, one per line, one of which every request for data must have.
        allowed_host: Names by which clients may call the service. By default, those of this machine if it listens on a
            loopback address, and else all.
        max_residues: Longest protein.
        max_candidates: Largest number of candidates in a request.
        max_contexts: Largest number of contexts in the store.
        queue: Largest number of requests that wait or run; further ones get 429.
        timeout: Seconds from a request to its answer, and from SIGTERM to the end.
        resident_mib: Memory for contexts that requests derive from the stored ones, MiB.
    """
    check_minimum(0, port=port, resident_mib=resident_mib)
    check_minimum(1, toks_per_batch=toks_per_batch, max_residues=max_residues, max_candidates=max_candidates)
    check_minimum(1, max_contexts=max_contexts, queue=queue)
    if not 0 < timeout < 1e6:
        raise ValueError(f"--timeout must be above 0 seconds and below 1,000,000, got {timeout:g}")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"serve needs {' and '.join(missing)}: {install_hint('serve')}")
    from esm_turbo.serve.tokens import read_tokens

    # Contexts of a folder that is there may be served from where nothing can be written.
    if store is not None and not store.is_dir():
        check_writable(store / LOCK_FILE)
    tokens = read_tokens(token_file)
    from esm_turbo.serve.server import Server, loopback_names, open_socket, url_of
    from esm_turbo.serve.service import Service

    limits = Limits(
        residues=max_residues,
        candidates=max_candidates,
        contexts=max_contexts,
        queue=queue,
        seconds=timeout,
    )
    with contextlib.ExitStack() as opened:
        # Before the model is loaded, which takes longer.
        listener = opened.enter_context(open_socket(host, port))
        turbo = load_model(model, backend=backend)
        from esm_turbo.context_store import ContextStore
        from esm_turbo.tasks.common.forwards import default_config
        from esm_turbo.tasks.common.run_info import context_arm

        # For all threads of the service.
        turbo.model.base_model.turbo_config = default_config(turbo)
        announce(turbo, [context_arm(turbo)])
        folder = store or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="esm-turbo-")))
        # The service keeps contexts in memory itself, within --resident-mib.
        contexts = opened.enter_context(ContextStore(folder, host_bytes=0, device_bytes=0))
        service = Service(turbo, contexts, limits, resident_bytes=resident_mib << 20, toks_per_batch=toks_per_batch)
        local = loopback_names(listener)
        hosts = allowed_host or ([host, *local] if local else ())
        if not local and not tokens:
            say(f"warning: everybody who reaches {host} can use this service: it has no tokens, see --token-file")

        def ready() -> None:
            held = "contexts are lost at the end, as there is no --store"
            if store is not None:
                held = f"{counted(service.contexts.stored, 'context')} in {store}"
            say(f"serving {url_of(listener)}, {held}")

        sys.setswitchinterval(_SWITCH_SECONDS)
        Server(service, listener, tokens, hosts, ready).run()
        if any(one.alive for one in service.engines):
            # Python would wait for the batch that runs, and so would closing the store.
            if store is None:
                shutil.rmtree(folder, ignore_errors=True)
            say("stopped in the middle of a batch")
            os._exit(0)
    say("stopped")
    return 0
