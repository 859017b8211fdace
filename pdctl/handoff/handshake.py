"""Mutual proof of the cluster's key, once per connection: neither end sends the key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TypeVar

from pdctl.errors import ProtocolViolation, TicketRejected
from pdctl.handoff import wire
from pdctl.handoff.link import Link

DOMAIN = b"pdctl.proof.v1\n"

M = TypeVar("M", bound=wire.Message)


def proof(key: bytes, side: bytes, challenge: bytes, answer: bytes, card: bytes = b"") -> bytes:
    """HMAC-SHA256 over both nonces, and the sender's card; `side` keeps one end's proof from
    being the other's."""
    return hmac.new(key, DOMAIN + side + challenge + answer + card, hashlib.sha256).digest()


def challenge(link: Link, key: bytes, card: bytes = b"") -> None:
    """The listening end. Raises TicketRejected where the peer does not know the key.

    Args:
        card: how its memory is read: told to who knows the key, and to nobody else.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    link.send(wire.Challenge(nonce=nonce))
    answer = _expect(link, wire.Answer)
    expected = proof(key, b"receiver", nonce, answer.nonce)
    if not hmac.compare_digest(answer.proof, expected):
        raise TicketRejected(f"{link.connection.peer} does not know the cluster's key")
    link.send(wire.Proof(proof=proof(key, b"sender", nonce, answer.nonce, card), card=card))


def answer(link: Link, key: bytes) -> bytes:
    """The dialling end; the sender's card. Raises TicketRejected where the peer does not know
    the key."""
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    asked = _expect(link, wire.Challenge)
    asked_at = link.clock()
    link.send(wire.Answer(nonce=nonce, proof=proof(key, b"receiver", asked.nonce, nonce)))
    given = _expect(link, wire.Proof)
    link.round_trip_s = link.clock() - asked_at
    expected = proof(key, b"sender", asked.nonce, nonce, given.card)
    if not hmac.compare_digest(given.proof, expected):
        raise TicketRejected(
            f"{link.connection.peer} does not know the cluster's key",
            hint="something else listens there, or a sender of another `pdctl up`",
        )
    return given.card


def _expect(link: Link, body: type[M]) -> M:
    header = link.read_header()
    if wire.BODIES.get(header.kind) is not body:
        raise ProtocolViolation(f"the peer sent {header.kind.name} before it proved itself")
    message = link.read_message(header)
    assert isinstance(message, body)
    return message
