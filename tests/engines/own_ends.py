"""Ends of a handoff of the caller's own, opposite a real replica: a receiver that keeps the
pages which a prefill replica sends, and a sender that gives a decode replica any pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from engines.replicas import KEY, WAIT_S, Process, leg_between

from pdctl.engines.interface import Leg
from pdctl.errors import HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.receiver import Receiver, Want
from pdctl.handoff.sender import Sender

OWN = "own"
"""The name of the caller's end."""


class Capture(NamedTuple):
    """A whole prompt's handoff."""

    pages: Patterns
    """`[pages, layers, 2, page_tokens, kv_heads, head_dim]`."""
    first_token: int


class CapturingSink:
    """A `PageSink` that wants every position and the first token."""

    def __init__(self, geometry: PageGeometry) -> None:
        self._geometry = geometry
        self.pages = geometry.empty(0)
        self.first_token: int | None = None

    def offered(self, tokens: int, deadline: float) -> Want:
        self.pages = self._geometry.empty(tokens)
        return Want(tokens=tokens, first_token=True)

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        self.pages[page, first_layer : first_layer + len(piece)] = piece

    def commit(self, first_token: int | None) -> None:
        self.first_token = first_token

    def abort(self, error: HandoffError) -> None:
        return


def captured(
    prefill: Process, path: str, body: dict[str, Any], token_ids: Sequence[int]
) -> Capture:
    """What `prefill` sends for that body, whose prompt it must cut into those tokens.

    Raises:
        HandoffError: the handoff failed; `tokens` where the prompts differ.
    """
    geometry = PageGeometry.of(prefill.contract)
    leg = leg_between(prefill.name, OWN, prefill.data_port, prefill.contract)
    sink = CapturingSink(geometry)
    connection = prefill.send(path, prefill.spec.prefill_body(body, leg))
    with closing(connection), closing(_receiver(prefill, geometry)) as receiver:
        inbound = receiver.fetch(leg, token_ids, sink)
        assert inbound.settled.wait(WAIT_S)
        if inbound.error is not None:
            raise inbound.error
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert json.loads(response.read())["usage"]["prompt_tokens"] == len(token_ids)
    assert sink.first_token is not None
    return Capture(sink.pages, sink.first_token)


def given(
    decode: Process, path: str, body: dict[str, Any], token_ids: Sequence[int], pages: Patterns
) -> Leg:
    """Hands `pages` over to `decode` as the KV of that body's prompt, which it must cut into
    those tokens; its answer must be a 200."""
    with closing(_sender(decode, pages.nbytes)) as sender:
        leg = leg_between(OWN, decode.name, sender.start(), decode.contract)
        outbound = sender.admit(
            leg, token_ids, on_reserved=lambda outbound: None, on_settled=lambda outbound: None
        )
        outbound.pages()[:] = pages
        outbound.written(len(token_ids))
        outbound.finish(0)
        status, answer = decode.post(path, decode.spec.decode_body(body, leg))
        assert status == 200, answer
        assert outbound.settled.wait(WAIT_S)
        assert outbound.done, outbound.error
    return leg


def _identity(replica: Process) -> Identity:
    return Identity(OWN, KEY, replica.contract.digest)


def _receiver(prefill: Process, geometry: PageGeometry) -> Receiver:
    return Receiver(
        _identity(prefill),
        geometry,
        timeout_s=WAIT_S,
        board=CounterBoard(),
        on_failed=lambda room, cause, detail: None,
    )


def _sender(decode: Process, budget_bytes: int) -> Sender:
    return Sender(
        _identity(decode),
        PageGeometry.of(decode.contract),
        listen=("127.0.0.1", 0),
        budget_bytes=budget_bytes,
        timeout_s=WAIT_S,
        board=CounterBoard(),
        on_failed=lambda room, cause, detail: None,
    )
