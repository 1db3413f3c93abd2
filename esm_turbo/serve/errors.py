"""Errors that a client is told of, each with its HTTP status, and all in one shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

NO_CONTEXT = "there is no context of this id: post its sequence to /v1/contexts first"
_SHOWN = 20


class RequestError(HTTPException):
    """A request that gets no result.

    Attributes:
        status: HTTP status.
        message: one line.
        field: path of the field that is wrong, such as `("body", "candidates", 3)`; empty if none is.
        retry_after: seconds after which the same request may succeed; None if it will not.
    """

    def __init__(
        self, status: int, message: str, field: Sequence[str | int] = (), retry_after: int | None = None
    ) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        if retry_after is not None:
            headers["Retry-After"] = str(retry_after)
        super().__init__(status, message, headers)
        self.status, self.message, self.field, self.retry_after = status, message, tuple(field), retry_after

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        """The body of the answer, in the shape of FastAPI's own validation errors."""
        return {"detail": [{"loc": list(self.field), "msg": printable(self.message), "type": f"http_{self.status}"}]}

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.to_dict(), self.status, self.headers)


def invalid(message: str, *field: str | int) -> RequestError:
    """An error in a field of the request's body."""
    return RequestError(422, message, ("body", *field))


@contextmanager
def field_errors(*field: str | int) -> Iterator[None]:
    """Turn a ValueError into an error in a field of the request's body."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error), *field) from None


def busy(message: str, retry_after: float) -> RequestError:
    """The service has too much to do."""
    return RequestError(429, message, retry_after=max(1, min(600, round(retry_after))))


def stopping() -> RequestError:
    """The service takes no more requests."""
    return RequestError(503, "the service is stopping", retry_after=5)


def failure() -> RequestError:
    """Something went wrong that the client need not know."""
    return RequestError(500, "the service failed; its log has the reason")


def printable(message: str) -> str:
    """A message in one line that any encoding can hold."""
    return " ".join(message.encode("ascii", "backslashreplace").decode().split())


def answer_errors(app: FastAPI) -> None:
    """Let an application answer all errors in the shape of `RequestError.to_dict`."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, RequestError):
            # Of the framework itself, such as for a path that there is not.
            headers, error = error.headers, RequestError(error.status_code, str(error.detail))
            error.headers = headers
        return error.response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # `Guard` gets the error, too, and writes it into the log.
        return failure().response()

    @app.exception_handler(RequestValidationError)
    async def wrong_fields(request: Request, error: RequestValidationError) -> Response:
        # Without the input itself: it may be long, and need not be valid JSON again.
        detail = [
            {
                "loc": [_shown(part) for part in one["loc"]],
                "msg": printable(_reason(one, request, error.body)),
                "type": one["type"],
            }
            for one in error.errors()[:_SHOWN]
        ]
        return JSONResponse({"detail": detail}, 422)


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
    if where == ("body",) and kind not in ("missing", "value_error") and not _is_json(request):
        return "the body is not read as JSON; send Content-Type: application/json"
    return str(error["msg"])


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
