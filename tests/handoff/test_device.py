"""Pages and pieces in a device's memory: what is read, whose memory it is, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from handoff.devices import ArrayMemory, Arrays, DeviceSink, as_array
from handoff.ends import DIGEST, KEY, SMALL, WAIT_S, Ends, Prefill, both_ends, kv, place, until
from handoff.peers import hear, proved_link
from handoff.reaches import READS, Read
from handoff.test_pulls import IDS, TOKENS, PlacingSender

from pdctl.errors import HandoffError, PeerLost, ProtocolViolation
from pdctl.handoff import budgets, slots, wire
from pdctl.handoff import pulls as pulls_module
from pdctl.handoff.arena import device_arena
from pdctl.handoff.device import Run, host_pages
from pdctl.handoff.inbound import Inbound
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.slots import DEVICE_SLOTS
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.interface import Transport

BIG = PageGeometry(8, 2, 8)
"""Its page is two pieces, and a slot holds two pages."""


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "DEVICE_SLOT_BYTES", 2 * BIG.page_bytes)
    for module in (slots, budgets):
        monkeypatch.setattr(module, "DEVICE_PIECE_BYTES", BIG.page_bytes // 2)


@contextmanager
def on_device(transport: Transport, geometry: PageGeometry = SMALL) -> Iterator[Ends]:
    made = Arrays()
    with both_ends(transport, geometry=geometry, device=made, budget_bytes=4 << 20) as ends:
        yield ends
        until(lambda: free_slots(ends) == DEVICE_SLOTS)


def free_slots(ends: Ends) -> int:
    slots = ends.receiver._device_slots
    slots.look_again()
    return slots.free


def begin(ends: Ends, tokens: int, sink: DeviceSink) -> tuple[Outbound, Inbound]:
    leg, prefill = ends.leg(), Prefill()
    inbound = ends.receiver.fetch(leg, list(range(tokens)), sink)
    outbound = ends.admit(leg, list(range(tokens)), prefill)
    assert prefill.reserved.wait(WAIT_S)
    return outbound, inbound


def check_whole(ends: Ends, sink: DeviceSink, tokens: int, *, chunk: int = 1000) -> None:
    outbound, inbound = begin(ends, tokens, sink)
    ends.compute(outbound, chunk=chunk)
    assert inbound.settled.wait(WAIT_S)
    assert outbound.settled.wait(WAIT_S)
    assert inbound.error is None
    check_pages(sink, tokens)


def check_pages(sink: DeviceSink, tokens: int) -> None:
    geometry = sink._geometry
    wanted = kv(tokens, geometry)[: len(sink.pages)]
    granted = tokens - sink._spare
    wanted[-1, :, :, (granted - 1) % geometry.page_tokens + 1 :] = 0
    np.testing.assert_array_equal(sink.pages, wanted)


@pytest.mark.parametrize("make", READS)
@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("tokens", [2, 51, 64, 65, 129, 193, 1000])
def test_pages_go_from_memory_to_memory_bit_by_bit(make: type, spare: int, tokens: int) -> None:
    """R25, R30: at every length; what was not granted is zero, in memory that was full of ones."""
    with on_device(make()) as ends:
        check_whole(ends, DeviceSink(SMALL, spare=spare), tokens, chunk=50)


@pytest.mark.parametrize("make", READS)
def test_several_pieces_are_read_into_one_slot(make: type) -> None:
    """Where a page is more than one, too."""
    with on_device(make(), BIG) as ends:
        sink = DeviceSink(BIG)
        check_whole(ends, sink, 300)
        assert sum(sink.batches) == 10
        assert max(sink.batches) <= 4


def test_what_is_placed_by_then_is_asked_for_at_once() -> None:
    """A request costs the interpreter's time, whatever it moves."""
    transport = Read()
    with on_device(transport) as ends:
        transport.shared.proceed.clear()
        sink = DeviceSink(SMALL, spare=0)
        outbound, inbound = begin(ends, 64 * 30, sink)
        place(outbound, kv(64 * 30), 64 * 30, 10_000)
        outbound.finish(0)
        assert transport.shared.begun.wait(WAIT_S)
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        check_pages(sink, 64 * 30)
        asked = [int(pull.there[:, 1].sum()) for pull in transport.shared.pulls]
        assert sum(asked) == 30 * SMALL.page_bytes
        assert len(asked) < 30


def test_bytes_are_counted_as_the_gpus_and_none_as_the_hosts() -> None:
    """Both ends, whole pages."""
    with on_device(Read()) as ends:
        check_whole(ends, DeviceSink(SMALL), 193)
        for board, peer in ((ends.sent, "d0"), (ends.got, "p0")):
            counters = board.read()
            assert (counters.gpu_bytes, counters.host_bytes) == (3 * SMALL.page_bytes, 0)
            assert counters.pairs[peer].gpu_bytes == counters.gpu_bytes


def test_a_held_prefix_is_not_read_again() -> None:
    """The grant begins within a page: that page and those after it travel."""
    with on_device(Read()) as ends:
        sink = DeviceSink(SMALL, held_tokens=100)
        outbound, inbound = begin(ends, 200, sink)
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert not sink.pages[0].any()
        assert sum(sink.batches) == 3
        assert ends.got.read().reused_pages == 1


def test_a_slot_is_not_read_into_while_it_is_being_placed() -> None:
    """R10: with every slot under copies that are late, reads wait; the pages are whole."""
    with on_device(Read(), BIG) as ends:
        tokens = 64 * 5
        sinks = [DeviceSink(BIG, spare=0) for _ in range(4)]
        for sink in sinks:
            sink.land.clear()
        handed = []
        for sink in sinks:
            outbound, inbound = begin(ends, tokens, sink)
            ends.compute(outbound)
            handed.append((outbound, inbound))
            assert sink.begun.wait(WAIT_S)
            sink.land.set()
            assert inbound.settled.wait(WAIT_S)
        for sink, (outbound, inbound) in zip(sinks, handed, strict=True):
            assert outbound.settled.wait(WAIT_S)
            assert inbound.error is None
            check_pages(sink, tokens)


def test_late_copies_hold_every_slot_they_read() -> None:
    """R10: the number of free slots falls by what is being placed, and no further read begins."""
    transport = Read()
    with on_device(transport, BIG) as ends:
        sink = DeviceSink(BIG, spare=0)
        sink.land.clear()
        pages = 2 * DEVICE_SLOTS + 6
        outbound, inbound = begin_large(ends, pages * 64, sink)
        pulls = transport.shared.pulls
        until(lambda: free_slots(ends) == 0 and len(pulls) == DEVICE_SLOTS)
        sink.land.set()
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        check_pages(sink, pages * 64)


def begin_large(ends: Ends, tokens: int, sink: DeviceSink) -> tuple[Outbound, Inbound]:
    outbound, inbound = begin(ends, tokens, sink)
    place(outbound, kv(tokens, BIG), tokens, 10_000)
    outbound.finish(0)
    return outbound, inbound


def test_a_handoff_that_waits_for_its_sender_holds_no_slot() -> None:
    """Prefill computes its next chunk meanwhile: what has been placed is another handoff's."""
    with on_device(Read(), BIG) as ends:
        waiting = []
        for _ in range(DEVICE_SLOTS):
            sink = DeviceSink(BIG, spare=0)
            outbound, inbound = begin(ends, 64 * 5, sink)
            place(outbound, kv(64 * 5, BIG), 128, 1000)
            assert sink.begun.wait(WAIT_S)
            waiting.append((sink, outbound, inbound))
        check_whole(ends, DeviceSink(BIG), 64 * 20)
        for sink, outbound, inbound in waiting:
            ends.compute(outbound)
            assert inbound.settled.wait(WAIT_S)
            check_pages(sink, 64 * 5)


def test_a_cancel_returns_slots_once_their_copies_are_over() -> None:
    """R10: the handoff ends when the copies have, and the next is whole."""
    with on_device(Read()) as ends:
        sink = DeviceSink(SMALL, spare=0)
        sink.land.clear()
        outbound, inbound = begin(ends, TOKENS, sink)
        place(outbound, kv(TOKENS), 128, 1000)
        assert sink.begun.wait(WAIT_S)
        inbound.cancel()
        assert not inbound.settled.wait(0.05)
        assert free_slots(ends) < DEVICE_SLOTS
        sink.land.set()
        assert inbound.settled.wait(WAIT_S)
        assert inbound.error.cause == "cancelled"
        assert not sink.committed
        assert outbound.settled.wait(WAIT_S)
        check_whole(ends, DeviceSink(SMALL), TOKENS)


def test_a_copy_that_outlasts_the_drain_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: the end is told in time; the slot comes back only when nothing reads it."""
    monkeypatch.setattr(pulls_module, "DRAIN_S", 0.05)
    with on_device(Read()) as ends:
        sink = Stuck(SMALL, spare=0)
        sink.land.clear()
        outbound, inbound = begin(ends, TOKENS, sink)
        place(outbound, kv(TOKENS), 128, 1000)
        assert sink.begun.wait(WAIT_S)
        inbound.cancel()
        assert inbound.settled.wait(WAIT_S)
        ends.receiver.check()
        assert free_slots(ends) < DEVICE_SLOTS
        sink.land.set()
        until(lambda: free_slots(ends) == DEVICE_SLOTS)
        assert outbound.settled.wait(WAIT_S)


class Stuck(DeviceSink):
    """An engine whose `abort` does not wait."""

    def abort(self, error: HandoffError) -> None:
        self.error = error


def test_an_engine_that_raises_fails_its_handoff_alone() -> None:
    """R34: its slots are free, and the next handoff is whole."""
    with on_device(Read()) as ends:
        sink = DeviceSink(SMALL)
        sink.raises = RuntimeError("no kernel")
        outbound, inbound = begin(ends, TOKENS, sink)
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert "no kernel" in str(inbound.error)
        assert outbound.settled.wait(WAIT_S)
        check_whole(ends, DeviceSink(SMALL), TOKENS)


def test_pages_that_the_engine_still_fills_are_nobody_elses() -> None:
    """R10: a run that is held after its handoff's end is given to no other prompt."""
    arena = device_arena(ArrayMemory(8))
    run = arena.take(8)
    assert run is not None
    part = run.part(4, 2)
    assert (part.address, part.size) == (run.address + 4, 2)
    with pytest.raises(ValueError, match="3 bytes at 6"):
        run.part(6, 3)
    del run
    assert arena.take(1) is None
    del part
    assert arena.take(8) is not None


def test_the_budget_of_a_device_is_gauged() -> None:
    """`buffer_bytes_used` counts its pages as it does the host's."""
    with on_device(Read()) as ends:
        outbound, inbound = begin(ends, TOKENS, DeviceSink(SMALL))
        assert isinstance(outbound.pages(), Run)
        assert ends.sent.read().buffer_bytes_used == 3 * SMALL.page_bytes
        ends.compute(outbound)
        assert outbound.settled.wait(WAIT_S)
        assert inbound.settled.wait(WAIT_S)
        assert ends.sent.read().buffer_bytes_used == 0


def test_one_sender_keeps_pages_for_each_receiver_where_it_can_take_them() -> None:
    """Of two decode replicas one reads from the device, and the other is sent to over TCP."""
    with on_device(Read()) as ends:
        leg, prefill = ends.leg(), Prefill()
        assert isinstance(ends.admit(leg, IDS, prefill).pages(), Run)
        ends.sender.release(leg.room)
        other = ends.sender._budgets.place_for("d1")
        assert (other.reads, other.on_device) == (False, False)


@pytest.mark.parametrize(("decode", "reads"), [("d0", False), ("d1", True)])
def test_a_receiver_that_wants_pages_as_they_cannot_go_is_refused(decode: str, reads: bool) -> None:
    """By name: a device's pages are not sent, and the host's beside them not read."""
    with on_device(Read()) as ends:
        leg = ends.leg()
        ticket = mint(KEY, leg.room, "p0", decode, DIGEST, time.time() + 600)
        leg = msgspec.structs.replace(leg, decode=decode, ticket=ticket)
        ends.admit(leg, IDS, Prefill())
        with proved_link(ends.transport, ends.port) as link:
            hello = wire.Hello(decode=decode, ticket=leg.ticket, reads=reads)
            link.send(hello, leg.room, fingerprint=DIGEST)
            message = hear(link)
        assert isinstance(message, wire.Abort)
        assert f"the pages for {decode} can't be" in message.detail


def spread(fake: PlacingSender, room: int, *pages: int, **changes: int) -> None:
    spots = []
    for page in pages:
        fields = {"page": page, "first_layer": 0, "layers": 2}
        fields["address"] = fake.placed(min(page, 2)).address
        spots.append(wire.Spot(**{**fields, **changes}))
    fake.link.send_spread(room, 0, tuple(spots))


@pytest.mark.parametrize(
    ("pages", "changes"),
    [
        ((0, 0), {}),
        ((1,), {}),
        ((0, 1, 2, 3), {}),
        ((0,), {"first_layer": 1}),
        ((0,), {"layers": 3}),
        ((0,), {"layers": 0}),
        ((0,), {"pages": 0}),
        ((0,), {"pages": 4}),
        ((0, 1), {"pages": 2}),
        ((1,), {"pages": 2}),
        ((0,), {"pages": (1 << 32) - 1}),
        ((0,), {"address": 8}),
        ((0,), {"address": (1 << 64) - 1}),
    ],
)
def test_a_sender_that_spreads_what_cannot_be_commits_nothing(
    pages: tuple[int, ...], changes: dict[str, int]
) -> None:
    """R28: duplicate, reordered, excess, no such layers, unreadable; the next handoff is whole."""
    transport = Read()
    with on_device(transport) as ends:
        fake, sink = PlacingSender(transport), DeviceSink(SMALL, spare=0)
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        _, room = fake.serve()
        spread(fake, room, *pages, **changes)
        assert inbound.settled.wait(WAIT_S)
        fake.close()
        assert isinstance(inbound.error, ProtocolViolation | PeerLost)
        assert not sink.committed
        check_whole(ends, DeviceSink(SMALL), TOKENS)


def test_many_pages_are_told_of_in_one_frame() -> None:
    """All that can be read by then, as one where they have the same layers."""
    with on_device(Read()) as ends:
        leg, prefill = ends.leg(), Prefill()
        tokens = 64 * 300
        outbound = ends.admit(leg, list(range(tokens)), prefill)
        place(outbound, kv(tokens), tokens, tokens)
        with proved_link(ends.transport, ends.port) as link:
            hello = wire.Hello(decode="d0", ticket=leg.ticket, reads=True)
            link.send(hello, leg.room, fingerprint=DIGEST)
            assert isinstance(hear(link), wire.Offer)
            grant = wire.Grant(tokens=tokens, held_tokens=0, first_token=False)
            link.send(grant, leg.room)
            run = outbound.pages()
            assert isinstance(run, Run)
            spot = wire.Spot(0, 0, SMALL.layers, run.address, 300)
            assert hear(link) == wire.Spread(device=0, spots=(spot,))
            link.send(wire.Taken(pieces=300), leg.room)
            assert hear(link) == wire.End(pages=300, first_token=None)
            link.send(wire.Done(), leg.room)
            assert outbound.settled.wait(WAIT_S)


def test_a_single_piece_with_a_hash_is_none_of_a_devices() -> None:
    """The two kinds of memory are not mixed up by a sender's word."""
    transport = Read()
    with on_device(transport) as ends:
        fake, sink = PlacingSender(transport), DeviceSink(SMALL, spare=0)
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        _, room = fake.serve()
        fake.say(room, fake.placed(0), 0)
        assert inbound.settled.wait(WAIT_S)
        fake.close()
        assert isinstance(inbound.error, ProtocolViolation)
        assert not sink.committed


def test_an_end_before_the_last_piece_was_read_commits_nothing() -> None:
    """R28: without checksums it is the order of Taken and End that says whose pages they were."""
    transport = Read()
    transport.shared.proceed.clear()
    with on_device(transport) as ends:
        fake, sink = PlacingSender(transport), DeviceSink(SMALL, spare=0)
        inbound = ends.receiver.fetch(ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink)
        link, room = fake.serve()
        spread(fake, room, 0, 1, 2)
        assert transport.shared.begun.wait(WAIT_S)
        link.send(wire.End(pages=3, first_token=None), room)
        until(lambda: inbound.error is not None)
        transport.shared.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        fake.close()
        assert not sink.committed


def test_the_thread_that_reads_says_so_to_the_device() -> None:
    """A library that asks for the thread's device finds it."""
    transport = Read()
    made = Arrays()
    with both_ends(transport, device=made, budget_bytes=1 << 20) as ends:
        check_whole(ends, DeviceSink(SMALL), 65)
        assert made.made[-1].bound
        assert threading.get_ident() not in made.made[-1].bound


def test_an_engine_without_a_device_refuses_such_pages() -> None:
    """Named, where something was assigned that can't be."""
    run = Run(ArrayMemory(8), 0, 8)
    with pytest.raises(HandoffError, match="in a device's memory"):
        host_pages(run)
    array = np.zeros(4, np.uint16)
    assert host_pages(array) is array
    assert as_array(array, ()) is array
