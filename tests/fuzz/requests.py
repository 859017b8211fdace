"""Fuzzed HTTP requests for the router, drawn from one seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

PATHS = ("/v1/chat/completions", "/v1/completions")
OTHER_PATHS = (
    "/",
    "/nope",
    "/v1/models",
    "/v1/models/%00",
    "/health",
    "/ready",
    "/v1//completions",
)
METHODS = "GET POST PUT DELETE PATCH OPTIONS HEAD TRACE BREW".split()

FIELDS = """model messages prompt n best_of stream stream_options max_tokens
    max_completion_tokens temperature top_p stop seed logit_bias logprobs top_logprobs
    response_format tools tool_choice user pdctl pdctl_cache kv_transfer_params echo suffix
    min_tokens presence_penalty bootstrap_room chat_template_kwargs role content""".split()

HEADERS = """x-pdctl-path x-pdctl-room authorization content-type accept content-encoding
    accept-encoding expect cookie x-forwarded-for connection origin range
    if-none-match upgrade""".split()

HEADER_WORDS = (
    "p0>d0", "o0", "p0>", ">", "d0>p0", "p9>d9", "gzip", "deflate, br", "100-continue", "*/*",
    "Bearer x", "application/json; charset=utf-16", "close", "keep-alive", "text/plain", "-1",
    "websocket", "bytes=0-", "a" * 9000,
)  # fmt: skip

TEXTS = (
    "", "hi", "\x00", "\ud800", "é" * 40, "🜂", "{{ 7 * 7 }}", "../../etc/passwd", "a" * 5000,
    "<|im_start|>", "null", "p0>d0", "data: [DONE]\n\n",
)  # fmt: skip

NUMBERS = (
    0, -0.0, 1, -1, 2, 1e308, -1e308, 1e-320, float("nan"), float("inf"), 2**31, 2**53 + 1,
    2**63, 2**64, -(2**63) - 1, 10**400, 0.1,
)  # fmt: skip


class Fuzzed(msgspec.Struct, frozen=True):
    """One request as bytes. `framed`: its length is what it says, so that an answer is due
    and the connection goes on; else the connection is the request's own."""

    kind: str
    raw: bytes
    framed: bool


def fuzzed(draw: random.Random, model: str) -> Fuzzed:
    """The next request."""
    make = draw.choice(_KINDS)
    return make(draw, model)


def whole_body(draw: random.Random, model: str) -> dict[str, Any]:
    """One that any router takes."""
    body: dict[str, Any] = {"model": model, "max_tokens": 4, "stream": draw.random() < 0.5}
    if draw.random() < 0.5:
        return {**body, "messages": [{"role": "user", "content": "hi"}]}
    return {**body, "prompt": "hi"}


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value, and some that only Python's encoder would write."""
    kind = draw.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return draw.choice(TEXTS)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind == 4:
        return draw.choice((None, True, False))
    if kind < 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def mutated(draw: random.Random, body: Any) -> Any:
    """The same value with one place of it changed, dropped or filled with something else."""
    if isinstance(body, dict) and body and draw.random() < 0.8:
        name = draw.choice(list(body))
        if draw.random() < 0.2:
            return {key: held for key, held in body.items() if key != name}
        return {**body, name: mutated(draw, body[name])}
    if isinstance(body, list) and body and draw.random() < 0.7:
        at = draw.randrange(len(body))
        return [*body[:at], mutated(draw, body[at]), *body[at + draw.randrange(2) :]]
    return value(draw)


def _object(draw: random.Random, model: str) -> Fuzzed:
    body: Any = whole_body(draw, model)
    for _ in range(draw.randrange(3)):
        body = {**body, draw.choice(FIELDS): value(draw)} if isinstance(body, dict) else body
    for _ in range(draw.randrange(3)):
        body = mutated(draw, body)
    return _posted(draw, "object", json.dumps(body).encode("utf-8", "surrogatepass"))


def _bytes(draw: random.Random, model: str) -> Fuzzed:
    raw = bytearray(json.dumps(whole_body(draw, model)).encode())
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(raw) + 1)
        edit = draw.randrange(4)
        if edit == 0:
            raw[at:at] = draw.randbytes(draw.randrange(1, 8))
        elif edit == 1:
            del raw[at : at + draw.randrange(1, 8)]
        elif edit == 2:
            raw[at:at] = raw[: draw.randrange(len(raw) + 1)]
        else:
            raw[at : at + 1] = draw.randbytes(1)
    return _posted(draw, "bytes", bytes(raw))


def _noise(draw: random.Random, model: str) -> Fuzzed:
    return _posted(draw, "noise", draw.randbytes(draw.randrange(80)))


def _deep(draw: random.Random, model: str) -> Fuzzed:
    """Nesting, and numbers as long as a line."""
    depth = draw.choice((10, 500, 2000, 100_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    deep = opening * depth + draw.choice(("1", "9" * 4000, '"x"', "")) + closing * depth
    field = draw.choice(FIELDS)
    return _posted(draw, "deep", f'{{"model": "{model}", "{field}": {deep}}}'.encode())


def _headers(draw: random.Random, model: str) -> Fuzzed:
    body = json.dumps(whole_body(draw, model)).encode()
    named = {draw.choice(HEADERS): header_value(draw) for _ in range(draw.randrange(1, 5))}
    method = draw.choice(METHODS) if draw.random() < 0.3 else "POST"
    path = draw.choice(PATHS + OTHER_PATHS) if draw.random() < 0.3 else draw.choice(PATHS)
    # whether an answer has a body, or the connection stays, depends on these
    plain = method in ("GET", "POST") and not {"expect", "upgrade", "connection"} & set(named)
    return Fuzzed("headers", request(method, path, body, named), plain)


def header_value(draw: random.Random) -> bytes:
    if draw.random() < 0.7:
        return draw.choice(HEADER_WORDS).encode()
    raw = draw.randbytes(draw.randrange(30))
    return bytes(byte for byte in raw if byte >= 32 and byte != 127)


def _framing(draw: random.Random, model: str) -> Fuzzed:
    """Lengths and chunks that are not what they say."""
    body = json.dumps(whole_body(draw, model)).encode()
    lie = draw.choice((b"-1", b"0", b"x", b"1e3", b"99999999999999999999", b"5", b"+9", b"9, 8"))
    chunked = {"transfer-encoding": draw.choice((b"chunked", b"gzip, chunked", b"x", b"identity"))}
    head = request("POST", draw.choice(PATHS), b"", {"content-length": lie}, length=False)
    if draw.random() < 0.5:
        head = request("POST", draw.choice(PATHS), b"", chunked, length=False)
        size = draw.choice((b"%x" % len(body), b"-1", b"zz", b"ffffffffffffffff", b""))
        body = size + b"\r\n" + body + draw.choice((b"\r\n0\r\n\r\n", b"\r\n", b""))
    return Fuzzed("framing", head + body, False)


def _not_http(draw: random.Random, model: str) -> Fuzzed:
    good = request("POST", PATHS[0], json.dumps(whole_body(draw, model)).encode(), {})
    raw = bytearray(good)
    for _ in range(draw.randrange(1, 6)):
        raw[draw.randrange(60)] = draw.randrange(256)
    kind = draw.randrange(4)
    if kind == 0:
        return Fuzzed("not_http", draw.randbytes(draw.randrange(1, 200)), False)
    if kind == 1:
        return Fuzzed("not_http", good[: draw.randrange(len(good))], False)
    return Fuzzed("not_http", bytes(raw), False)


def _posted(draw: random.Random, kind: str, body: bytes) -> Fuzzed:
    return Fuzzed(kind, request("POST", draw.choice(PATHS), body, {}), True)


def request(
    method: str, path: str, body: bytes, headers: dict[str, bytes], *, length: bool = True
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: router"]
    lines += [name.encode() + b": " + text for name, text in headers.items()]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_KINDS: tuple[Callable[[random.Random, str], Fuzzed], ...] = (
    _object, _object, _object, _bytes, _bytes, _noise, _deep, _headers, _framing, _not_http,
)  # fmt: skip
