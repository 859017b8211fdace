"""HTTP in: routes, access, and OpenAI's error object for whatever goes wrong."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from pdctl.runtime.router import endpoints
from pdctl.runtime.router.client import ClientDelivery, error_response
from pdctl.runtime.router.delivery import ClientGone
from pdctl.runtime.router.failure import RequestFailed, refused
from pdctl.runtime.router.home import home
from pdctl.runtime.router.members import Roster
from pdctl.runtime.router.metrics import CONTENT_TYPE, Meter
from pdctl.runtime.router.policy import nothing_ready
from pdctl.runtime.router.relay import Relay
from pdctl.runtime.router.request import MAX_BODY_BYTES, check, model_not_found
from pdctl.runtime.router.status import model, models, readiness, status
from pdctl.runtime.router.verdicts import verdicts
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.router")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refresher = Callable[[], Awaitable[bool]]


class Front:
    """The handlers. `refresh` brings fresh counters into the roster."""

    def __init__(
        self,
        relay: Relay,
        roster: Roster,
        meter: Meter,
        refresh: Refresher,
        api_key: str | None,
    ) -> None:
        self._relay = relay
        self._roster = roster
        self._meter = meter
        self._refresh = refresh
        self._api_key = api_key
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, self._access])
        app.on_response_prepare.append(_sign)
        app.router.add_post(endpoints.COMPLETIONS, self._generate)
        app.router.add_post(endpoints.CHAT_COMPLETIONS, self._generate)
        app.router.add_get(endpoints.MODELS, self._models)
        app.router.add_get(endpoints.MODEL, self._model)
        app.router.add_get(endpoints.HEALTH, self._health)
        app.router.add_get(endpoints.READY, self._ready)
        app.router.add_get(endpoints.METRICS, self._metrics)
        app.router.add_get(endpoints.STATUS, self._status)
        app.router.add_get(endpoints.HOME, self._home)
        return app

    @web.middleware
    async def _access(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        open_to_all = self._api_key is None or request.path in endpoints.OPEN
        if not open_to_all and not _presents(request, self._api_key or ""):
            raise RequestFailed(
                401, "a valid API key is needed: Authorization: Bearer …", code="invalid_api_key"
            )
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self._roster.draining:
            raise RequestFailed(503, "the router is being restarted", code="router_draining")
        delivery = ClientDelivery(request, self._roster.transport)
        began_s = monotonic_s()
        self._meter.began()
        outcome = "gone"
        try:
            response = await self._answered(request, delivery)
            outcome = (
                "cut" if delivery.error_told and response.status == 200 else str(response.status)
            )
            return response
        except ClientGone:
            raise _Hangup from None
        finally:
            if outcome == "gone" and delivery.complete and not delivery.error_told:
                outcome = "200"
            first_s = delivery.first_at_s
            self._meter.ended(
                delivery.path,
                outcome,
                ttft_s=None if first_s is None else first_s - began_s,
                e2e_s=monotonic_s() - began_s,
            )

    async def _answered(self, request: web.Request, delivery: ClientDelivery) -> web.StreamResponse:
        try:
            ask = check(request.path, await _body(request), self._roster.plan.model)
            pin = request.headers.get(endpoints.PATH_HEADER)
            await self._relay.serve(ask, pin, delivery)
        except RequestFailed as failure:
            if not failure.is_clients:
                log.warning("request failed path=%s %s", delivery.path, failure.message)
            return await delivery.fail(failure)
        assert delivery.response is not None, "a served request has an answer"
        return delivery.response

    async def _models(self, _: web.Request) -> web.Response:
        self._need_any_path()
        return _json(models(self._roster, self._created))

    async def _model(self, request: web.Request) -> web.Response:
        self._need_any_path()
        asked = request.match_info["model"]
        if asked != self._roster.plan.model:
            raise model_not_found(asked, self._roster.plan.model)
        return _json(model(self._roster, self._created))

    def _need_any_path(self) -> None:
        if not self._roster.ready():
            roster = self._roster
            raise nothing_ready((path, roster.state(path)[1] or "") for path in roster.paths)

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        ready, said = readiness(self._roster)
        return _json(said, status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        await self._refresh()
        return web.Response(body=self._meter.text(), headers={"content-type": CONTENT_TYPE})

    async def _status(self, _: web.Request) -> web.Response:
        fresh = await self._refresh()
        judge = self._relay.judge
        judge.look()
        shown = status(self._roster, self._meter, self._relay.flights, fresh=fresh)
        names = [seat.name for seat in self._roster.seats()]
        return _json({**shown, **verdicts(judge, names, time.time())})

    async def _home(self, _: web.Request) -> web.Response:
        page = home()
        return web.Response(text=page.html, content_type="text/html", headers=page.headers)


class _Hangup(Exception):
    """Nobody is left to answer."""


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "pdctl"


async def _body(request: web.Request) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestFailed(
            415, "send the body as it is, without Content-Encoding", code="unsupported_encoding"
        )
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestFailed(
            413, f"the body is over {MAX_BODY_BYTES} bytes", code="body_too_large"
        ) from None
    except (web.RequestPayloadError, ConnectionError, ValueError) as error:
        raise refused(f"the body cannot be read: {error}", param=None, code="bad_body") from None


def _presents(request: web.Request, api_key: str) -> bool:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    given = key.strip().encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(given, api_key.encode())


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestFailed as refusal:
        return error_response(refusal)
    except _Hangup:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)
    except web.HTTPException as error:
        return _foreign(request, error)
    # The process boundary: whatever is left is our bug, and the client still gets an object.
    except Exception:
        log.exception("unexpected failure path=%s", request.path)
        failure = RequestFailed(500, "the router failed unexpectedly", code="internal_error")
        return error_response(failure)


def _foreign(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        raise error
    message = {
        404: f"no such path: {request.path}",
        405: f"{request.method} is not allowed on {request.path}",
    }.get(error.status, error.reason)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
    allow = error.headers.get("Allow")
    headers = {"Allow": allow} if allow else None
    return error_response(RequestFailed(error.status, message, code=code), headers)


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
