"""TLS on the data plane: who is let in, and that faults of the link stay what they are."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from handoff.ends import WAIT_S, Clock, Ends, Prefill, Sink, both_ends
from handoff.peers import FakeSender, raw_link
from handoff.secure import OTHER, OURS, encrypted

from pdctl.errors import PeerLost
from pdctl.handoff.lease import DEAD_S
from pdctl.handoff.serving import HANDSHAKE_S
from pdctl.handoff.transport.memory import CAPACITY_BYTES, MemoryLink, MemoryTransport
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.handoff.transport.tls import TlsConnection, make_context

TLS_ALERT = b"\x15"
IDS = [1, 2, 3]


@contextmanager
def working(ends: Ends) -> Iterator[None]:
    """After the block a handoff still goes through."""
    yield
    ends.run(70, sink := Sink())
    assert sink.committed


def heard_by(port: int, said: bytes) -> bytes:
    """Everything that a plain TCP client hears after saying that."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(said)
        try:
            return b"".join(iter(lambda: client.recv(4096), b""))
        except ConnectionResetError:
            return b""


def failed_fetch(ends: Ends, port: int) -> PeerLost:
    sink = Sink()
    inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{port}"), IDS, sink)
    assert inbound.settled.wait(WAIT_S)
    assert isinstance(sink.error, PeerLost)
    return sink.error


def test_a_receiver_of_another_cluster_is_refused() -> None:
    """It learns that its certificate is not wanted; the sender works on."""
    with (
        both_ends(encrypted()) as ends,
        working(ends),
        raw_link(encrypted(), ends.port) as ours,
        raw_link(encrypted(certificate=OTHER), ends.port) as theirs,
    ):
        assert ours.read_header().length
        with pytest.raises(PeerLost, match="certificate"):
            theirs.read_header()


def test_a_receiver_without_a_certificate_is_refused() -> None:
    """Trusting the sender is not enough: each end must show the certificate too."""
    with both_ends(encrypted()) as ends, working(ends):
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(cadata=OURS.certificate_pem)
        inner = TcpTransport().dial(("127.0.0.1", ends.port), WAIT_S)
        client = TlsConnection(inner, bare, server=False)
        with pytest.raises(PeerLost, match="certificate required"):
            client.recv_into(memoryview(bytearray(1)))
        client.close()


def test_a_sender_of_another_cluster_gets_no_ticket() -> None:
    """The receiver names what is wrong, and says nothing of the handoff."""
    with both_ends(encrypted()) as ends:
        fake = FakeSender(encrypted(certificate=OTHER))
        found: list[BaseException] = []

        def serve() -> None:
            with pytest.raises(PeerLost) as caught, fake.accept():
                pass
            found.append(caught.value)

        serving = threading.Thread(target=serve)
        serving.start()
        error = failed_fetch(ends, fake.port)
        serving.join(WAIT_S)
        assert found
        assert "its certificate is not the cluster's" in error.message
        assert "same `pdctl up`" in str(error.hint)
        fake.close()


def test_a_plain_sender_is_named_at_once() -> None:
    with both_ends(encrypted()) as ends, both_ends(TcpTransport()) as plain:
        error = failed_fetch(ends, plain.port)
        assert "wrong version number" in error.message
        assert "handoff.encrypt" in str(error.hint)


def test_a_plain_receiver_hears_nothing_in_the_clear() -> None:
    """Only an alert; then the connection is closed."""
    with both_ends(encrypted()) as ends, working(ends):
        heard = heard_by(ends.port, b"pdcH" + bytes(60))
        # closing with bytes unread may overtake the alert
        assert heard[:1] in (b"", TLS_ALERT)
        assert b"pdcH" not in heard


def test_random_bytes_leave_nothing() -> None:
    """Also where they begin like a handshake's record."""
    chance = random.Random(3)
    with both_ends(encrypted()) as ends, working(ends):
        for start in (b"", b"\x16\x03\x01\x00\xc8", b"\x16\x03\x03\x00\x10\x01"):
            for _ in range(10):
                heard_by(ends.port, start + chance.randbytes(300))


def test_silent_peers_are_cut_and_hold_up_nobody_meanwhile() -> None:
    """A handshake that never comes costs one connection for 5 s; others are served."""
    clock = Clock()
    with both_ends(encrypted(), clock=clock) as ends:
        address = ("127.0.0.1", ends.port)
        held = [socket.create_connection(address, timeout=WAIT_S) for _ in range(10)]
        ends.run(70, sink := Sink())
        assert sink.committed
        clock.now += HANDSHAKE_S
        ends.sender.check()
        for each in held:
            assert each.recv(1) == b""
            each.close()


@pytest.mark.parametrize("end", ["silence", "cancel", "close"])
def test_a_sender_that_never_greets_is_given_up(end: str) -> None:
    """Its silence counts as on any connection, and a cancel does not wait for it."""
    inner, clock = MemoryTransport(), Clock()
    listener = inner.listen(("127.0.0.1", 0))
    with both_ends(encrypted(inner), clock=clock) as ends:
        sink = Sink()
        leg = ends.leg(sender=f"127.0.0.1:{listener.port}")
        inbound = ends.receiver.fetch(leg, IDS, sink)
        connection = listener.accept()
        assert connection is not None
        assert connection.recv_into(memoryview(bytearray(1 << 16)))
        if end == "silence":
            clock.now += DEAD_S
            ends.receiver.check()
        elif end == "cancel":
            inbound.cancel()
        else:
            connection.unblock()
        assert inbound.settled.wait(WAIT_S)
        assert sink.error is not None
        assert sink.error.cause == ("cancelled" if end == "cancel" else "peer_lost")
        connection.close()
    listener.close()


@pytest.mark.parametrize("size", range(0, 9000, 450))
def test_the_stream_ends_after_any_number_of_bytes(size: int) -> None:
    """R28, U29: truncation is no end that TLS would have to vouch for: only Done is done."""

    def arm(link: MemoryLink) -> None:
        link.down.stop_after(size, link.cut)
        if size == 0:
            link.cut()

    with both_ends(encrypted(MemoryTransport(arm))) as ends:
        leg, sink = ends.leg(), Sink(spare=0, first_token=True)
        outbound = ends.admit(leg, list(range(65)), Prefill())
        ends.compute(outbound)
        inbound = ends.receiver.fetch(leg, list(range(65)), sink)
        assert inbound.settled.wait(WAIT_S)
        if not sink.committed:
            assert isinstance(sink.error, PeerLost)
            outbound.cancel()
        assert outbound.settled.wait(WAIT_S)


@pytest.mark.parametrize("at", [200, 2500, 3000])
def test_a_damaged_byte_ends_the_connection(at: int) -> None:
    """In the handshake or in a page: TLS notices before the checksum could."""
    inner = MemoryTransport()
    with both_ends(encrypted(inner)) as ends:
        leg, sink = ends.leg(), Sink()
        outbound = ends.admit(leg, list(range(300)), Prefill())
        ends.compute(outbound)
        spoiled = threading.Event()

        def spoil(link: MemoryLink) -> None:
            put, passed = link.down.put, 0

            def damaged(parts: list[memoryview], *, block: bool) -> int:
                nonlocal passed
                raw = bytearray(b"".join(parts))
                if passed <= at < passed + len(raw):
                    raw[at - passed] ^= 1
                    spoiled.set()
                sent = put([memoryview(raw)], block=block)
                passed += sent
                return sent

            link.down.put = damaged  # type: ignore[assignment,method-assign]

        inner._arm = spoil
        inbound = ends.receiver.fetch(leg, list(range(300)), sink)
        assert inbound.settled.wait(WAIT_S)
        assert spoiled.is_set()
        assert isinstance(sink.error, PeerLost)
        assert not sink.committed
        outbound.cancel()
        assert outbound.settled.wait(WAIT_S)


@pytest.fixture
def connected() -> Iterator[tuple[TlsConnection, TlsConnection, MemoryLink]]:
    """A client, a server, both after the handshake, and the link between them."""
    inner = MemoryTransport()
    listener = inner.listen(("127.0.0.1", 0))
    client = encrypted(inner).dial(("127.0.0.1", listener.port), WAIT_S)
    accepted = listener.accept()
    assert accepted is not None
    server = TlsConnection(accepted, make_context(OURS, server=True), server=True)
    greeting = threading.Thread(target=server.send, args=([memoryview(b"hello")],))
    greeting.start()
    assert received(client, 5) == b"hello"
    greeting.join(WAIT_S)
    yield client, server, inner.links[0]
    for each in (client, server):
        each.unblock()
        each.close()
    listener.close()


def received(connection: TlsConnection, size: int) -> bytes:
    found = bytearray(size)
    got = 0
    while got < size:
        count = connection.recv_into(memoryview(found)[got:])
        assert count
        got += count
    return bytes(found)


def send_all(connection: TlsConnection, raw: bytes) -> None:
    left = memoryview(raw)
    while left:
        left = left[connection.send([left[:100_001], left[100_001:300_000]]) :]


def test_both_directions_at_once(connected) -> None:
    """One thread reads while another writes, on either end; each byte arrives once."""
    client, server, _ = connected
    chance = random.Random(4)
    up, down = chance.randbytes(5_000_000), chance.randbytes(5_000_000)
    writers = [
        threading.Thread(target=send_all, args=(client, up)),
        threading.Thread(target=send_all, args=(server, down)),
    ]
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(received(server, len(up))))
    for each in (*writers, reader):
        each.start()
    assert received(client, len(down)) == down
    for each in (*writers, reader):
        each.join(WAIT_S)
    assert got == [up]


def test_a_small_frame_that_can_not_leave_follows_before_the_next(connected, monkeypatch) -> None:
    """A full link: `send_now` returns False at once, and the stream stays whole."""
    client, server, _ = connected
    assert client.send_now(b"now ")
    with monkeypatch.context() as full:
        full.setattr(client._inner, "send_now", lambda frame: False)
        assert not client.send_now(b"later ")
        assert not client.send_now(b"never ")
    assert not client.send_now(b"never ")
    client.send([memoryview(b"last")])
    assert received(server, 14) == b"now later last"
    assert client.quiet()
    assert server.quiet()


def test_unblock_wakes_a_reader_and_a_writer(connected) -> None:
    """A reader sees the end of the stream, a writer PeerLost."""
    client, _, link = connected
    ended: list[object] = []

    def write() -> None:
        with pytest.raises(PeerLost):
            send_all(client, bytes(10 * CAPACITY_BYTES))
        ended.append("written")

    reader = threading.Thread(
        target=lambda: ended.append(client.recv_into(memoryview(bytearray(9))))
    )
    writer = threading.Thread(target=write)
    reader.start()
    writer.start()
    with link.changed:
        assert link.changed.wait_for(lambda: link.up.unread >= CAPACITY_BYTES, WAIT_S)
    client.unblock()
    reader.join(WAIT_S)
    writer.join(WAIT_S)
    assert sorted(map(str, ended)) == ["0", "written"]
