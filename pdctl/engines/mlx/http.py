"""The library's HTTP handler with pdctl's field, errors as OpenAI's object, and aborts."""

from __future__ import annotations

import io
import json
import logging
import socket
from http.server import ThreadingHTTPServer
from typing import Any

import mlx_lm.server as library
import msgspec

from pdctl.engines.interface import Leg
from pdctl.engines.mlx import versions
from pdctl.engines.mlx.admission import Admission, Asked
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.disconnects import DisconnectWatch
from pdctl.engines.mlx.failure import RequestFailure, failure_of, refused
from pdctl.engines.mlx.logprobs import Logprobs
from pdctl.engines.mlx.loop import EngineLoop
from pdctl.engines.mlx.spec import ABORT_PATH, body_refusals

log = logging.getLogger("pdctl.engines.mlx")

MAX_BODY_BYTES = 64 << 20
READ_TIMEOUT_S = 60.0


class Server(ThreadingHTTPServer):
    """One thread per connection; every waiting client fits into the backlog."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, host: str, port: int, engine: EngineLoop, admission: Admission) -> None:
        self.engine = engine
        self.admission = admission
        self.disconnects = DisconnectWatch()
        self.fingerprint = library.get_system_fingerprint()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("connection ended by an error", exc_info=True)


class Responder:
    """What the library's handler calls to generate; one per request."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.cli_args = handler.server.engine.cli_args
        self.is_healthy = handler.server.engine.is_healthy

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> tuple[Any, Any]:
        """The context once the first token is there, and the responses from it on."""
        server = self._handler.server
        call = self._handler.call = server.admission.admit(request, args, self._handler.asked)
        with server.disconnects.watching(
            self._handler.connection, lambda: server.admission.cancel(call)
        ):
            context = call.first()
        stream = versions.handler_stream(context, self._watched(call))
        return context, self._handler.chances.keeping(stream, args)

    def _watched(self, call: Any) -> Any:
        server = self._handler.server
        with server.disconnects.watching(
            self._handler.connection, lambda: server.admission.cancel(call)
        ):
            yield from call.responses()


class Handler(library.APIHandler):  # type: ignore[misc]
    """Stock parsing, templates, tools, logprobs and formatting."""

    server: Server
    rfile: io.BufferedIOBase
    timeout = READ_TIMEOUT_S

    def __init__(self, request: Any, client_address: Any, server: Server) -> None:
        self.asked = Asked()
        self.chances = Logprobs()
        self.call: Call | None = None
        self.started = False
        self.server = server
        super().__init__(
            Responder(self),
            request,
            client_address,
            server,
            system_fingerprint=server.fingerprint,
        )

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)

    def end_headers(self) -> None:
        self.started = True
        super().end_headers()

    def do_POST(self) -> None:
        try:
            if self.path == ABORT_PATH:
                self._abort()
            else:
                self._take_body()
                super().do_POST()
        except RequestFailure as failure:
            self._fail(failure)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        # 0.31.3 lets its own checks of a body end the connection without an answer
        except (ValueError, AssertionError, KeyError, TypeError, AttributeError) as error:
            self._fail(refused(str(error)))
        # process boundary of one request
        except Exception as error:
            log.exception("request failed in the handler")
            self._fail(failure_of(error))
        finally:
            # the library lets go of a stream that it began to read, and of no other
            if self.call is not None:
                self.server.admission.cancel(self.call)

    def generate_response(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The library's answer or event, with the log probabilities of what it covers."""
        answer: dict[str, Any] = super().generate_response(*arguments, **named)
        taken = self.chances.take(self.server.engine.tokenizer)
        if taken is not None:
            answer["choices"][0]["logprobs"] = taken
        return answer

    def handle_models_request(self) -> None:
        """The loaded checkpoint; the library would look through a hub's cache."""
        model = {"id": self.server.engine.cli_args.model, "object": "model", "created": 0}
        self._send(200, {"object": "list", "data": [model]})

    def _take_body(self) -> None:
        """Reads the body, keeps pdctl's fields, and leaves the rest for the library.

        A null stands for a default in OpenAI's API, which the library would refuse.
        """
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            return
        if int(length) > MAX_BODY_BYTES:
            raise RequestFailure(413, f"the body is over {MAX_BODY_BYTES} bytes")
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if isinstance(body, dict):
            body = {name: value for name, value in body.items() if value is not None}
            self.asked = _asked(body)
            for param, reason in body_refusals(body):
                raise refused(reason, param)
            self.chances.translate(body)
            if body.pop("tool_choice", None) == "none":
                body.pop("tools", None)
            if isinstance(body.get("stream_options"), dict):
                body["stream_options"].setdefault("include_usage", False)
            raw = json.dumps(body).encode()
        self.headers.replace_header("Content-Length", str(len(raw)))
        self.rfile = io.BytesIO(raw)

    def _abort(self) -> None:
        length = self.headers.get("Content-Length", "0")
        try:
            room = json.loads(self.rfile.read(int(length)))["room"]
        except (ValueError, KeyError, TypeError):
            raise refused('the body must be {"room": N}', "room") from None
        self._send(200, {"aborted": self.server.engine.abort(room)})

    def _fail(self, failure: RequestFailure) -> None:
        """An error answer, or its event where a stream has begun."""
        try:
            if self.started:
                if getattr(self, "stream", False):
                    self.wfile.write(f"data: {json.dumps(failure.body())}\n\n".encode())
                self.close_connection = True
                return
            self._headers_buffer: list[bytes] = []
            self._send(failure.status, failure.body())
        except OSError:
            self.close_connection = True

    def _send(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _asked(body: dict[str, Any]) -> Asked:
    """Takes pdctl's fields out of a body."""
    leg, keeps = body.pop("pdctl", None), body.pop("pdctl_cache", True)
    if not isinstance(keeps, bool):
        raise refused("pdctl_cache must be true or false", "pdctl_cache")
    salt = body.pop("cache_salt", "")
    if not isinstance(salt, str):
        raise refused("cache_salt must be a string", "cache_salt")
    if leg is None:
        return Asked(keeps_prefix=keeps, salt=salt)
    try:
        return Asked(leg=msgspec.convert(leg, Leg), keeps_prefix=keeps, salt=salt)
    except msgspec.ValidationError as error:
        raise refused(f"pdctl: {error}", "pdctl") from None
