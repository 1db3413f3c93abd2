"""Errors that a client is told of, each with its HTTP status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_CONTEXT = "there is no context of this id: post its sequence to /v1/contexts first"


class RequestError(Exception):
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
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = tuple(field)
        self.retry_after = retry_after

    def to_dict(self) -> dict[str, Any]:
        """The body of the answer, in the shape of FastAPI's own validation errors."""
        return {"detail": [{"loc": list(self.field), "msg": printable(self.message), "type": f"http_{self.status}"}]}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def invalid(message: str, *field: str | int) -> RequestError:
    """An error in a field of the request's body."""
    return RequestError(422, message, ("body", *field))


def busy(message: str, retry_after: float) -> RequestError:
    """The service has too much to do."""
    return RequestError(429, message, retry_after=max(1, min(600, round(retry_after))))


def stopping() -> RequestError:
    """The service takes no more requests."""
    return RequestError(503, "the service is stopping", retry_after=5)


def printable(message: str) -> str:
    """A message in one line that any encoding can hold."""
    return " ".join(message.encode("ascii", "backslashreplace").decode().split())
