"""The application: endpoints, the page, the documentation of the API, and what guards them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from esm_turbo import __version__
from esm_turbo.serve.errors import answer_errors
from esm_turbo.serve.guard import Guard
from esm_turbo.serve.routes import router
from esm_turbo.serve.service import Service

# A name that cannot be imported: setuptools would take the folder for a package.
STATIC = Path(__file__).parent / "static-files"


def make_app(service: Service, tokens: Sequence[str] = (), hosts: Sequence[str] = ()) -> Guard:
    """The ASGI application of a service.

    Args:
        service: its engines must have been started.
        tokens: see `Guard`, and so are `hosts`.
    """
    # FastAPI's own page of the API loads scripts from elsewhere; `static-files/docs.html` takes its place.
    app = FastAPI(title="esm_turbo", version=__version__, docs_url=None, redoc_url=None, summary=_SUMMARY)
    app.include_router(router(service))
    answer_errors(app)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return FileResponse(STATIC / "docs.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    return Guard(app, service.limits, service.metrics, tokens, hosts)


_SUMMARY = "ESM-2, ESM-C and E1 with cached contexts: scores, variant effects, embeddings, generation."
