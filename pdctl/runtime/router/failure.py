"""What a client is told when its request fails: OpenAI's error object and a status."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID = "invalid_request_error"
SERVER = "server_error"

ENGINE_ERROR = "engine_error"
"""The cause where an engine's own error names none that is known here."""


class RequestFailed(Exception):
    """One request's failure, ready to be answered.

    Args:
        status: the HTTP status: 4xx is the client's, 502/503/504 name a leg.
        message: one sentence that names the thing.
        code: stable name of the cause (`peer_lost`, `deadline`, `model_not_found` …).
        param: the offending parameter of the body, for a 400.
        leg: "prefill", "decode" or "alone" where one of them failed.
        replica: the replica that leg ran on.
        dead: the replica could not be reached or went away; another one may well answer.
        stale: an idle pooled connection was closed under the request; a second try is safe.

    `path` and `room` are of the try that failed, where there was one.
    """

    path: str | None = None
    room: int | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        leg: str | None = None,
        replica: str | None = None,
        dead: bool = False,
        stale: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.leg = leg
        self.replica = replica
        self.dead = dead
        self.stale = stale

    @property
    def is_clients(self) -> bool:
        return 400 <= self.status < 500

    @property
    def error(self) -> dict[str, Any]:
        """The body: `{"error": {"message", "type", "param", "code"}}`."""
        kind = INVALID if self.is_clients else SERVER
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.error)

    @property
    def event(self) -> bytes:
        """The same, as the last event of a stream that has begun."""
        return b"data: " + self.body + b"\n\n"


def refused(message: str, *, param: str | None, code: str = "invalid_value") -> RequestFailed:
    """A 400 that names the parameter."""
    return RequestFailed(400, message, code=code, param=param)


def on_leg(leg: str, replica: str) -> str:
    """How a message begins that blames one leg."""
    if leg == "alone":
        return f'replica "{replica}"'
    return f'{leg} replica "{replica}"'
