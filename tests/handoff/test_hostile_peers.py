"""Peers that break the rules: one handoff fails, by cause, and nothing else."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from handoff.ends import (
    KEY,
    SMALL,
    WAIT_S,
    Clock,
    Ends,
    Once,
    Prefill,
    Sink,
    both_ends,
    kv,
    until,
)
from handoff.peers import (
    FakeSender,
    hear,
    hear_hello,
    proved_link,
    raw_link,
    say_hello,
    send_page,
)
from handoff.transports import SENDS, TRANSPORTS

from pdctl.errors import HandoffError, PeerLost, ProtocolViolation, TicketRejected
from pdctl.handoff import wire
from pdctl.handoff.handshake import proof
from pdctl.handoff.identity import tokens_digest
from pdctl.handoff.inbound import Inbound
from pdctl.handoff.link import Link
from pdctl.handoff.sender import MAX_UNPROVED, Outbound
from pdctl.handoff.serving import HANDSHAKE_S
from pdctl.handoff.transport.memory import CAPACITY_BYTES, MemoryTransport

TOKENS = 130
IDS = list(range(TOKENS))


@pytest.fixture(params=SENDS)
def transport(request):
    return request.param()


@pytest.fixture(params=TRANSPORTS)
def any_transport(request):
    """Also of senders whose memory is read: the control stream is the same."""
    return request.param()


def truncated(link, room):
    send_page(link, room, kv(TOKENS), 0)
    link.send(wire.End(pages=1, first_token=None), room)


def claimed_but_missing(link, room):
    send_page(link, room, kv(TOKENS), 0)
    send_page(link, room, kv(TOKENS), 1)
    link.send(wire.End(pages=3, first_token=None), room)


def half_a_page(link, room):
    for page in (0, 1):
        send_page(link, room, kv(TOKENS), page)
    send_page(link, room, kv(TOKENS), 2, layers=1)
    link.send(wire.End(pages=3, first_token=None), room)


def duplicate(link, room):
    send_page(link, room, kv(TOKENS), 0)
    send_page(link, room, kv(TOKENS), 0)


def duplicate_layer(link, room):
    send_page(link, room, kv(TOKENS), 0, first=0, layers=1)
    send_page(link, room, kv(TOKENS), 0, first=0, layers=1)


def reordered(link, room):
    send_page(link, room, kv(TOKENS), 1)


def reordered_layers(link, room):
    send_page(link, room, kv(TOKENS), 0, first=1, layers=1)


def overtaking(link, room):
    send_page(link, room, kv(TOKENS), 0, first=0, layers=1)
    send_page(link, room, kv(TOKENS), 1)


def excess(link, room):
    pages = kv(64 * 4)
    for page in range(4):
        send_page(link, room, pages, page)


def unasked_token(link, room):
    for page in range(3):
        send_page(link, room, kv(TOKENS), page)
    link.send(wire.End(pages=3, first_token=5), room)


def second_offer(link, room):
    link.send(wire.Offer(tokens=TOKENS, token_sha256=tokens_digest(IDS), pages=3), room)


def done_from_the_sender(link, room):
    link.send(wire.Done(), room)


def hello_from_the_sender(link, room):
    link.send(wire.Hello(decode="d0", ticket="v1.1.a"), room, fingerprint="aa")


def another_room(link, room):
    send_page(link, room + 1, kv(TOKENS), 0)


def damaged(link, room):
    piece = memoryview(kv(TOKENS)[0].tobytes())
    raw = bytearray(wire.piece_header(room, 0, 0, 2, piece) + piece)
    raw[100] ^= 1
    link.connection.send([memoryview(raw)])


def noise(link, room):
    link.connection.send([memoryview(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)])


@pytest.mark.parametrize(
    "breaks",
    [
        truncated,
        claimed_but_missing,
        half_a_page,
        duplicate,
        duplicate_layer,
        reordered,
        reordered_layers,
        overtaking,
        excess,
        unasked_token,
        second_offer,
        done_from_the_sender,
        hello_from_the_sender,
        another_room,
        damaged,
        noise,
    ],
    ids=lambda breaks: breaks.__name__,
)
def test_a_sender_that_breaks_the_order_commits_nothing(transport, breaks):
    """R28: truncated, duplicate, excess, reordered and damaged pages abort; the sender hears the
    cause."""
    with both_ends(transport) as ends:
        fake = FakeSender(transport)
        sink = Sink()
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        with fake.accept() as link:
            room = hear_hello(link)
            link.send(wire.Offer(tokens=TOKENS, token_sha256=tokens_digest(IDS), pages=3), room)
            assert isinstance(hear(link), wire.Grant)
            breaks(link, room)
            heard = hear(link)
            assert isinstance(heard, wire.Abort)
            assert heard.cause == "protocol"
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, ProtocolViolation)
        assert "commit" not in sink.calls
        fake.close()


@pytest.mark.parametrize(
    "message",
    [
        wire.Grant(tokens=TOKENS + 1, held_tokens=0, first_token=False),
        wire.Grant(tokens=TOKENS - 2, held_tokens=0, first_token=False),
        wire.Grant(tokens=TOKENS, held_tokens=TOKENS + 1, first_token=False),
        wire.Done(),
        wire.Offer(tokens=TOKENS, token_sha256=bytes(32), pages=1),
        wire.End(pages=0, first_token=None),
        wire.Challenge(nonce=bytes(32)),
        wire.Taken(pieces=1),
        wire.Placed(address=8, device=0, xxh3=7),
        wire.Spread(device=0, spots=(wire.Spot(0, 0, 1, 8),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_receiver_that_breaks_the_order_fails_alone(any_transport, message):
    """R28, R29: what a receiver may not say ends its handoff as a ProtocolViolation."""
    with both_ends(any_transport) as ends:
        leg = ends.leg()
        outbound = ends.admit(leg, IDS, Prefill())
        with proved_link(any_transport, ends.port) as link:
            say_hello(link, leg)
            assert isinstance(hear(link), wire.Offer)
            link.send(message, leg.room)
            heard = hear(link)
            assert isinstance(heard, wire.Abort)
            assert heard.cause == "protocol"
        assert outbound.settled.wait(WAIT_S)
        assert isinstance(outbound.error, ProtocolViolation)
        ends.run(70, sink := Sink())
        assert sink.committed


def test_a_second_hello_on_a_busy_connection_is_refused(any_transport):
    """A connection serves one handoff at a time."""
    with both_ends(any_transport) as ends:
        leg = ends.leg()
        outbound = ends.admit(leg, IDS, Prefill())
        with proved_link(any_transport, ends.port) as link:
            say_hello(link, leg)
            assert isinstance(hear(link), wire.Offer)
            say_hello(link, ends.leg())
            assert hear(link).cause == "protocol"
        assert outbound.settled.wait(WAIT_S)


def test_an_abort_without_a_reason_is_an_error_all_the_same(any_transport):
    """A cause that nobody knows is a HandoffError with the peer's words."""
    with both_ends(any_transport) as ends:
        leg = ends.leg()
        outbound = ends.admit(leg, IDS, Prefill())
        with proved_link(any_transport, ends.port) as link:
            say_hello(link, leg)
            assert isinstance(hear(link), wire.Offer)
            link.send(wire.Abort(cause="from the future", detail="no idea"), leg.room)
            assert outbound.settled.wait(WAIT_S)
        assert type(outbound.error) is HandoffError
        assert "no idea" in outbound.error.message


def test_a_stranger_without_the_key_is_refused(any_transport):
    """Each end proves the cluster's key over the other's nonce."""
    with both_ends(any_transport) as ends, raw_link(any_transport, ends.port) as link:
        asked = hear(link)
        forged = proof(b"x" * 32, b"receiver", asked.nonce, bytes(32))
        link.send(wire.Answer(nonce=bytes(32), proof=forged))
        with pytest.raises(PeerLost):
            link.read_header()


def test_a_proof_cannot_be_reflected(transport):
    """The sender's own proof is not a receiver's."""
    challenge = bytes(range(32))
    assert proof(KEY, b"sender", challenge, challenge) != proof(
        KEY, b"receiver", challenge, challenge
    )


def test_a_sender_without_the_key_gets_no_ticket(transport):
    """A receiver says Hello only to a sender that proved the key."""
    with both_ends(transport) as ends:
        fake = FakeSender(transport)
        sink = Sink()
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        connection = fake._listener.accept()
        link = Link(connection, SMALL, time.monotonic)
        link.send(wire.Challenge(nonce=bytes(32)))
        assert isinstance(hear(link), wire.Answer)
        link.send(wire.Proof(proof=bytes(32)))
        with pytest.raises(PeerLost):
            link.read_header()
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, TicketRejected)
        connection.unblock()
        connection.close()
        fake.close()


def test_random_bytes_to_the_port_leave_nothing(any_transport):
    """A port scanner costs a connection, not a thread."""
    chance = random.Random(1)
    with both_ends(any_transport) as ends:
        for _ in range(40):
            with raw_link(any_transport, ends.port) as link:
                hear(link)
                link.connection.send([memoryview(chance.randbytes(chance.randint(36, 400)))])
                with pytest.raises(PeerLost):
                    link.read_header()
        ends.run(70, sink := Sink())
        assert sink.committed


def test_mutated_frames_after_the_proof_leave_the_sender_working(any_transport):
    """A peer that knows the key and sends garbage ends its own connection only."""
    chance = random.Random(2)
    with both_ends(any_transport) as ends:
        for _ in range(60):
            leg = ends.leg()
            with proved_link(any_transport, ends.port) as link:
                hello = wire.Hello(decode="d0", ticket=leg.ticket)
                raw = bytearray(wire.frame(hello, leg.room, fingerprint="5d" * 32))
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
                link.connection.send([memoryview(raw)])
                link.connection.unblock()
        ends.run(70, sink := Sink())
        assert sink.committed


def test_slow_handshakes_are_bounded_in_time_and_number():
    """Slowloris: half-open connections are cut after 5 s, and only so many are held at all."""
    clock = Clock()
    with both_ends(clock=clock) as ends:
        address = ("127.0.0.1", ends.port)
        held = [socket.create_connection(address) for _ in range(MAX_UNPROVED)]
        for each in held:
            assert each.recv(1)
        with socket.create_connection(address) as surplus:
            surplus.settimeout(WAIT_S)
            assert surplus.recv(100) == b""
        clock.now += HANDSHAKE_S
        ends.sender.check()
        for each in held:
            each.settimeout(WAIT_S)
            while each.recv(1000):
                pass
            each.close()
        ended = [thread for thread in threading.enumerate() if "pdctl-send-127" in thread.name]
        for thread in ended:
            thread.join(WAIT_S)
        ends.run(70, sink := Sink())
        assert sink.committed


@contextmanager
def blocked_in_a_send() -> Iterator[tuple[Ends, Clock, Outbound]]:
    """A sender whose receiver granted much, and reads nothing of it: the link is full."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        leg = ends.leg()
        outbound = ends.admit(leg, list(range(20_000)), Prefill())
        ends.compute(outbound)
        with proved_link(transport, ends.port) as link:
            say_hello(link, leg)
            assert isinstance(hear(link), wire.Offer)
            grant = wire.Grant(tokens=20_000, held_tokens=0, first_token=False)
            link.send(grant, leg.room)
            full = transport.links[-1].down
            with transport.links[-1].changed:
                assert transport.links[-1].changed.wait_for(
                    lambda: full.unread >= CAPACITY_BYTES, WAIT_S
                )
            yield ends, clock, outbound
            assert outbound.settled.wait(WAIT_S)


def test_a_receiver_that_stops_reading_is_cut_and_frees_the_pages():
    """R7, U6: a sender blocked in a send to a frozen receiver gets away from it."""
    with blocked_in_a_send() as (ends, clock, outbound):
        clock.now += 5.0
        ends.sender.check()
        assert outbound.settled.wait(WAIT_S)
        assert isinstance(outbound.error, PeerLost)


def test_a_cancel_while_a_send_is_blocked_is_bounded():
    """R10, R23: the piece that is being sent gets a second, then the connection is cut."""
    with blocked_in_a_send() as (ends, clock, outbound):
        outbound.cancel()
        assert not outbound.settled.is_set()
        ends.sender.check()
        clock.now += 1.0
        ends.sender.check()


def heard(inbound: Inbound, clock: Clock) -> None:
    """Waits until the receiver knows of what was sent since the clock went on."""
    until(lambda: inbound._link.life.heard_at == clock.now)


def test_slow_but_progressing_succeeds():
    """R5: pages that trickle in, byte by byte and with no Renew between, land; each byte counts."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        fake = FakeSender(transport)
        sink = Sink()
        leg = ends.leg(sender=f"127.0.0.1:{fake.port}", timeout_s=20.0)
        inbound = ends.receiver.fetch(leg, IDS, sink)
        with fake.accept() as link:
            room = hear_hello(link)
            link.send(wire.Offer(tokens=TOKENS, token_sha256=tokens_digest(IDS), pages=3), room)
            assert isinstance(hear(link), wire.Grant)
            raw = bytearray()
            for page in range(3):
                piece = memoryview(kv(TOKENS)[page].tobytes())
                raw += wire.piece_header(room, page, 0, 2, piece) + piece
            step = len(raw) // 60
            for at in range(0, len(raw), step):
                link.connection.send([memoryview(raw)[at : at + step]])
                heard(inbound, clock)
                clock.now += 3.0
                ends.receiver.check()
                while not link.connection.quiet():
                    header = link.read_header()
                    assert header.kind is wire.Kind.RENEW
                    link.read_body(header)
            link.send(wire.End(pages=3, first_token=None), room)
            assert isinstance(hear(link), wire.Done)
        assert inbound.settled.wait(WAIT_S)
        assert sink.committed
        fake.close()


def test_a_peer_that_only_renews_runs_into_the_deadline():
    """R4, R6: life is not progress; the time is the leg's own, not the receiver's."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        fake = FakeSender(transport)
        sink = Sink()
        leg = ends.leg(sender=f"127.0.0.1:{fake.port}", timeout_s=20.0)
        inbound = ends.receiver.fetch(leg, IDS, sink)
        with fake.accept() as link:
            room = hear_hello(link)
            for _ in range(20):
                link.send(wire.Renew(tokens=0), room)
                with transport.links[0].changed:
                    assert transport.links[0].changed.wait_for(
                        lambda: transport.links[0].down.unread == 0, WAIT_S
                    )
                clock.now += 1.0
                ends.receiver.check()
            assert inbound.settled.wait(WAIT_S)
        assert sink.error.cause == "expired"
        fake.close()


def test_progress_that_is_only_computed_renews_the_receivers_deadline():
    """R5: a long prefill whose pages are not wanted yet keeps its receiver by saying how far it
    is."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        fake = FakeSender(transport)
        leg = ends.leg(sender=f"127.0.0.1:{fake.port}", timeout_s=20.0)
        renewed = []
        inbound = ends.receiver.fetch(leg, IDS, Sink())
        with fake.accept() as link:
            room = hear_hello(link)
            for step in range(30):
                link.send(wire.Renew(tokens=step + 1), room)
                heard(inbound, clock)
                clock.now += 2.0
                ends.receiver.check()
                renewed.append(inbound.settled.is_set())
        assert renewed == [False] * 30
        assert inbound.settled.wait(WAIT_S)
        fake.close()


def test_what_the_receiver_has_received_renews_the_senders_deadline():
    """R5: pages that left the sender long ago still arrive, out of its kernel, over a slow link:
    more received is progress; the same number again is not."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        leg = ends.leg(timeout_s=20.0)
        outbound = ends.admit(leg, IDS, Prefill())
        with proved_link(transport, ends.port) as link:
            say_hello(link, leg)
            assert isinstance(hear(link), wire.Offer)
            over = []
            for received in (*range(1, 31), *[30] * 8):
                seen = Once(outbound, "renewed")
                link.send(wire.Renew(tokens=received), leg.room)
                seen.wait()
                clock.now += 2.0
                ends.sender.check()
                over.append(outbound.over)
            assert over == [False] * 38
            clock.now += 2.0
            ends.sender.check()
            assert outbound.settled.wait(WAIT_S)
        assert outbound.error is not None
        assert outbound.error.cause == "expired"


def test_a_receiver_says_how_much_it_has_received():
    """R5: every byte of a page counts, also of one that is not complete."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        fake = FakeSender(transport)
        leg = ends.leg(sender=f"127.0.0.1:{fake.port}", timeout_s=20.0)
        inbound = ends.receiver.fetch(leg, IDS, Sink())
        with fake.accept() as link:
            room = hear_hello(link)
            link.send(wire.Offer(tokens=TOKENS, token_sha256=tokens_digest(IDS), pages=3), room)
            assert isinstance(hear(link), wire.Grant)
            piece = memoryview(kv(TOKENS)[0].tobytes())
            raw = wire.piece_header(room, 0, 0, 2, piece) + piece
            link.connection.send([memoryview(raw)[: wire.HEADER_BYTES + piece.nbytes // 2]])
            until(lambda: inbound._link.payload_bytes == piece.nbytes // 2)
            clock.now += 2.0
            ends.receiver.check()
            renewed = link.read_message(link.read_header())
            assert renewed == wire.Renew(tokens=32)
        assert inbound.settled.wait(WAIT_S)
        fake.close()
