"""What is not HTTP at all: answered with OpenAI's error object, and told in one line.

aiohttp would answer in plain text and log a traceback for each, so that anybody who reaches the
port could fill the router's log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDictProxy

from pdctl.runtime.router.client import error_response
from pdctl.runtime.router.failure import RequestFailed

log = logging.getLogger("pdctl.router")

MAX_LINE_BYTES = 8190
"""Of the request line, and of one header."""

CONTINUE = "100-continue"


class Runner(web.AppRunner):
    """As aiohttp's, but for how it answers what it cannot parse."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        factory = _without_expectations(made.request_factory)
        return _Server(made.request_handler, request_factory=factory, **self._kwargs)


def _without_expectations(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Ignores what a client expects beyond 100-continue, as RFC 9110 lets a server do: aiohttp
    would quote it in a plain text of its own, and fail at bytes that are not UTF-8."""

    def made(message: RawRequestMessage, *rest: Any, **named: Any) -> web.BaseRequest:
        if message.headers.get(hdrs.EXPECT, CONTINUE).lower() != CONTINUE:
            headers = message.headers.copy()
            headers.popall(hdrs.EXPECT)
            message = message._replace(headers=CIMultiDictProxy(headers))
        return make(message, *rest, **named)

    return made


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            # gone before the 100-continue that it expected; nobody reads what is made here
            return _closing(RequestFailed(status, "the client went away"))
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = _reason(exc)
        log.info("refused a request from %s: %s", request.remote, reason)
        return _closing(RequestFailed(status, reason, code="bad_request"))


def _closing(failure: RequestFailed) -> web.StreamResponse:
    response = error_response(failure)
    response.force_close()
    return response


def _reason(error: HttpProcessingError) -> str:
    if isinstance(error, LineTooLong):
        return f"the request line or a header is over {MAX_LINE_BYTES} bytes"
    lines = error.message.strip().splitlines()
    told = lines[0].rstrip(":") if lines else type(error).__name__
    return f"this is not an HTTP request: {told[:1].lower()}{told[1:]}"
