"""A cancel, a failure or a lost link at every stall point of either end: nothing stays.

`both_ends` asserts afterwards that no thread, descriptor, byte of the budget or active handoff is
left; each test also does one more handoff on the same two ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from handoff.ends import (
    SMALL,
    WAIT_S,
    Clock,
    Ends,
    Once,
    Prefill,
    Sink,
    both_ends,
    kv,
    place,
)
from handoff.transports import TRANSPORTS

from pdctl.errors import HandoffCancelled, HandoffError, HandoffExpired, PeerLost
from pdctl.handoff.receiver import Inbound
from pdctl.handoff.sender import Outbound
from pdctl.handoff.transport.memory import MemoryConnection, MemoryTransport

TOKENS = 200


class Stalled:
    """A handoff that stands still at one point, and how to let its engine go on."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.leg = ends.leg()
        self.sink = Sink(spare=0, first_token=True)
        self.prefill = Prefill()
        self.outbound: Outbound | None = None
        self.inbound: Inbound | None = None
        self.others: list[Outbound] = []

    def admit(self) -> Outbound:
        self.outbound = self.ends.admit(self.leg, list(range(TOKENS)), self.prefill)
        return self.outbound

    def fetch(self) -> None:
        self.inbound = self.ends.receiver.fetch(self.leg, list(range(TOKENS)), self.sink)

    def fill_budget(self) -> None:
        other = self.ends.admit(self.ends.leg(), list(range(3 * TOKENS)), Prefill())
        self.others.append(other)

    def settle(self) -> None:
        """Everything ends, and the engines were told once."""
        self.sink.proceed.set()
        for each in (self.outbound, self.inbound):
            if each is not None:
                assert each.settled.wait(WAIT_S)
        for other in self.others:
            other.cancel()
            assert other.settled.wait(WAIT_S)
        if self.outbound is not None:
            assert self.prefill.told_once()
        if self.inbound is not None:
            assert self.sink.calls.count("commit") + self.sink.calls.count("abort") == 1


def awaited(at: Stalled) -> None:
    claimed = Once(at.ends.sender._rooms, "claim")
    at.fetch()
    claimed.wait()


def queued(at: Stalled) -> None:
    at.fill_budget()
    at.admit()
    assert not at.prefill.reserved.is_set()


def queued_with_receiver(at: Stalled) -> None:
    queued(at)
    claimed = Once(at.ends.sender._rooms, "claim")
    at.fetch()
    claimed.wait()


def reserved(at: Stalled) -> None:
    at.admit()


def computed_without_receiver(at: Stalled) -> None:
    at.ends.compute(at.admit())


def allocating(at: Stalled) -> None:
    at.sink.hold("offered")
    at.admit()
    at.fetch()
    assert at.sink.inside.wait(WAIT_S)


def granted(at: Stalled) -> None:
    granted = Once(at.admit(), "granted")
    at.fetch()
    granted.wait()


def between_pages(at: Stalled) -> None:
    place(at.admit(), kv(TOKENS), 130, 130)
    at.fetch()
    assert at.sink.returned["write"].wait(WAIT_S)


def placing_a_page(at: Stalled) -> None:
    at.sink.hold("write")
    place(at.admit(), kv(TOKENS), 130, 130)
    at.fetch()
    assert at.sink.inside.wait(WAIT_S)


def before_the_first_token(at: Stalled) -> None:
    place(at.admit(), kv(TOKENS), TOKENS, 130)
    at.fetch()
    assert at.sink.returned["write"].wait(WAIT_S)


def committing(at: Stalled) -> None:
    at.sink.hold("commit")
    at.ends.compute(at.admit())
    at.fetch()
    assert at.sink.inside.wait(WAIT_S)


STALLS: list[Callable[[Stalled], None]] = [
    awaited,
    queued,
    queued_with_receiver,
    reserved,
    computed_without_receiver,
    allocating,
    granted,
    between_pages,
    placing_a_page,
    before_the_first_token,
    committing,
]
WITH_RECEIVER = [stall for stall in STALLS if "fetch" in stall.__code__.co_names] + [
    queued_with_receiver
]
WITH_RECEIVER = list(dict.fromkeys(WITH_RECEIVER))
WITH_PROMPT = [stall for stall in STALLS if stall is not awaited]


@pytest.fixture(params=TRANSPORTS)
def stalled(request):
    with both_ends(request.param(), budget_bytes=12 * SMALL.page_bytes) as ends:
        yield Stalled(ends)
        if not ends.sender._closing.is_set() and not ends.receiver._closed:
            sink = Sink()
            ends.run(70, sink)
            assert sink.committed


def settle_and_restart(at: Stalled) -> None:
    """As `settle`, with the sender's pulse left running for the next handoff."""
    at.sink.proceed.set()
    for each in (at.outbound, at.inbound):
        if each is not None:
            assert each.settled.wait(WAIT_S)
    for other in at.others:
        other.cancel()
        assert other.settled.wait(WAIT_S)
    if at.inbound is not None:
        assert at.sink.calls.count("commit") + at.sink.calls.count("abort") == 1
    for board in (at.ends.sent, at.ends.got):
        assert board.read().handoffs_active == 0
    assert at.ends.sent.read().buffer_bytes_used == at.ends.sent.read().waiters == 0


@pytest.mark.parametrize("stall", WITH_RECEIVER, ids=lambda stall: stall.__name__)
def test_the_receiver_cancels(stalled, stall):
    """R10, R19, U1: cancel on the receiver, at every stall point, twice."""
    stall(stalled)
    stalled.inbound.cancel()
    stalled.inbound.cancel()
    if stall is awaited:
        assert stalled.inbound.settled.wait(WAIT_S)
    elif stall is not committing:
        assert stalled.outbound.settled.wait(WAIT_S)
        assert isinstance(stalled.outbound.error, HandoffCancelled)
    settle_and_restart(stalled)
    if stall is committing:
        assert stalled.inbound.error is None
        assert stalled.outbound.done
    else:
        assert isinstance(stalled.sink.error, HandoffCancelled)
        assert stalled.ends.got.read().handoffs_cancelled == 1


@pytest.mark.parametrize("stall", WITH_PROMPT, ids=lambda stall: stall.__name__)
def test_the_sender_cancels(stalled, stall):
    """R10, R16, U4, U5: cancel on the sender, at every stall point, twice."""
    stall(stalled)
    stalled.outbound.cancel()
    stalled.outbound.cancel()
    assert stalled.outbound.settled.wait(WAIT_S)
    assert isinstance(stalled.outbound.error, HandoffCancelled)
    settle_and_restart(stalled)
    if stalled.inbound is not None and stall is not committing:
        assert isinstance(stalled.sink.error, HandoffCancelled)
    assert stalled.ends.failed == []


@pytest.mark.parametrize("stall", WITH_PROMPT, ids=lambda stall: stall.__name__)
def test_the_prefill_fails(stalled, stall):
    """R15: fail() after cancel() and the reverse end it once, with the first error."""
    stall(stalled)
    stalled.outbound.fail(HandoffError("out of memory"))
    stalled.outbound.cancel()
    assert stalled.outbound.settled.wait(WAIT_S)
    settle_and_restart(stalled)
    assert stalled.outbound.error.message == "out of memory"
    if stalled.inbound is not None and stall is not committing:
        assert "out of memory" in stalled.sink.error.message


@pytest.mark.parametrize("stall", STALLS, ids=lambda stall: stall.__name__)
def test_the_sender_closes(stalled, stall):
    """R23: close() ends what is under way and is bounded; the receiver learns it."""
    stall(stalled)
    stalled.ends.sender.close()
    stalled.settle()
    if stalled.inbound is not None and stall is not committing:
        assert isinstance(stalled.sink.error, (HandoffCancelled, PeerLost))


@pytest.mark.parametrize("stall", WITH_RECEIVER, ids=lambda stall: stall.__name__)
def test_the_receiver_closes(stalled, stall):
    """R23: close() while the engine is inside a call waits for that call, and not for more."""
    stall(stalled)
    closing = threading.Thread(target=stalled.ends.receiver.close)
    closing.start()
    if stalled.outbound is not None and stall is not committing:
        assert stalled.outbound.settled.wait(WAIT_S)
    stalled.sink.proceed.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    settle_and_restart(stalled)


@pytest.mark.parametrize("stall", WITH_RECEIVER, ids=lambda stall: stall.__name__)
def test_the_link_is_cut(stall):
    """U29: an end of the stream is never success, on either end, at any point."""
    transport = MemoryTransport()
    with both_ends(transport, budget_bytes=12 * SMALL.page_bytes) as ends:
        at = Stalled(ends)
        stall(at)
        transport.links[0].cut()
        settle_and_restart(at)
        if at.outbound is not None:
            assert isinstance(at.outbound.error, PeerLost)
        if stall is not committing:
            assert isinstance(at.sink.error, PeerLost)
        sink = Sink()
        ends.run(70, sink)
        assert sink.committed


@pytest.mark.parametrize("stall", WITH_RECEIVER, ids=lambda stall: stall.__name__)
def test_the_link_freezes(stall):
    """R7: both ends notice within 5 s of silence and free everything."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock, budget_bytes=12 * SMALL.page_bytes) as ends:
        at = Stalled(ends)
        stall(at)
        if stall is not placing_a_page:
            assert transport.links[0].drained(WAIT_S)
        transport.links[0].freeze()
        for _ in range(5):
            clock.now += 1.0
            ends.sender.check()
            ends.receiver.check()
        settle_and_restart(at)
        if at.outbound is not None:
            assert isinstance(at.outbound.error, PeerLost)
        if stall is not committing:
            assert isinstance(at.sink.error, PeerLost)


@pytest.mark.parametrize("stall", STALLS, ids=lambda stall: stall.__name__)
def test_the_deadline_passes(stall):
    """R2, R6, R7: no stall outlives the request's deadline although both ends are alive."""
    clock = Clock()
    with both_ends(MemoryTransport(), clock=clock, budget_bytes=12 * SMALL.page_bytes) as ends:
        at = Stalled(ends)
        stall(at)
        for each in (at.outbound, at.inbound):
            if each is not None:
                deadline = each.deadline if each is at.inbound else each._deadline
                deadline.timeout_s = 3.0
        clock.now += 3.0
        ends.sender.check()
        ends.receiver.check()
        settle_and_restart(at)
        if at.outbound is not None:
            assert isinstance(at.outbound.error, HandoffExpired)
        if at.inbound is not None and stall is not committing:
            assert isinstance(at.sink.error, HandoffExpired)


@pytest.mark.parametrize("call", ["offered", "write"])
def test_abort_comes_after_the_call_that_is_under_way(call):
    """R10: the engine's slots are its own again only when no copy is running, also after a
    second cancel; the sender is free at once."""
    with both_ends() as ends:
        sink = Sink()
        sink.hold(call)
        leg = ends.leg()
        outbound = ends.admit(leg, [1, 2], Prefill())
        ends.compute(outbound)
        inbound = ends.receiver.fetch(leg, [1, 2], sink)
        assert sink.inside.wait(WAIT_S)
        inbound.cancel()
        assert outbound.settled.wait(WAIT_S)
        inbound.cancel()
        assert not sink.over.is_set()
        assert not inbound.settled.is_set()
        sink.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        assert sink.calls[-2:] == [call, "abort"]


def test_a_cancel_while_dialling_does_not_wait_for_the_dial():
    """R23: an unreachable host keeps nobody; the thread that dials ends by itself."""
    reached, answer = threading.Event(), threading.Event()

    class Slow(MemoryTransport):
        def dial(self, address: tuple[str, int], timeout_s: float) -> MemoryConnection:
            reached.set()
            assert answer.wait(WAIT_S)
            return super().dial(address, timeout_s)

    with both_ends(Slow()) as ends:
        sink = Sink()
        inbound = ends.receiver.fetch(ends.leg(), [1, 2], sink)
        assert reached.wait(WAIT_S)
        inbound.cancel()
        assert inbound.settled.wait(WAIT_S)
        assert sink.calls == ["abort"]
        answer.set()


def test_a_sender_that_nobody_listens_for_is_named():
    """Decode's error is often the first that tells of a dead prefill replica."""
    with both_ends(MemoryTransport()) as ends:
        leg = ends.leg()
        ends.sender.close()
        inbound = ends.receiver.fetch(leg, [1, 2], Sink())
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(inbound.error, PeerLost)
        assert inbound.error.message.startswith(f"{leg.prefill}: can't reach")


def test_one_cancel_leaves_other_handoffs_alone(stalled):
    """R19: of two handoffs between the same ends, the other one lands."""
    between_pages(stalled)
    leg, sink = stalled.ends.leg(), Sink()
    outbound = stalled.ends.admit(leg, list(range(130)), Prefill())
    inbound = stalled.ends.receiver.fetch(leg, list(range(130)), sink)
    stalled.inbound.cancel()
    assert stalled.outbound.settled.wait(WAIT_S)
    stalled.ends.compute(outbound)
    assert inbound.settled.wait(WAIT_S)
    assert outbound.settled.wait(WAIT_S)
    assert sink.committed
    settle_and_restart(stalled)


def test_a_receiver_that_gave_up_before_the_prompt_came(stalled):
    """R16, U2: the room is not opened by a prompt that comes after its receiver went."""
    claimed = Once(stalled.ends.sender._rooms, "claim")
    left = Once(stalled.ends.sender._rooms, "leave")
    stalled.fetch()
    claimed.wait()
    stalled.inbound.cancel()
    left.wait()
    with pytest.raises(HandoffCancelled):
        stalled.admit()
    assert stalled.ends.sent.read().handoffs_active == 0


@pytest.mark.parametrize("size", range(0, 5200, 130))
def test_the_stream_ends_after_any_number_of_bytes(size):
    """R28, U29: whatever arrived before the connection broke, nothing is committed."""

    def arm(link) -> None:
        link.down.stop_after(size, link.cut)
        if size == 0:
            link.cut()

    transport = MemoryTransport(arm)
    with both_ends(transport) as ends:
        leg, sink = ends.leg(), Sink(spare=0, first_token=True)
        outbound = ends.admit(leg, list(range(65)), Prefill())
        ends.compute(outbound)
        inbound = ends.receiver.fetch(leg, list(range(65)), sink)
        assert inbound.settled.wait(WAIT_S)
        if sink.committed:
            assert size > 2 * SMALL.page_bytes
        else:
            assert isinstance(sink.error, PeerLost)
            outbound.cancel()
        assert outbound.settled.wait(WAIT_S)
