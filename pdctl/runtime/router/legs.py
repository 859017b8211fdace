"""One POST to one engine. Foreign errors are translated here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from pdctl.engines.channel import Failed
from pdctl.engines.interface import EngineSpec
from pdctl.errors import HandoffError
from pdctl.runtime.router.blame import STATUSES
from pdctl.runtime.router.failure import ENGINE_ERROR, RequestFailed, on_leg
from pdctl.runtime.router.members import Seat
from pdctl.runtime.router.stream import Event, EventTooLong, Splitter

MAX_ANSWER_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10

CONNECT_TIMEOUT_S = 3.0
KEEPALIVE_S = 4.0
"""Idle connections are dropped before any engine would drop them (U21): vLLM and SGLang do
after 5 s."""

PROMPT_ALIASES = ("prompt", "input_tokens", "input_text")
"""What engines call a prompt that is too long, in whichever field it came."""

_REUSED = "reused"


def open_session() -> aiohttp.ClientSession:
    """The router's one pool of connections to engines; the caller closes it."""
    trace = aiohttp.TraceConfig()

    async def reused(_: object, context: Any, __: object) -> None:
        marks = context.trace_request_ctx
        if isinstance(marks, dict):
            marks[_REUSED] = True

    trace.on_connection_reuseconn.append(reused)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        trace_configs=[trace],
        read_bufsize=1 << 18,
    )


class EngineCall:
    """One leg of a request: sent once, read once, closed once.

    A `follow` makes the body of prefill's answer; the leg begins only then.

    `finished` says that the engine has answered to the end, so that nothing is left to abort
    there; `reached` that it may have seen the request at all.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        seat: Seat,
        spec: EngineSpec,
        *,
        leg: str,
        endpoint: str,
        body: dict[str, Any],
        follow: Callable[[bytes], dict[str, Any]] | None = None,
    ) -> None:
        self.seat = seat
        self.spec = spec
        self.leg = leg
        self.finished = False
        self.reached = False
        self._session = session
        self._url = seat.base_url + endpoint
        self._body = body
        self._follow = follow
        self._response: aiohttp.ClientResponse | None = None
        self._splitter = Splitter()
        self._events: list[Event] = []

    @property
    def name(self) -> str:
        return on_leg(self.leg, self.seat.name)

    @property
    def follows(self) -> bool:
        """Whether it begins with what prefill answered."""
        return self._follow is not None

    def take(self, prefilled: bytes) -> None:
        """Makes its body of prefill's answer.

        Raises:
            RequestFailed: 502, there is nothing to begin with in it.
        """
        assert self._follow is not None
        try:
            self._body = self._follow(prefilled)
        except HandoffError as error:
            raise self._failure(error.message, code=error.cause) from None

    async def send(self) -> None:
        """Sends the body and waits for the engine's status.

        Raises:
            RequestFailed: 503 unreachable, 502 broken, or the engine's own error answer.
        """
        marks: dict[str, bool] = {}
        self.reached = True
        try:
            self._response = await self._session.post(
                self._url,
                data=msgspec.json.encode(self._body),
                headers={"content-type": "application/json"},
                trace_request_ctx=marks,
            )
        except aiohttp.ClientConnectorError as error:
            self.reached = False
            raise self._unreachable(error) from None
        except aiohttp.ConnectionTimeoutError as error:
            self.reached = False
            raise self._unreachable(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error, stale=_REUSED in marks) from None
        if self._response.status != 200:
            raise await self._refusal()

    async def whole(self) -> bytes:
        """The rest of a 200 answer, which must be JSON."""
        body = await self._read(MAX_ANSWER_BYTES)
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            raise self._failure("its answer is not JSON", code="bad_answer") from None
        self.finished = True
        return body

    async def event(self) -> Event | None:
        """The next event of a streamed 200 answer; None at the end of the connection."""
        while not self._events:
            response = self._opened()
            try:
                chunk = await response.content.readany()
                self._events = self._splitter.feed(chunk)
            except EventTooLong:
                raise self._failure("one of its events is too long", code="bad_answer") from None
            except (aiohttp.ClientError, OSError) as error:
                raise self._broken(error) from None
            if not chunk:
                return None
        return self._events.pop(0)

    async def drain(self) -> None:
        """Reads what follows the last event, so that the connection can be used again."""
        response = self._opened()
        try:
            while await response.content.readany():
                pass
        except (aiohttp.ClientError, OSError):
            response.close()

    def close(self) -> None:
        """Gives the connection back when its answer was read to the end; cuts it otherwise.
        Never waits, never raises."""
        if self._response is None:
            return
        if self.finished and self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    @property
    def content_type(self) -> str:
        return self._opened().headers.get("content-type", "application/json")

    def lost(self, cause: str) -> RequestFailed:
        """The replica went away under the request."""
        return self._failure(f"it went away ({cause})", code="replica_lost", dead=True)

    def truncated(self) -> RequestFailed:
        """The stream ended without `[DONE]`: only Done is done. A replica that speaks HTTP/1.0
        and dies looks like this."""
        cause = f" ({self.seat.lost_cause})" if self.seat.lost_cause else ""
        where = " in the middle of an event" if self._splitter.partial else " early"
        return self._failure(f"its stream ended{where}{cause}", code="truncated", dead=True)

    def expired(self, timeout_s: float) -> RequestFailed:
        return self._failure(f"no progress for {timeout_s:g} s", code="deadline", status=504)

    def recomputed(self, report: Failed) -> RequestFailed:
        """The handoff that it reported as failed; it computed the prompt itself."""
        return self._failure(report.detail, code=report.cause)

    def unanswered(self) -> RequestFailed:
        """The stream is complete and has no output in it: vLLM's, where a handoff failed."""
        self.finished = True
        return self._failure("its stream has no answer in it", code=ENGINE_ERROR)

    def told(self, event: Event) -> RequestFailed:
        """The engine put an error into its stream before any output."""
        payload = event.raw.split(b"data:", 1)[-1].strip()
        return self._said(502, payload)

    async def _read(self, limit: int) -> bytes:
        response = self._opened()
        parts = bytearray()
        try:
            while chunk := await response.content.readany():
                parts += chunk
                if len(parts) > limit:
                    raise self._failure("its answer is too long", code="bad_answer")
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from None
        return bytes(parts)

    async def _refusal(self) -> RequestFailed:
        """The engine's own error answer, in any form. 4xx stays 4xx."""
        status = self._opened().status
        body = await self._read(MAX_ERROR_BYTES)
        self.finished = True
        return self._said(status, body)

    def _said(self, status: int, body: bytes) -> RequestFailed:
        """What the engine said, with the status of the cause that it names: SGLang answers every
        failed handoff with a 500. 4xx stays 4xx."""
        message, cause = self.spec.error_message(status, body)
        own = _error_object(body)
        status = STATUSES.get(cause or "", status)
        if 400 <= status < 500:
            return RequestFailed(
                status,
                message,
                code=cause or _text(own.get("code")),
                param=self._parameter(own.get("param"), message),
                leg=self.leg,
                replica=self.seat.name,
            )
        kept = status if status in (503, 504) else 502
        return self._failure(message, code=cause or ENGINE_ERROR, status=kept)

    def _parameter(self, named: object, message: str) -> str | None:
        """The client's own name of a parameter that the engine objects to."""
        unnamed = named is None and any(words in message for words in self.spec.over_context)
        if named in PROMPT_ALIASES or unnamed:
            return "messages" if "messages" in self._body else "prompt"
        return _text(named)

    def _unreachable(self, error: Exception) -> RequestFailed:
        return self._failure(
            f"it cannot be reached ({_said(error)})", code="replica_down", status=503, dead=True
        )

    def _broken(self, error: Exception, *, stale: bool = False) -> RequestFailed:
        cause = self.seat.lost_cause or _said(error)
        return self._failure(
            f"its connection broke ({cause})", code="replica_lost", dead=True, stale=stale
        )

    def _failure(
        self,
        message: str,
        *,
        code: str,
        status: int = 502,
        dead: bool = False,
        stale: bool = False,
    ) -> RequestFailed:
        return RequestFailed(
            status,
            f"{self.name}: {message}",
            code=code,
            leg=self.leg,
            replica=self.seat.name,
            dead=dead,
            stale=stale,
        )

    def _opened(self) -> aiohttp.ClientResponse:
        assert self._response is not None, "send() comes first"
        return self._response


def _error_object(body: bytes) -> dict[str, Any]:
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
