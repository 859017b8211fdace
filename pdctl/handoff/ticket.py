"""Tickets: the router's permission for one room between two replicas (DESIGN §6)."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from pdctl.errors import TicketRejected

DOMAIN = b"pdctl.ticket.v1\n"
MAX_CHARS = 128


def mint(key: bytes, room: int, prefill: str, decode: str, digest: str, expires_at_s: float) -> str:
    """A ticket for one room: "v1.EXPIRY_MS.HMAC".

    Args:
        key: the cluster's.
        digest: the contract's.
        expires_at_s: Unix seconds on this host's clock. Where the replicas' clocks may
            differ, add the largest skew that is to be borne.
    """
    expiry_ms = int(expires_at_s * 1000)
    return f"v1.{expiry_ms}.{_mac(key, room, prefill, decode, digest, expiry_ms)}"


def verify(
    key: bytes,
    ticket: str,
    *,
    room: int,
    prefill: str,
    decode: str,
    digest: str,
    now_s: float,
) -> float:
    """Its expiry, Unix seconds.

    Raises:
        TicketRejected: malformed, minted with another key or for something else, or expired
            at `now_s` (Unix seconds).
    """
    version, _, rest = ticket.partition(".")
    expiry_text, _, mac = rest.partition(".")
    plain = expiry_text.isascii() and expiry_text.isdigit() and mac.isascii()
    if len(ticket) > MAX_CHARS or version != "v1" or not plain:
        raise TicketRejected(f"room {room}: the ticket is malformed")
    expiry_ms = int(expiry_text)
    if not hmac.compare_digest(mac, _mac(key, room, prefill, decode, digest, expiry_ms)):
        raise TicketRejected(
            f"room {room}: the ticket was not minted for {prefill} > {decode}",
            hint="both replicas must be of one `pdctl up`",
        )
    if expiry_ms <= now_s * 1000:
        raise TicketRejected(
            f"room {room}: the ticket has expired", hint="compare the clocks of the hosts"
        )
    return expiry_ms / 1000


def _mac(key: bytes, room: int, prefill: str, decode: str, digest: str, expiry_ms: int) -> str:
    body = msgspec.json.encode((room, prefill, decode, digest, expiry_ms))
    return hmac.new(key, DOMAIN + body, hashlib.sha256).hexdigest()
