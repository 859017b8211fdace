"""Pieces that the receiver reads out of the sender's memory: order, checks, and whose memory it
is at every moment."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from handoff.ends import (
    DIGEST,
    KEY,
    SMALL,
    WAIT_S,
    Ends,
    Once,
    Prefill,
    Sink,
    both_ends,
    kv,
    place,
    until,
)
from handoff.peers import hear, proved_link, raw_link
from handoff.reaches import MemoryReach, Read
from xxhash import xxh3_64_intdigest

from pdctl.errors import HandoffCancelled, HandoffError, PeerLost, ProtocolViolation
from pdctl.handoff import pulls as pulls_module
from pdctl.handoff import wire
from pdctl.handoff.handshake import challenge
from pdctl.handoff.identity import tokens_digest
from pdctl.handoff.link import Link
from pdctl.handoff.pulls import DEPTH
from pdctl.handoff.slots import SLOTS, host_slots
from pdctl.handoff.transport.interface import Listener
from pdctl.handoff.transport.reach import address_of
from pdctl.handoff.transport.tcp import TcpTransport

TOKENS = 130
IDS = list(range(TOKENS))


class PlacingSender:
    """Listens like a sender whose memory is read; a test says what it places."""

    def __init__(self, transport: Read) -> None:
        self.reach = MemoryReach(transport.shared)
        self.pages = kv(TOKENS)
        self.reach.expose(self.pages.reshape(-1).view(np.uint8))
        self._listener: Listener = transport.listen(("127.0.0.1", 0))
        self.port = self._listener.port

    def serve(self) -> tuple[Link, int]:
        """A greeted receiver that has granted everything, and its room."""
        connection = self._listener.accept()
        assert connection is not None
        self.link = Link(connection, SMALL, time.monotonic)
        challenge(self.link, KEY, self.reach.card())
        header = self.link.read_header()
        hello = wire.hello_rest(wire.read_hello(header, self.link.read_body(header))[1])
        assert hello.reads
        offer = wire.Offer(tokens=TOKENS, token_sha256=tokens_digest(IDS), pages=3)
        self.link.send(offer, header.room)
        assert isinstance(hear(self.link), wire.Grant)
        return self.link, header.room

    def placed(self, page: int, **changes: int | None) -> wire.Placed:
        piece = self.pages[page].reshape(-1).view(np.uint8).data
        fields = {"address": address_of(piece), "device": 0, "xxh3": xxh3_64_intdigest(piece)}
        return wire.Placed(**{**fields, **changes})

    def say(
        self, room: int, placed: wire.Placed, page: int, first: int = 0, layers: int = 2
    ) -> None:
        self.link._send([memoryview(wire.placed_frame(room, page, first, layers, placed))])

    def close(self) -> None:
        self.link.connection.unblock()
        self.link.connection.close()
        self._listener.close()
        while self._listener.accept() is not None:
            pass
        self.reach.close()


def duplicate(fake, link, room):
    fake.say(room, fake.placed(0), 0)
    fake.say(room, fake.placed(0), 0)


def reordered(fake, link, room):
    fake.say(room, fake.placed(1), 1)


def excess(fake, link, room):
    for page in (0, 1, 2):
        fake.say(room, fake.placed(page), page)
    fake.say(room, fake.placed(2), 3)


def no_such_layer(fake, link, room):
    fake.say(room, fake.placed(0), 0, first=1, layers=2)


def truncated(fake, link, room):
    fake.say(room, fake.placed(0), 0)
    link.send(wire.End(pages=3, first_token=None), room)


def another_address(fake, link, room):
    fake.say(room, fake.placed(0, address=fake.placed(1).address), 0)


def a_strangers_address(fake, link, room):
    fake.say(room, fake.placed(0, address=8), 0)


def past_the_end(fake, link, room):
    fake.say(room, fake.placed(2, address=fake.placed(2).address + 4096), 0)


def unhashed(fake, link, room):
    fake.say(room, fake.placed(0, xxh3=None), 0)


def pages_all_the_same(fake, link, room):
    link.send_piece(room, 0, 0, fake.pages[0].reshape(-1).view(np.uint8).data)


def pages_and_placed(fake, link, room):
    fake.say(room, fake.placed(0), 0)
    link.send_piece(room, 1, 0, fake.pages[1].reshape(-1).view(np.uint8).data)


@pytest.mark.parametrize(
    "breaks",
    [
        duplicate,
        reordered,
        excess,
        no_such_layer,
        truncated,
        another_address,
        a_strangers_address,
        past_the_end,
        unhashed,
        pages_all_the_same,
        pages_and_placed,
    ],
    ids=lambda breaks: breaks.__name__,
)
def test_a_sender_that_places_what_cannot_be_commits_nothing(breaks):
    """R28: duplicate, reordered, excess, missing, unhashed or unreadable pieces; the next handoff
    of the same receiver is whole."""
    transport = Read()
    with both_ends(transport) as ends:
        fake = PlacingSender(transport)
        sink = Sink(spare=0)
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        link, room = fake.serve()
        breaks(fake, link, room)
        assert inbound.settled.wait(WAIT_S)
        fake.close()
        assert isinstance(inbound.error, ProtocolViolation | PeerLost)
        assert sink.calls[-1] == "abort"
        assert "commit" not in sink.calls
        assert ends.receiver._slots.free == SLOTS
        assert ends.run(TOKENS, Sink())[1].error is None


def test_an_end_before_every_piece_was_read_commits_nothing():
    """R28: what was not read by then may be another prompt's."""
    transport = Read()
    transport.shared.proceed.clear()
    with both_ends(transport) as ends:
        fake, sink = PlacingSender(transport), Sink(spare=0)
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        link, room = fake.serve()
        for page in (0, 1, 2):
            fake.say(room, fake.placed(page), page)
        assert transport.shared.begun.wait(WAIT_S)
        link.send(wire.End(pages=3, first_token=None), room)
        until(lambda: inbound.error is not None)
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        fake.close()
        assert not sink.committed
        assert sink.error is not None


@pytest.mark.parametrize("pieces", [0, 4, 1 << 31])
def test_a_receiver_that_takes_what_was_not_placed_fails_alone(pieces):
    """The sender believes no count that can't be."""
    transport = Read()
    with both_ends(transport) as ends:
        leg, prefill = ends.leg(), Prefill()
        outbound = ends.admit(leg, IDS, prefill)
        ends.compute(outbound)
        with proved_link(transport, ends.port) as link:
            hello = wire.Hello(decode="d0", ticket=leg.ticket, reads=True)
            link.send(hello, leg.room, fingerprint=DIGEST)
            assert isinstance(hear(link), wire.Offer)
            grant = wire.Grant(tokens=TOKENS, held_tokens=0, first_token=False)
            link.send(grant, leg.room)
            for _ in range(3):
                assert isinstance(hear(link), wire.Placed)
            link.send(wire.Taken(pieces=pieces), leg.room)
            assert outbound.settled.wait(WAIT_S)
        assert isinstance(outbound.error, ProtocolViolation)
        assert ends.run(TOKENS, Sink())[0].done


def test_a_receiver_that_is_sent_pages_has_taken_none():
    """It did not ask to read: a Taken from it ends its handoff."""
    with both_ends(TcpTransport()) as ends:
        leg = ends.leg()
        outbound = ends.admit(leg, IDS, Prefill())
        ends.compute(outbound)
        with proved_link(TcpTransport(), ends.port) as link:
            link.send(wire.Hello(decode="d0", ticket=leg.ticket), leg.room, fingerprint=DIGEST)
            assert isinstance(hear(link), wire.Offer)
            link.send(wire.Grant(tokens=TOKENS, held_tokens=0, first_token=True), leg.room)
            assert link.read_header().kind is wire.Kind.PAGES
            link.send(wire.Taken(pieces=1), leg.room)
            assert outbound.settled.wait(WAIT_S)
        assert isinstance(outbound.error, ProtocolViolation)


def test_the_end_comes_after_the_last_piece_was_taken():
    """R28: pages stay the prompt's until the receiver has read them."""
    transport = Read()
    with both_ends(transport) as ends:
        leg, prefill = ends.leg(), Prefill()
        outbound = ends.admit(leg, IDS, prefill)
        ends.compute(outbound)
        with proved_link(transport, ends.port) as link:
            hello = wire.Hello(decode="d0", ticket=leg.ticket, reads=True)
            link.send(hello, leg.room, fingerprint=DIGEST)
            assert isinstance(hear(link), wire.Offer)
            link.send(wire.Grant(tokens=TOKENS, held_tokens=0, first_token=False), leg.room)
            placed = [hear(link) for _ in range(3)]
            assert [type(each) for each in placed] == [wire.Placed] * 3
            link.send(wire.Taken(pieces=2), leg.room)
            assert outbound._decide() is None
            link.send(wire.Taken(pieces=3), leg.room)
            assert hear(link) == wire.End(pages=3, first_token=None)
            link.send(wire.Done(), leg.room)
            assert outbound.settled.wait(WAIT_S)
            assert outbound.done


def test_a_sender_that_only_sends_refuses_a_receiver_that_reads():
    """Named on both ends: neither falls back without a word."""
    with both_ends(TcpTransport()) as ends:
        leg = ends.leg()
        ends.admit(leg, IDS, Prefill())
        with proved_link(TcpTransport(), ends.port) as link:
            hello = wire.Hello(decode="d0", ticket=leg.ticket, reads=True)
            link.send(hello, leg.room, fingerprint=DIGEST)
            message = hear(link)
        assert isinstance(message, wire.Abort)
        assert "can't be read" in message.detail


def test_a_receiver_that_reads_names_a_sender_without_a_card():
    """The error names the replica and what it lacks."""
    with both_ends(TcpTransport()) as sending:
        reading = Ends(Read())
        try:
            sink = Sink()
            leg = sending.leg()
            inbound = reading.receiver.fetch(leg, IDS, sink)
            assert inbound.settled.wait(WAIT_S)
            assert isinstance(inbound.error, HandoffError)
            assert "p0 has no memory" in str(inbound.error)
        finally:
            reading.close()


def test_a_receiver_may_read_from_one_and_be_sent_to_by_another():
    """The plan says which, pair by pair; a sender with a card still sends to who asks for that."""
    transport = Read()
    with both_ends(transport) as ends:
        ends.receiver._reads = lambda prefill: False
        sink = Sink()
        ends.run(TOKENS, sink)
        assert sink.committed
        assert not transport.shared.pulls
        ends.receiver._reads = lambda prefill: True
        ends.receiver._idle.close()
        ends.receiver._idle._closed = False
        ends.run(TOKENS, Sink())
        assert transport.shared.pulls


def free_slots(ends: Ends) -> int:
    ends.receiver._slots.look_again()
    return ends.receiver._slots.free


def stalled(ends: Ends, transport: Read) -> tuple:
    """A handoff with reads under way."""
    transport.shared.proceed.clear()
    transport.shared.begun.clear()
    sink, prefill, leg = Sink(spare=0), Prefill(), ends.leg()
    outbound = ends.admit(leg, IDS, prefill)
    place(outbound, kv(TOKENS), TOKENS, 1000)
    inbound = ends.receiver.fetch(leg, IDS, sink)
    assert transport.shared.begun.wait(WAIT_S)
    return sink, outbound, inbound


@pytest.mark.parametrize("twice", [False, True])
def test_a_cancel_waits_for_reads_under_way(twice):
    """R10: no slot is another handoff's before the bytes that were asked for have come."""
    transport = Read()
    with both_ends(transport) as ends:
        sink, outbound, inbound = stalled(ends, transport)
        drained = threading.Event()
        drain = pulls_module.Pulls.drain

        def draining(pulls: pulls_module.Pulls) -> None:
            drained.set()
            drain(pulls)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pulls_module.Pulls, "drain", draining)
            for _ in range(1 + twice):
                inbound.cancel()
            assert drained.wait(WAIT_S)
        assert not inbound.settled.is_set()
        assert ends.receiver._slots.free < SLOTS
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        assert ends.receiver._slots.free == SLOTS
        assert all(pull.released for pull in transport.shared.pulls)
        assert "write" not in sink.calls
        assert ends.run(TOKENS, Sink())[1].error is None


def test_a_read_that_outlasts_the_drain_keeps_its_slot(monkeypatch):
    """R10: the end is told in time, the slot comes back only when nothing can arrive in it."""
    monkeypatch.setattr(pulls_module, "DRAIN_S", 0.05)
    transport = Read()
    with both_ends(transport) as ends:
        _, outbound, inbound = stalled(ends, transport)
        inbound.cancel()
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        under_way = len(transport.shared.pulls)
        ends.receiver.check()
        assert 0 < under_way == SLOTS - ends.receiver._slots.free
        transport.shared.proceed.set()
        until(lambda: free_slots(ends) == SLOTS)
        assert ends.run(TOKENS, Sink())[1].error is None


def test_a_read_that_fails_ends_its_handoff_as_lost():
    """The error names NIXL's peer; both ends settle and go on."""
    transport = Read()
    with both_ends(transport) as ends:
        sink, outbound, inbound = stalled(ends, transport)
        transport.shared.fails = True
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        assert isinstance(inbound.error, PeerLost)
        assert sink.calls[-1] == "abort"
        assert ends.receiver._slots.free == SLOTS
        transport.shared.fails = False
        assert ends.run(TOKENS, Sink())[1].error is None


def test_the_senders_cancel_is_told_though_its_memory_is_anothers_already():
    """A piece that is not what was placed is no corruption where an Abort is on the way."""
    transport = Read()
    with both_ends(transport) as ends:
        sink, outbound, inbound = stalled(ends, transport)
        pages = outbound.pages()
        outbound.cancel()
        assert outbound.settled.wait(WAIT_S)
        pages[:] = 0
        del pages
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        assert inbound.error.cause == "cancelled"
        assert not sink.committed
        assert ends.failed == []


def test_one_cancel_leaves_other_rooms_reads_alone():
    """R19: with two handoffs under way, the other's pages are bit by bit its own."""
    transport = Read()
    with both_ends(transport) as ends:
        _, outbound, inbound = stalled(ends, transport)
        other_leg, other_sink, other_prefill = ends.leg(), Sink(), Prefill()
        other = ends.receiver.fetch(other_leg, IDS, other_sink)
        other_out = ends.admit(other_leg, IDS, other_prefill)
        ends.compute(other_out)
        inbound.cancel()
        transport.shared.proceed.set()
        for each in (inbound, outbound, other, other_out):
            assert each.settled.wait(WAIT_S)
        assert other.error is None
        np.testing.assert_array_equal(other_sink.pages[:2], kv(TOKENS)[:2])


def test_slots_bound_what_is_read_at_a_time():
    """64 slots, 8 reads of one handoff: 40 handoffs at once wait for each other and all land."""
    transport = Read()
    with both_ends(transport) as ends:
        sinks = [Sink() for _ in range(40)]
        started = []
        for sink in sinks:
            leg, prefill = ends.leg(), Prefill()
            ids = list(range(1000))
            started.append(ends.receiver.fetch(leg, ids, sink))
            ends.compute(ends.admit(leg, ids, prefill))
        for inbound in started:
            assert inbound.settled.wait(WAIT_S)
            assert inbound.error is None
        assert ends.receiver._slots.free == SLOTS
        for sink in sinks:
            np.testing.assert_array_equal(sink.pages[:15], kv(1000)[:15])


def test_a_handoff_has_no_more_reads_under_way_than_it_may():
    """The rest wait their turn, in order."""
    transport = Read()
    with both_ends(transport) as ends:
        transport.shared.proceed.clear()
        leg, sink, ids = ends.leg(), Sink(), list(range(64 * 30))
        inbound = ends.receiver.fetch(leg, ids, sink)
        outbound = ends.admit(leg, ids, Prefill())
        ends.compute(outbound)
        assert transport.shared.begun.wait(WAIT_S)
        waited = Once(ends.receiver._slots, "look_again")
        ends.receiver.check()
        waited.wait()
        assert len(transport.shared.pulls) <= DEPTH
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        assert sink.committed


def test_cancels_at_random_points_leave_every_slot_free():
    """R10, U17: 200 handoffs, half of them cancelled on either end at some moment; what commits is
    bit by bit right."""
    transport, chance = Read(), random.Random(3)
    with both_ends(transport, budget_bytes=40 * SMALL.page_bytes) as ends:
        for _ in range(200):
            leg, sink = ends.leg(), Sink()
            ids = list(range(chance.randint(2, 400)))
            inbound = ends.receiver.fetch(leg, ids, sink)
            outbound = ends.admit(leg, ids, Prefill())
            victim = chance.choice((inbound, outbound, None, None))
            timer = threading.Timer(chance.random() * 2e-3, victim.cancel if victim else int)
            timer.start()
            with suppress(HandoffCancelled):
                ends.compute(outbound, chunk=chance.randint(1, 200))
            timer.join()
            assert inbound.settled.wait(WAIT_S)
            if inbound.error is not None:
                # it may have gone before it said Hello: then nobody comes for the prompt
                outbound.cancel()
            assert outbound.settled.wait(WAIT_S)
            if inbound.error is None:
                np.testing.assert_array_equal(sink.pages[:-1], kv(len(ids))[: len(sink.pages) - 1])
            else:
                assert inbound.error.cause == "cancelled", inbound.error
        assert ends.receiver._slots.free == SLOTS


def test_the_card_is_shown_to_who_knows_the_key_only():
    """A stranger is told nothing of the sender's memory, and a changed card is noticed."""
    transport = Read()
    with both_ends(transport) as ends, raw_link(transport, ends.port) as link:
        challenge_frame = link.read_message(link.read_header())
        assert isinstance(challenge_frame, wire.Challenge)
        link.send(wire.Answer(nonce=bytes(32), proof=bytes(32)))
        with pytest.raises(PeerLost):
            link.read_header()


def test_a_restarted_sender_is_met_again():
    """U14: its next card is another; the receiver takes pages from it at once."""
    transport = Read()
    with both_ends(transport) as ends:
        ends.run(TOKENS, Sink())
        first = list(ends.receiver._reach.met)
        ends.receiver._idle.close()
        ends.receiver._idle._closed = False
        again = Ends(transport)
        try:
            leg, sink = again.leg(), Sink()
            inbound = ends.receiver.fetch(leg, IDS, sink)
            again.compute(again.admit(leg, IDS, Prefill()))
            assert inbound.settled.wait(WAIT_S)
            assert sink.committed
            assert ends.receiver._reach.met[-1] != first[-1]
        finally:
            again.close()


def test_slots_are_one_block_exposed_once():
    """Registered once per process, whatever comes."""
    transport = Read()
    reach = MemoryReach(transport.shared)
    slots = host_slots(reach, SMALL)
    ((_, size),) = transport.shared.exposed[reach.card()]
    assert size == SLOTS * slots.size
    assert slots.free == SLOTS
