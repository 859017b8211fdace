"""The client's end of one request: aiohttp's response, begun as late as possible."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from aiohttp import web

from pdctl.runtime.router.delivery import ClientGone
from pdctl.runtime.router.endpoints import (
    DECISION_HEADER,
    PATH_HEADER,
    RETRIED_HEADER,
    ROOM_HEADER,
    TRANSPORT_HEADER,
)
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.policy import Path
from pdctl.trace import monotonic_s

LAST_WRITE_S = 2.0
"""For the error event of a stream: a client that does not read is not waited for."""

_DONE = b"data: [DONE]"

_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientDelivery:
    """Delivers one answer to one HTTP client.

    `response` is set once there is one; the first byte's moment is in `first_at_s`.
    """

    def __init__(
        self,
        request: web.Request,
        transport: Callable[[Path], str | None] = lambda path: None,
    ) -> None:
        self._request = request
        self._transport = transport
        self._stream: web.StreamResponse | None = None
        self.response: web.StreamResponse | None = None
        self.headers: dict[str, str] = {}
        self._decision: str | None = None
        self.path = "none"
        self.first_at_s: float | None = None
        self.error_told = False
        self.complete = False
        """The end of a stream was written: a client that closes now has all of it."""

    @property
    def begun(self) -> bool:
        return self.response is not None

    def decided(self, text: str) -> None:
        self._decision = text

    def route(self, path: Path, room: int | None, retried: Path | None) -> None:
        self.path = path.text
        self.headers = {PATH_HEADER: path.text}
        if room is not None:
            self.headers[ROOM_HEADER] = str(room)
        if (transport := self._transport(path)) is not None:
            self.headers[TRANSPORT_HEADER] = transport
        if retried is not None:
            self.headers[RETRIED_HEADER] = retried.text
        if self._decision is not None:
            self.headers[DECISION_HEADER] = self._decision

    def recomputed(self, path: Path) -> None:
        self.path = path.text
        self.headers[PATH_HEADER] = path.text

    def prefilled(self, body: bytes) -> None:
        return

    async def whole(self, body: bytes, content_type: str) -> None:
        self.first_at_s = monotonic_s()
        headers = {**self.headers, "content-type": content_type}
        self.response = web.Response(body=body, headers=headers)

    async def event(self, raw: bytes) -> None:
        if self._stream is None:
            self._stream = web.StreamResponse(headers={**_STREAM_HEADERS, **self.headers})
            self.response = self._stream
            self.first_at_s = monotonic_s()
            await _written(self._stream.prepare(self._request))
        await _written(self._stream.write(raw))
        self.complete = self.complete or raw.rstrip().endswith(_DONE)

    async def end(self) -> None:
        if self._stream is not None:
            await _written(self._stream.write_eof())

    async def fail(self, failure: RequestFailed) -> web.StreamResponse:
        """Tells the client: as a status where there is none yet, else as the last event."""
        self.error_told = True
        if self._stream is None:
            self.response = error_response(failure, self.headers)
            return self.response
        with anyio.move_on_after(LAST_WRITE_S) as patience:
            await _written(self._stream.write(failure.event))
            await _written(self._stream.write_eof())
        if patience.cancelled_caught and self._request.transport is not None:
            self._request.transport.abort()
        return self._stream


def error_response(failure: RequestFailed, headers: dict[str, str] | None = None) -> web.Response:
    """OpenAI's error object with its status."""
    return web.Response(
        status=failure.status,
        body=failure.body,
        content_type="application/json",
        headers=headers or {},
    )


async def _written(write: Awaitable[object]) -> None:
    try:
        await write
    except (ConnectionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "closing transport" not in str(error).lower():
            raise
        raise ClientGone from None
