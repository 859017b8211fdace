"""What a request can come to, other than an answer, in OpenAI's error object."""

from __future__ import annotations

from typing import Any

from pdctl.errors import BudgetExceeded, HandoffError, QueueFull


class RequestFailure(BaseException):
    """Ends one request with an HTTP status and an error object.

    A BaseException, because the library's handler answers every Exception with a bare 404.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def refused(message: str, param: str | None = None) -> RequestFailure:
    return RequestFailure(400, message, param=param)


def failure_of(error: BaseException) -> RequestFailure:
    """The HTTP answer for whatever ended a request."""
    if isinstance(error, RequestFailure):
        return error
    if isinstance(error, BudgetExceeded):
        return RequestFailure(400, error.message, code=error.cause)
    if isinstance(error, HandoffError):
        status = 503 if isinstance(error, QueueFull) else 502
        return RequestFailure(status, error.message, code=error.cause)
    return RequestFailure(500, f"{type(error).__name__}: {error}")
