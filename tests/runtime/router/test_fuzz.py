"""Whatever a client sends, it gets an answer, and never a 500."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runtime.router.cluster import CHAT, COMPLETION, MODEL, PATIENCE_S, cluster

SETTINGS = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
known = st.sampled_from(
    """model messages prompt n best_of stream stream_options max_tokens max_completion_tokens
    temperature top_p stop seed logit_bias logprobs top_logprobs response_format tools
    tool_choice user pdctl pdctl_cache kv_transfer_params echo suffix min_tokens""".split()
)
bodies = st.builds(
    lambda base, extra: {**base, **extra},
    st.sampled_from([{}, CHAT, COMPLETION, {"model": MODEL}]),
    st.dictionaries(known | st.text(max_size=6), values, max_size=4),
)
paths = st.sampled_from(["/v1/chat/completions", "/v1/completions"])
SERVERS = ("pdctl.router", "aiohttp.server")
"""Loggers of the router; others here are those of the engines' servers and of the loop."""
header_texts = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40
).map(str.strip)


@pytest.fixture(scope="module")
def served() -> Iterator[http.client.HTTPConnection]:
    """One connection to a router over p0, d0 and o0."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(cluster("p0 d0 o0")) as running,
    ):
        address = urlsplit(running.router.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
        yield connection
        connection.close()


def sent(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
) -> int:
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    raw = response.read()
    assert response.status < 500, raw
    if response.status >= 400:
        error = json.loads(raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
    return response.status


@settings(SETTINGS, max_examples=1200)
@given(path=paths, body=bodies)
@example(path="/v1/completions", body={**COMPLETION, "prompt": "\x00"})
def test_any_object_is_answered(
    served: http.client.HTTPConnection, path: str, body: dict[str, Any]
) -> None:
    sent(served, "POST", path, json.dumps(body).encode(), {})


@settings(SETTINGS, max_examples=400)
@given(path=paths, raw=st.binary(max_size=60), cut=st.integers(0, 60))
def test_any_bytes_are_answered(
    served: http.client.HTTPConnection, path: str, raw: bytes, cut: int
) -> None:
    whole = json.dumps(CHAT).encode()
    assert sent(served, "POST", path, raw, {}) == 400
    sent(served, "POST", path, whole[:cut] + raw + whole[cut:], {})


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff" * 4096,
        b"FROB \x00 /\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n",
    ],
)
def test_what_is_not_http_is_answered_with_an_error_object_and_one_line_of_log(
    served: http.client.HTTPConnection, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO),
        socket.create_connection((served.host, served.port), timeout=PATIENCE_S) as stranger,
    ):
        # it may be refused before its last byte was taken
        with suppress(ConnectionError):
            stranger.sendall(raw)
        answer = http.client.HTTPResponse(stranger)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert answer.status == 400
    assert set(error) == {"message", "type", "param", "code"}
    said = [record.getMessage() for record in caplog.records]
    (told,) = (line for line in said if line.startswith("refused a request"))
    assert error["message"] in told
    servers = [record for record in caplog.records if record.name in SERVERS]
    assert [record for record in servers if record.exc_info] == []


@settings(SETTINGS, max_examples=400)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    path=paths | st.sampled_from(["/", "/nope", "/v1/models/x%00", "/ready", "/v1/models"]),
    headers=st.dictionaries(
        st.sampled_from(
            ["x-pdctl-path", "x-pdctl-room", "authorization", "content-type", "accept"]
        ),
        header_texts,
        max_size=3,
    ),
)
def test_any_method_and_headers_are_answered(
    served: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str]
) -> None:
    sent(served, method, path, json.dumps(COMPLETION).encode(), headers)
