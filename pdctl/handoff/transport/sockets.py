"""How a data-plane socket is set up: congestion control and pacing."""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
from collections.abc import Mapping

import msgspec

from pdctl.errors import UsageError

log = logging.getLogger("pdctl.handoff")

PACING_ENV = "PDCTL_PACING_BYTES_PER_S"
"""Of a replica's environment: bytes per second that each of its data-plane connections may
send, to emulate a slower link. For benches; Linux only."""
SO_MAX_PACING_RATE = 47
"""Linux's; Python has no name for it. Holds per socket, in any congestion control."""


class SocketOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is set on every socket of one transport."""

    near_congestion: tuple[str, ...] = ("cubic", "reno")
    """Where a sender listens on a near address (this host, a private network), the first of
    these that the kernel allows; empty: the system's. A system's default may be bbr, which paces
    by an estimate of the link: right for a long one, but on a near link it held a handoff to
    3.2 GB/s where cubic reached 5.7 (bench/results). On any other address the default stays.

    Set before a connection exists: one that began under bbr stays paced under cubic. The
    dialling end sends small frames only, under the system's."""
    pacing_bytes_per_s: int | None = None

    def listening(self, listening: socket.socket) -> None:
        """A bound socket, which gives it to every connection that it accepts."""
        if self.near_congestion and is_near(listening.getsockname()[0]):
            choose_congestion(listening, self.near_congestion)

    def connected(self, connected: socket.socket) -> None:
        """Raises OSError where the connection is gone already."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self.pacing_bytes_per_s is not None:
            rate = self.pacing_bytes_per_s.to_bytes(8, sys.byteorder)
            connected.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def is_near(host: str) -> bool:
    """Loopback, link-local or a private network; `host` is a numeric address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_private and not address.is_unspecified


def choose_congestion(one: socket.socket, wanted: tuple[str, ...]) -> None:
    """Keeps what is there where it is one of `wanted`, or where none of them is allowed."""
    if not sys.platform.startswith("linux"):
        return
    present = congestion_of(one)
    if present in wanted:
        return
    for name in wanted:
        try:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            log.debug("congestion control %s is not allowed here: %s", name, error)
        else:
            return


def congestion_of(one: socket.socket) -> str:
    """Linux only."""
    raw = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return raw.rstrip(bytes(1)).decode()


def options_of(environ: Mapping[str, str]) -> SocketOptions:
    """What a replica's environment asks for.

    Raises:
        UsageError: a rate that is none, or a platform that can't pace.
    """
    text = environ.get(PACING_ENV)
    if not text:
        return SocketOptions()
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 63):
        raise UsageError(
            f"{PACING_ENV} is {text!r}, not a number of bytes per second",
            hint=f"write a whole number, or leave {PACING_ENV} away",
        )
    if not sys.platform.startswith("linux"):
        raise UsageError(
            f"{PACING_ENV} is set, but only Linux can pace a socket",
            hint=f"leave {PACING_ENV} away on this host",
        )
    return SocketOptions(pacing_bytes_per_s=int(text))
