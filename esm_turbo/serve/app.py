"""The application: endpoints, the page, the documentation of the API, and what guards them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from esm_turbo import __version__
from esm_turbo.serve.errors import NO_CONTEXT, RequestError, printable
from esm_turbo.serve.guard import Guard
from esm_turbo.serve.routes import router
from esm_turbo.serve.service import Service

# A name that cannot be imported: setuptools would take the folder for a package.
STATIC = Path(__file__).parent / "static-files"


def make_app(service: Service, tokens: Sequence[str] = (), hosts: Sequence[str] = ()) -> Guard:
    """The ASGI application of a service.

    Args:
        service: its engine must have been started.
        tokens: see `Guard`, and so are `hosts`.
    """
    # FastAPI's own page of the API loads scripts from elsewhere; `static-files/docs.html` takes its place.
    app = FastAPI(title="esm_turbo", version=__version__, docs_url=None, redoc_url=None, summary=_SUMMARY)
    app.include_router(router(service))

    @app.exception_handler(RequestError)
    async def told(request: Request, error: RequestError) -> Response:
        return JSONResponse(error.to_dict(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        # Of the framework itself, such as for a path that there is not: in the shape of all other errors.
        return JSONResponse(RequestError(error.status_code, error.detail).to_dict(), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def wrong_field(request: Request, error: RequestValidationError) -> Response:
        # Without the input itself: it may be long, and need not be valid JSON again.
        detail = [
            {
                "loc": [_shown(part) for part in one["loc"]],
                "msg": printable(_reason(one, request, error.body)),
                "type": one["type"],
            }
            for one in error.errors()[:20]
        ]
        return JSONResponse({"detail": detail}, 422)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return FileResponse(STATIC / "docs.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    return Guard(app, service.limits, service.metrics, tokens, hosts)


def _shown(part: str | int) -> str | int:
    """A part of a field's path; names of unknown fields are whatever the client sent."""
    return part if isinstance(part, int) else printable(part)[:80]


def _reason(error: Mapping[str, Any], request: Request, body: object) -> str:
    """What is wrong, in words that say what to do where pydantic's do not."""
    kind, where = error["type"], tuple(error["loc"])
    if kind == "string_pattern_mismatch":
        # Only ids have a pattern.
        return NO_CONTEXT
    if kind == "json_invalid" and isinstance(body, str):
        place = json.JSONDecodeError(str(error["ctx"]["error"]), body, where[-1])
        return f"the body is not JSON: {place.msg} at line {place.lineno}, column {place.colno}"
    if where == ("body",) and kind != "missing" and not _is_json(request.headers.get("content-type", "")):
        return "the body is not read as JSON; send Content-Type: application/json"
    return str(error["msg"])


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


_SUMMARY = "ESM-2 and ESM-C with cached contexts: scores, variant effects, embeddings, generation."
