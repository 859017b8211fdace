"""How data-plane sockets are set up."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator

import pytest
from handoff.ends import WAIT_S
from handoff.secure import OURS

from pdctl.errors import UsageError
from pdctl.handoff.transport.choice import chosen_transport
from pdctl.handoff.transport.sockets import (
    PACING_ENV,
    SO_MAX_PACING_RATE,
    SocketOptions,
    congestion_of,
    is_near,
    options_of,
)
from pdctl.handoff.transport.tcp import TcpListener, TcpTransport
from pdctl.handoff.transport.tls import TlsTransport

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's socket options")


@pytest.fixture
def one() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("192.168.1.20", True),
        ("10.0.0.9", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("::ffff:192.168.1.20", True),
        ("::ffff:8.8.8.8", False),
        ("8.8.8.8", False),
        ("100.100.1.2", False),
        ("2001:4860:4860::8888", False),
        ("0.0.0.0", False),
        ("::", False),
        ("memory", False),
    ],
)
def test_private_networks_are_near(host: str, near: bool) -> None:
    """A carrier's shared range, which overlay networks use, may be far."""
    assert is_near(host) is near


@linux
def test_a_sender_on_a_near_address_has_an_unpaced_congestion_control() -> None:
    """From a connection's first packet: what it accepts inherits it."""
    transport = TcpTransport()
    listener = transport.listen(("127.0.0.1", 0))
    dialled = transport.dial(("127.0.0.1", listener.port), WAIT_S)
    accepted = listener.accept()
    assert accepted is not None
    assert congestion_of(accepted._socket) in ("cubic", "reno")
    for each in (dialled, accepted):
        each.close()
    close(listener)


@linux
def test_a_sender_on_every_address_keeps_the_systems_congestion_control(
    one: socket.socket,
) -> None:
    one.bind(("0.0.0.0", 0))
    present = congestion_of(one)
    SocketOptions().listening(one)
    assert congestion_of(one) == present


@linux
def test_a_congestion_control_that_the_kernel_lacks_changes_nothing(
    one: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """What is there stays, and the log says why, for those who debug."""
    one.bind(("127.0.0.1", 0))
    present = congestion_of(one)
    with caplog.at_level("DEBUG", "pdctl.handoff"):
        SocketOptions(near_congestion=("nonesuch",)).listening(one)
    assert congestion_of(one) == present
    assert "nonesuch is not allowed" in caplog.text


@linux
def test_pacing_is_set_on_every_connection() -> None:
    """By the dialling and by the accepting end."""
    transport = TcpTransport(options_of({PACING_ENV: "12500000"}))
    listener = transport.listen(("127.0.0.1", 0))
    dialled = transport.dial(("127.0.0.1", listener.port), WAIT_S)
    accepted = listener.accept()
    assert accepted is not None
    for each in (dialled, accepted):
        rate = each._socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
        assert int.from_bytes(rate, sys.byteorder) == 12_500_000
        each.close()
    close(listener)


@pytest.mark.parametrize("text", ["fast", "-1", "0", "1e6", "1.5", str(1 << 63), "٣"])
def test_a_pacing_that_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=PACING_ENV):
        options_of({PACING_ENV: text})


def test_pacing_elsewhere_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ignored: a bench would measure something else than it says."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="only Linux"):
        options_of({PACING_ENV: "1000"})


def test_a_certificate_and_a_rate_choose_the_transport() -> None:
    assert isinstance(chosen_transport(None, {}), TcpTransport)
    assert isinstance(chosen_transport(OURS, {}), TlsTransport)
    with pytest.raises(UsageError):
        chosen_transport(OURS, {PACING_ENV: "fast"})


def test_a_peer_that_is_gone_when_accepted_holds_up_nobody() -> None:
    """A port scanner's reset is not an error of the listener."""
    transport = TcpTransport()
    listener = transport.listen(("127.0.0.1", 0))
    with socket.create_connection(("127.0.0.1", listener.port)) as scanner:
        scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    dialled = transport.dial(("127.0.0.1", listener.port), WAIT_S)
    own = dialled._socket.getsockname()[1]
    accepted = listener.accept()
    while accepted is not None and accepted.peer != f"127.0.0.1:{own}":
        accepted.close()
        accepted = listener.accept()
    assert accepted is not None
    for each in (dialled, accepted):
        each.close()
    close(listener)


def close(listener: TcpListener) -> None:
    listener.close()
    assert listener.accept() is None
