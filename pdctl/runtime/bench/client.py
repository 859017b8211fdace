"""One streaming completion, timed as `vllm bench serve` defines its metrics.

TTFT is the time to the first chunk *with text*: an engine's empty first chunk (a role, a
special token) is not a token that anyone could read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from pdctl.errors import PdctlError
from pdctl.runtime.bench.events import DONE, Events
from pdctl.runtime.bench.status import Status, read_status
from pdctl.runtime.router.endpoints import COMPLETIONS, PATH_HEADER, STATUS


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the body, and the path that it is pinned to."""

    path: str
    body: Mapping[str, Any]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request's outcome. Seconds; times are of the client's monotonic clock.

    Where `error` is set the rest is what had arrived by then, and nothing counts as measured.
    """

    started_s: float
    ttft_s: float | None = None
    e2el_s: float = 0.0
    """To the last chunk of the answer; the trailing usage chunk does not count."""
    itl_s: tuple[float, ...] = ()
    """Between successive chunks with text."""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    """As the engine's usage says; chunks may bundle tokens."""
    text: str = ""
    finish_reason: str | None = None
    path: str | None = None
    """The path that the router says it took."""
    status: int | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def tpot_s(self) -> float | None:
        """None for answers of one token."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


class Client:
    """Completions against one router, on a session that the caller owns.

    `timeout_s` bounds the connection and every silence between two chunks; progress renews it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._url = url
        self._headers = dict(headers or {})
        self.clock = clock
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(10.0, timeout_s), sock_read=timeout_s
        )

    async def complete(self, ask: Ask) -> Sample:
        """Sends `ask` and reads its stream to the end. Failures are in `Sample.error`."""
        timeline = _Timeline(self.clock())
        try:
            async with self._session.post(
                self._url + COMPLETIONS,
                json=dict(ask.body),
                headers={**self._headers, PATH_HEADER: ask.path},
                timeout=self._timeout,
            ) as response:
                timeline.status = response.status
                timeline.path = response.headers.get(PATH_HEADER)
                if response.status != 200:
                    return timeline.failed(error_text(response.status, await response.read()))
                return await self._stream(response, timeline)
        except TimeoutError:
            return timeline.failed("no answer within the deadline")
        except (aiohttp.ClientError, OSError) as error:
            return timeline.failed(f"connection: {error or type(error).__name__}")

    async def status(self) -> Status:
        """The router's counters; PdctlError where it does not answer."""
        url = self._url + STATUS
        try:
            async with self._session.get(
                url, headers=self._headers, timeout=self._timeout
            ) as response:
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise PdctlError(
                f"the router does not answer at {url}: {error or type(error).__name__}",
                hint="see `pdctl ps`; a cluster is started with `pdctl up TOPOLOGY`",
            ) from error
        if response.status != 200:
            raise PdctlError(f"the router answers {url} with {error_text(response.status, body)}")
        return read_status(body)

    async def _stream(self, response: aiohttp.ClientResponse, timeline: _Timeline) -> Sample:
        events = Events()
        async for piece in response.content.iter_any():
            now = self.clock()
            for payload in events.feed(piece):
                if payload == DONE:
                    return timeline.sample()
                problem = timeline.take(payload, now)
                if problem is not None:
                    return timeline.failed(problem)
        return timeline.failed("the stream ended before [DONE]")


def error_text(status: int, body: bytes) -> str:
    """ "502: message (code)" from an OpenAI error object, or from whatever came instead."""
    try:
        error = msgspec.json.decode(body).get("error")
        message, code = error.get("message"), error.get("code")
    except (msgspec.DecodeError, AttributeError):
        message, code = body[:200].decode(errors="replace").strip() or "empty answer", None
    return f"{status}: {message}" + (f" ({code})" if code else "")


class _Timeline:
    """What has arrived of one answer, and when."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_text_s = started_s
        self._last_s = started_s
        self._itl_s: list[float] = []
        self._texts: list[str] = []
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._finish_reason: str | None = None
        self.status: int | None = None
        self.path: str | None = None

    def take(self, payload: str, now_s: float) -> str | None:
        """Books one event; returns what is wrong with it, or None."""
        try:
            event = msgspec.json.decode(payload, type=_Chunk)
        except msgspec.DecodeError as error:
            return f"an event that is no completion chunk: {error}"
        if event.error is not None:
            return f"in the stream: {event.error.message}"
        for choice in event.choices:
            self._take_choice(choice, now_s)
        if event.usage is not None:
            self._prompt_tokens = event.usage.prompt_tokens
            self._output_tokens = event.usage.completion_tokens
        return None

    def _take_choice(self, choice: _Choice, now_s: float) -> None:
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
            self._last_s = now_s
        if not choice.text:
            return
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._itl_s.append(now_s - self._last_text_s)
        self._last_text_s = self._last_s = now_s
        self._texts.append(choice.text)

    def sample(self) -> Sample:
        if self._first_s is None:
            return self.failed("the answer has no text")
        if self._output_tokens is None:
            return self.failed("the answer has no usage")
        return self._as_sample(None)

    def failed(self, error: str) -> Sample:
        return self._as_sample(error)

    def _as_sample(self, error: str | None) -> Sample:
        return Sample(
            started_s=self._started_s,
            ttft_s=None if self._first_s is None else self._first_s - self._started_s,
            e2el_s=self._last_s - self._started_s,
            itl_s=tuple(self._itl_s),
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens or 0,
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            path=self.path,
            status=self.status,
            error=error,
        )


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = "unnamed error"


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Error | None = None
