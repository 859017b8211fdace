"""What is told to whom when a room is over, and that the engine's thread waits for none of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from handoff.ends import WAIT_S, Clock, Ends, Once, Prefill, Sink, both_ends, kv, place
from handoff.peers import FakeSender, hear, hear_hello, proved_link, say_hello, send_page

from pdctl.errors import HandoffError, HandoffExpired, PeerLost, ProtocolViolation
from pdctl.handoff import wire
from pdctl.handoff.identity import tokens_digest
from pdctl.handoff.link import Link
from pdctl.handoff.prompt import Over
from pdctl.handoff.sender import Outbound
from pdctl.handoff.serving import Serving
from pdctl.handoff.transport.memory import MemoryTransport
from pdctl.handoff.transport.tcp import TcpTransport

IDS = list(range(70))
LEG_S = 20.0


def live_on(ends: Ends, transport: MemoryTransport, clock: Clock, seconds: float) -> None:
    """Time passes and both ends stay alive: each Renew is read before the next second."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        ends.sender.check()
        ends.receiver.check()
        assert transport.links[-1].drained(WAIT_S)


def test_a_long_decode_outlives_its_handoffs_deadline() -> None:
    """R1: after Done nothing of the room is under way, so that no deadline, renewal or silence
    ends what decode makes of it, however long that takes."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        leg, sink, prefill = ends.leg(timeout_s=LEG_S), Sink(), Prefill()
        inbound = ends.receiver.fetch(leg, IDS, sink)
        outbound = ends.admit(leg, IDS, prefill)
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        assert (ends.sender.check(), ends.receiver.check()) == (False, False)
        for _ in range(100):
            clock.now += LEG_S / 10
            ends.sender.check()
            ends.receiver.check()
        assert sink.committed
        assert (outbound.error, inbound.error, ends.failed) == (None, None, [])
        for board in (ends.sent, ends.got):
            assert board.read().handoffs_completed == 1
        ends.run(70, again := Sink())
        assert again.committed


def test_a_receiver_whose_prompt_never_comes_hears_expired() -> None:
    """R9: the Hello that waits for it ends with the sender's "expired", and a prompt that comes
    after that hears the same."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock, timeout_s=10.0) as ends:
        claimed = Once(ends.sender._rooms, "claim")
        leg, sink = ends.leg(timeout_s=60.0), Sink()
        inbound = ends.receiver.fetch(leg, IDS, sink)
        claimed.wait()
        left = Once(ends.sender._rooms, "leave")
        live_on(ends, transport, clock, 9)
        assert not inbound.settled.is_set()
        clock.now += 1.0
        ends.sender.check()
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, HandoffExpired)
        assert "no prompt came within 10 s" in sink.error.message
        left.wait()
        with pytest.raises(HandoffExpired):
            ends.admit(leg, IDS, Prefill())


@pytest.mark.parametrize("begun", [False, True], ids=["queued", "computed"])
def test_a_receiver_that_comes_after_the_deadline_hears_expired(begun: bool) -> None:
    """R9: of a room that its sender dropped; the bytes are back before it comes."""
    transport, clock = MemoryTransport(), Clock()
    with both_ends(transport, clock=clock) as ends:
        leg, sink = ends.leg(timeout_s=LEG_S), Sink()
        outbound = ends.admit(leg, IDS, Prefill())
        if begun:
            ends.compute(outbound)
        clock.now += LEG_S
        ends.sender.check()
        assert outbound.settled.wait(WAIT_S)
        assert ends.sent.read().buffer_bytes_used == 0
        inbound = ends.receiver.fetch(leg, IDS, sink)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, HandoffExpired)
        assert sink.calls == ["abort"]


def test_the_engines_thread_never_waits_for_a_frozen_receiver() -> None:
    """R11: the writer is stuck in a send; every call that the engine makes returns meanwhile."""
    transport, tokens = MemoryTransport(), 20_000
    with both_ends(transport) as ends:
        leg = ends.leg()
        outbound = ends.admit(leg, list(range(tokens)), Prefill())
        place(outbound, kv(tokens), tokens - 1, tokens)
        with proved_link(transport, ends.port) as link:
            say_hello(link, leg)
            assert isinstance(hear(link), wire.Offer)
            link.send(wire.Grant(tokens=tokens, held_tokens=0, first_token=True), leg.room)
            full = transport.links[-1].down
            with transport.links[-1].changed:
                assert transport.links[-1].changed.wait_for(lambda: full.unread >= 1 << 18, WAIT_S)

            def engine() -> None:
                assert outbound.begin_last()
                outbound.pages()
                outbound.written(tokens)
                outbound.finish(7)
                outbound.cancel()

            thread = threading.Thread(target=engine)
            thread.start()
            thread.join(WAIT_S)
            assert not thread.is_alive()
            # the send is still stuck: the pages may not go before it is over
            assert not outbound.settled.is_set()
        assert outbound.settled.wait(WAIT_S)


def test_a_release_that_raises_forgets_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """R36: the prompt whose bytes could not be given back has ended all the same, is told so
    once, and the others that ended with it are too."""
    with both_ends() as ends:
        prefills = [Prefill() for _ in range(3)]
        outbounds = [ends.admit(ends.leg(), IDS, prefill) for prefill in prefills]
        claim = outbounds[1].claim
        assert claim is not None
        release = claim.release

        def fails() -> None:
            release()
            raise RuntimeError("the allocator is gone")

        claim.release = fails  # type: ignore[method-assign]
        for outbound in outbounds:
            outbound.fail(HandoffError("out of memory"))
        for outbound in outbounds:
            assert outbound.settled.wait(WAIT_S)
        ends.sender.close()
        assert [prefill.settled_calls for prefill in prefills] == [1, 1, 1]
        assert ends.sent.read().handoffs_failed == 3
        assert ends.sender._rooms.open() == []
        assert "callback failed" in caplog.text


def test_failures_are_reported_with_no_lock_held() -> None:
    """R69: whoever tells the agent of a failure may wait for it; both ends can be used by
    other threads meanwhile."""
    with both_ends() as ends:
        reports: list[tuple[str, bool]] = []

        def reporting(end: str) -> Callable[[int, str, str], None]:
            def on_failed(room: int, cause: str, detail: str) -> None:
                thread = threading.Thread(target=use, args=(ends,))
                thread.start()
                thread.join(WAIT_S)
                reports.append((end, not thread.is_alive()))

            return on_failed

        ends.sender._on_failed = reporting("p0")
        ends.receiver._on_failed = reporting("d0")
        leg, sink = ends.leg(), Sink()
        sink.raises["offered"] = MemoryError("no blocks left")
        inbound = ends.receiver.fetch(leg, IDS, sink)
        outbound = ends.admit(leg, IDS, Prefill())
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        assert sorted(reports) == [("d0", True), ("p0", True)]


def use(ends: Ends) -> None:
    """What another request's threads do: open a room, end it, look at all of them."""
    done = threading.Event()
    other: Outbound = ends.sender.admit(
        ends.leg(), IDS, on_reserved=lambda outbound: done.set(), on_settled=lambda outbound: None
    )
    assert done.wait(WAIT_S)
    ends.sender.check()
    ends.receiver.check()
    other.cancel()


def serve(link: Link, room: int) -> None:
    """What a sender does for one room."""
    link.send(wire.Offer(tokens=70, token_sha256=tokens_digest(IDS), pages=2), room)
    assert isinstance(hear(link), wire.Grant)
    for page in (0, 1):
        send_page(link, room, kv(69), page)
    link.send(wire.End(pages=2, first_token=None), room)
    assert isinstance(hear(link), wire.Done)


@pytest.mark.parametrize("make", [MemoryTransport, TcpTransport], ids=["memory", "tcp"])
@pytest.mark.parametrize("told", [True, False], ids=["abort", "close"])
def test_a_cancel_that_crosses_done_hurts_no_other_room(
    make: Callable[[], MemoryTransport | TcpTransport], told: bool
) -> None:
    """U4, R38: the sender cancels a room while its Done is on the way, and ends the connection,
    on which the next room has said Hello by then: that one goes on, on a connection of its own."""
    transport = make()
    with both_ends(transport) as ends:
        fake = FakeSender(transport)
        sender = f"127.0.0.1:{fake.port}"
        one, two = Sink(), Sink()
        first = ends.receiver.fetch(ends.leg(sender=sender), IDS, one)
        with fake.accept() as link:
            serve(link, hear_hello(link))
            assert first.settled.wait(WAIT_S)
            second = ends.receiver.fetch(ends.leg(sender=sender), IDS, two)
            assert hear_hello(link) == second.room
            if told:
                link.send(wire.Abort(cause="cancelled", detail="too late"), first.room)
        with fake.accept() as link:
            assert hear_hello(link) == second.room
            serve(link, second.room)
        assert second.settled.wait(WAIT_S)
        assert (one.committed, two.committed) == (True, True)
        assert ends.got.read().handoffs_completed == 2
        fake.close()


@pytest.mark.parametrize("reused", [True, False])
def test_a_connection_is_made_anew_once(reused: bool) -> None:
    """A new one that ends is the sender's end; it is not tried for ever."""
    transport = MemoryTransport()
    with both_ends(transport) as ends:
        fake = FakeSender(transport)
        sender = f"127.0.0.1:{fake.port}"
        if reused:
            before = ends.receiver.fetch(ends.leg(sender=sender), IDS, Sink())
            with fake.accept() as link:
                serve(link, hear_hello(link))
                assert before.settled.wait(WAIT_S)
                inbound = ends.receiver.fetch(ends.leg(sender=sender), IDS, sink := Sink())
                hear_hello(link)
        else:
            inbound = ends.receiver.fetch(ends.leg(sender=sender), IDS, sink := Sink())
        with fake.accept() as link:
            assert hear_hello(link) == inbound.room
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, PeerLost)
        assert len(transport.links) == 1 + reused
        fake.close()


def test_a_new_connection_may_not_speak_of_another_room() -> None:
    """Only one that served a room before has an excuse."""
    transport = MemoryTransport()
    with both_ends(transport) as ends:
        fake = FakeSender(transport)
        inbound = ends.receiver.fetch(
            ends.leg(sender=f"127.0.0.1:{fake.port}"), IDS, sink := Sink()
        )
        with fake.accept() as link:
            hear_hello(link)
            link.send(wire.Abort(cause="cancelled", detail="who?"), inbound.room + 1)
            assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, ProtocolViolation)
        fake.close()


def until_lost(link: Link) -> Iterator[wire.Message]:
    with suppress(PeerLost):
        while True:
            yield hear(link)


@pytest.mark.parametrize("make", [MemoryTransport, TcpTransport], ids=["memory", "tcp"])
def test_no_hello_is_heard_on_a_connection_that_is_given_up(
    make: Callable[[], MemoryTransport | TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """U4, R38: the sender has cancelled; Done and the next room's Hello were on the way. That room
    is not claimed there, so that its receiver is served where it comes again."""
    transport, told, finish = make(), threading.Event(), Serving._finish

    def late(serving: Serving, outbound: Outbound, step: Over) -> None:
        assert told.wait(WAIT_S)
        finish(serving, outbound, step)

    monkeypatch.setattr(Serving, "_finish", late)
    with both_ends(transport) as ends:
        one, two = ends.leg(), ends.leg()
        with proved_link(transport, ends.port) as link:
            outbound = ends.admit(one, IDS, Prefill())
            say_hello(link, one)
            assert isinstance(hear(link), wire.Offer)
            link.send(wire.Grant(tokens=69, held_tokens=0, first_token=False), one.room)
            ends.compute(outbound)
            for _ in range(2):
                link.read_piece(link.read_header())
            assert isinstance(hear(link), wire.End)
            outbound.cancel()
            link.send(wire.Done(), one.room)
            say_hello(link, two)
            assert all(isinstance(message, wire.Abort) for message in until_lost(link))
        prefill = Prefill()
        ends.admit(two, IDS, prefill)
        with proved_link(transport, ends.port) as link:
            say_hello(link, two)
            assert isinstance(hear(link), wire.Offer)
            told.set()
