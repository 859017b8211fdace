"""Whole handoffs between two engines, threads and all."""

from __future__ import annotations

import threading

import numpy as np
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

from pdctl.errors import (
    BudgetExceeded,
    ContractRejected,
    HandoffCancelled,
    HandoffError,
    HandoffExpired,
    PeerLost,
    QueueFull,
    TicketRejected,
    TokensDiffer,
)
from pdctl.handoff.budget import MAX_WAITERS
from pdctl.handoff.idle import IDLE_S
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.transport.memory import MemoryTransport
from pdctl.handoff.transport.tcp import TcpTransport


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param()


def expected(tokens: int, positions: int, geometry: PageGeometry = SMALL) -> np.ndarray:
    """Pages of the first `positions` of that prompt."""
    pages = kv(tokens, geometry)[: geometry.pages_for(positions)].copy()
    if len(pages):
        used = positions - (len(pages) - 1) * geometry.page_tokens
        pages[-1, :, :, used:] = 0
    return pages


def check(ends: Ends, tokens: int, sink: Sink, chunk: int) -> None:
    outbound, inbound = ends.run(tokens, sink, chunk=chunk)
    assert outbound.error is None
    assert inbound.error is None
    assert outbound.done
    np.testing.assert_array_equal(sink.pages, expected(tokens, tokens - sink.spare, ends.geometry))
    assert sink.calls[-1] == "commit"
    assert sink.first_token == (7 if sink.wants_first_token else None)
    assert ends.sent.read().handoffs_active == ends.got.read().handoffs_active == 0
    assert ends.sent.read().buffer_bytes_used == 0


def test_every_length_lands_bit_by_bit(transport):
    """R25, R26, R30: 1 to 130 tokens, with and without the last one and the first token."""
    with both_ends(transport) as ends:
        for tokens in range(1, 131):
            check(ends, tokens, Sink(spare=1), chunk=50)
            check(ends, tokens, Sink(spare=0, first_token=True), chunk=64)
        got, sent = ends.got.read(), ends.sent.read()
        assert got.imported_tokens == sum(2 * tokens - 1 for tokens in range(1, 131))
        assert got.host_bytes == sent.host_bytes
        assert sent.handoffs_completed == got.handoffs_completed == 260


def test_a_very_long_prompt(transport):
    """U8: 193,700 tokens, 3,027 pages, in chunks that fit no page."""
    with both_ends(transport) as ends:
        check(ends, 193_700, Sink(spare=1), chunk=2500)
        check(ends, 193_700, Sink(spare=0, first_token=True), chunk=7001)


def test_pages_larger_than_a_piece_travel_by_layers():
    """A page is divided by layer; pieces land where their layers are."""
    geometry = PageGeometry(5, 8, 128)
    with both_ends(geometry=geometry) as ends:
        sink = Sink(geometry)
        check(ends, 200, sink, chunk=90)
        assert sink.calls.count("write") > geometry.pages_for(199)


@pytest.mark.parametrize("tokens", [2, 64, 65, 66, 129, 200])
def test_a_held_prefix_is_not_sent_again(transport, tokens):
    """R26, R45: only pages from the first one that is not whole are written."""
    with both_ends(transport) as ends:
        for spare in (0, 1):
            for held in {0, 1, 63, 64, 65, 128, tokens - spare} - set(range(tokens, 999)):
                if held > tokens - spare:
                    continue
                before = ends.got.read()
                sink = Sink(spare=spare, held_tokens=held)
                ends.run(tokens, sink)
                first = held // 64
                assert sink.committed
                np.testing.assert_array_equal(
                    sink.pages[first:], expected(tokens, tokens - spare)[first:]
                )
                assert not sink.pages[:first].any()
                after = ends.got.read()
                assert after.imported_tokens - before.imported_tokens == tokens - spare - held
                assert after.reused_pages - before.reused_pages == first


def test_connections_persist():
    """R38: fifty handoffs, one after the other, share one connection."""
    transport = MemoryTransport()
    with both_ends(transport) as ends:
        for _ in range(50):
            check(ends, 70, Sink(), chunk=70)
        assert len(transport.links) == 1


def test_idle_connections_are_closed():
    """U21: a connection that nobody uses is given up by the receiver first, and dialled anew."""
    clock, transport = Clock(), MemoryTransport()
    with both_ends(transport, clock=clock) as ends:
        check(ends, 70, Sink(), chunk=70)
        clock.now += IDLE_S
        ends.receiver.check()
        assert transport.links[0].up.ended
        check(ends, 70, Sink(), chunk=70)
        assert len(transport.links) == 2


def test_a_restarted_sender_is_found_again():
    """U14, R49, R62: a connection to a sender that is gone is not used for the next room."""
    with both_ends() as ends:
        check(ends, 70, Sink(), chunk=70)
        ends.sender.close()
        again = Ends(TcpTransport())
        leg, sink = again.leg(), Sink()
        inbound = ends.receiver.fetch(leg, [1, 2, 3], sink)
        outbound = again.admit(leg, [1, 2, 3], Prefill())
        again.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert inbound.error is None
        again.close()
        stale = Sink()
        inbound = ends.receiver.fetch(ends.leg(), [1, 2, 3], stale)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(stale.error, PeerLost)


def test_many_at_once(transport):
    """U3, U7, R41: 40 handoffs at a time through a budget for three; every one lands."""
    budget = 3 * SMALL.page_bytes * 2
    with both_ends(transport, budget_bytes=budget) as ends:
        sinks = [Sink() for _ in range(40)]
        engine: list[threading.Thread] = []

        def reserved(outbound) -> None:
            thread = threading.Thread(target=ends.compute, args=(outbound,))
            engine.append(thread)
            thread.start()

        legs = [ends.leg() for _ in sinks]
        pairs = zip(legs, sinks, strict=True)
        inbounds = [ends.receiver.fetch(leg, list(range(100)), sink) for leg, sink in pairs]
        outbounds = [
            ends.sender.admit(
                leg, list(range(100)), on_reserved=reserved, on_settled=lambda outbound: None
            )
            for leg in legs
        ]
        for each in [*outbounds, *inbounds]:
            assert each.settled.wait(WAIT_S)
            assert each.error is None
        for thread in engine:
            thread.join()
        for sink in sinks:
            np.testing.assert_array_equal(sink.pages, expected(100, 99))


def test_the_receiver_may_come_first(transport):
    """A Hello for a room that is not known yet waits for its prompt."""
    with both_ends(transport) as ends:
        claimed = Once(ends.sender._rooms, "claim")
        leg, sink = ends.leg(), Sink()
        inbound = ends.receiver.fetch(leg, list(range(70)), sink)
        claimed.wait()
        outbound = ends.admit(leg, list(range(70)), prefill := Prefill())
        assert prefill.reserved.is_set()
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert inbound.error is None


def test_pages_leave_while_the_prompt_is_still_computed(transport):
    """DESIGN §6: a page is placed by the receiver before later ones are computed."""
    with both_ends(transport) as ends:
        leg, sink, prefill = ends.leg(), Sink(), Prefill()
        inbound = ends.receiver.fetch(leg, list(range(200)), sink)
        outbound = ends.admit(leg, list(range(200)), prefill)
        place(outbound, kv(200), 64, 64)
        assert sink.returned["write"].wait(WAIT_S)
        assert sink.calls == ["offered", "write"]
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert sink.committed


def test_a_finished_prefill_does_not_wait_for_its_receiver_to_keep_others_going():
    """U6: prompts without a receiver hold up neither each other nor those that have one."""
    with both_ends() as ends:
        stuck = [Prefill() for _ in range(5)]
        outbounds = [ends.admit(ends.leg(), list(range(70)), prefill) for prefill in stuck]
        for outbound in outbounds:
            ends.compute(outbound)
        outbound, inbound = ends.run(70, Sink())
        assert (outbound.error, inbound.error) == (None, None)
        for outbound in outbounds:
            outbound.cancel()
            assert outbound.settled.wait(WAIT_S)


def test_a_preempted_prefill_resumes_at_its_high_water_mark():
    """written() with a smaller number changes nothing and nothing is sent twice."""
    with both_ends() as ends:
        leg, sink, prefill = ends.leg(), Sink(), Prefill()
        inbound = ends.receiver.fetch(leg, list(range(200)), sink)
        outbound = ends.admit(leg, list(range(200)), prefill)
        place(outbound, kv(200), 130, 130)
        outbound.written(5)
        assert outbound.positions == 130
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert inbound.error is None
        assert sink.calls.count("write") == 4


def test_begin_last_tells_whether_the_last_position_is_worth_exporting():
    """False once the grant is known not to want it, True before and where it is wanted."""
    with both_ends() as ends:
        for spare, wanted in ((1, False), (0, True)):
            leg, sink, prefill = ends.leg(), Sink(spare=spare), Prefill()
            outbound = ends.admit(leg, list(range(70)), prefill)
            granted = Once(outbound, "granted")
            inbound = ends.receiver.fetch(leg, list(range(70)), sink)
            granted.wait()
            assert outbound.begin_last() is wanted
            ends.compute(outbound)
            assert inbound.settled.wait(WAIT_S)
        outbound = ends.admit(ends.leg(), [1, 2], Prefill())
        assert outbound.begin_last() is True
        outbound.cancel()
        assert outbound.begin_last() is False


def test_phases_are_observed():
    """queue and transfer are the sender's phases, once per completed handoff, of the replica and
    of the pair."""
    with both_ends() as ends:
        for _ in range(3):
            ends.run(70, Sink())
        sent = ends.sent.read()
        counts = {name: phase.count for name, phase in sent.phases.items()}
        assert counts == {"queue": 3, "transfer": 3}
        assert sent.pairs[ends.leg().decode].phases == sent.phases


def test_a_round_trip_is_what_the_peers_proof_takes(transport):
    """Known to the receiver once they have met; a connection that is used again adds nothing."""
    with both_ends(transport) as ends:
        ends.run(70, Sink())
        met = ends.got.read().pairs[ends.leg().prefill].round_trip_s
        assert 0 < met < WAIT_S
        ends.run(70, Sink())
        assert ends.got.read().pairs[ends.leg().prefill].round_trip_s == met
        assert ends.sent.read().pairs[ends.leg().decode].round_trip_s is None


def fail_both(ends: Ends, sink: Sink, *, leg=None, ours=(1, 2), theirs=(1, 2)):
    leg = leg or ends.leg()
    prefill = Prefill()
    outbound = ends.admit(leg, list(ours), prefill)
    ends.compute(outbound)
    inbound = ends.receiver.fetch(leg, list(theirs), sink)
    assert inbound.settled.wait(WAIT_S)
    assert outbound.settled.wait(WAIT_S)
    assert prefill.told_once()
    assert sink.calls[-1] == "abort"
    assert sink.calls.count("abort") == 1
    return outbound.error, inbound.error


@pytest.mark.parametrize("theirs", [(1, 3), (1, 2, 3), (2, 1)])
def test_prompts_that_were_tokenised_differently_fail_on_both_ends(transport, theirs):
    """DESIGN §5: digest and number of the token ids are compared per request."""
    with both_ends(transport) as ends:
        errors = fail_both(ends, Sink(), theirs=theirs)
        assert [type(error) for error in errors] == [TokensDiffer, TokensDiffer]
        assert ends.sent.read().failures == ends.got.read().failures == {"tokens": 1}
        assert {(who, cause) for who, _, cause in ends.failed} == {
            ("p0", "tokens"),
            ("d0", "tokens"),
        }
        check(ends, 70, Sink(), chunk=70)


@pytest.mark.parametrize("call", ["offered", "write", "commit"])
def test_a_failing_engine_fails_that_handoff_only(transport, call, caplog):
    """R34, U9: a sink that raises aborts its handoff; the sender is told; the next one works."""
    with both_ends(transport) as ends:
        sink = Sink()
        sink.raises[call] = MemoryError("no blocks left")
        ours, theirs = fail_both(ends, sink)
        assert "no blocks left" in theirs.message
        assert "no blocks left" in ours.message
        assert (ours.cause, theirs.cause) == ("handoff", "handoff")
        check(ends, 70, Sink(), chunk=70)


def test_a_typed_refusal_of_the_engine_keeps_its_cause(transport):
    """What the decode engine says is what the prefill leg reports."""
    with both_ends(transport) as ends:
        sink = Sink()
        sink.raises["offered"] = HandoffExpired("no block came free")
        ours, theirs = fail_both(ends, sink)
        assert (ours.cause, theirs.cause) == ("expired", "expired")


@pytest.mark.parametrize("spare", [-1, 2, 70])
def test_an_engine_that_wants_what_is_not_offered_fails_alone(spare):
    """R29: positions outside the offer are refused before they get to the sender."""
    with both_ends() as ends:
        _, theirs = fail_both(ends, Sink(spare=spare), ours=range(70), theirs=range(70))
        assert "wants positions" in theirs.message
        check(ends, 70, Sink(), chunk=70)


def test_a_prefill_that_fails_ends_the_decode_leg(transport):
    """R21: the sender's error reaches the receiver with its cause."""
    with both_ends(transport) as ends:
        leg, sink, prefill = ends.leg(), Sink(), Prefill()
        outbound = ends.admit(leg, list(range(200)), prefill)
        inbound = ends.receiver.fetch(leg, list(range(200)), sink)
        place(outbound, kv(200), 64, 64)
        assert sink.returned["write"].wait(WAIT_S)
        outbound.fail(HandoffError("the prefill engine died"))
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        assert "the prefill engine died" in inbound.error.message
        assert sink.calls[-1] == "abort"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"ticket": "v1.5.aa"}, TicketRejected),
        ({"room": 77}, TicketRejected),
        ({"decode": "d1"}, TicketRejected),
        ({"timeout_s": 0.0}, HandoffExpired),
        ({"timeout_s": -1.0}, HandoffExpired),
        ({"timeout_s": float("nan")}, HandoffExpired),
        ({"timeout_s": float("inf")}, HandoffExpired),
    ],
)
def test_bad_legs_are_refused_by_the_sender_at_once(changes, kind):
    """R8, R12: nothing is reserved and no room is opened."""
    with both_ends() as ends:
        with pytest.raises(kind):
            ends.admit(ends.leg(**changes), [1, 2], Prefill())
        assert ends.sent.read().handoffs_active == 0


def test_bad_times_are_refused_by_the_receiver_at_once():
    """R8: the sink is not called for a leg that has no time."""
    with both_ends() as ends:
        sink = Sink()
        with pytest.raises(HandoffExpired):
            ends.receiver.fetch(ends.leg(timeout_s=0.0), [1], sink)
        assert sink.calls == []


@pytest.mark.parametrize("ids", [[], [-1], [1 << 32], ["a"]])
def test_impossible_tokens_are_refused_at_once(ids):
    """R27: a prompt that can't be is an error of that request, by name."""
    with both_ends() as ends:
        with pytest.raises(HandoffError, match="token"):
            ends.admit(ends.leg(), ids, Prefill())
        with pytest.raises(HandoffError, match="token"):
            ends.receiver.fetch(ends.leg(), ids, Sink())


def test_a_receiver_with_a_forged_ticket_is_refused(transport):
    """The data plane accepts only valid tickets; the room itself is untouched by it (R19)."""
    with both_ends(transport) as ends:
        leg, prefill = ends.leg(), Prefill()
        outbound = ends.admit(leg, [1, 2], prefill)
        forged = Sink()
        inbound = ends.receiver.fetch(ends.leg(room=leg.room), [1, 2], forged)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(forged.error, TicketRejected)
        right = Sink()
        inbound = ends.receiver.fetch(leg, [1, 2], right)
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert right.committed


@pytest.mark.parametrize("when", ["open", "done", "awaited"])
def test_a_ticket_is_used_once(transport, when):
    """A second receiver, or a second prompt, with the same ticket is refused; the first goes on
    (R19)."""
    with both_ends(transport) as ends:
        leg, prefill, first = ends.leg(), Prefill(), Sink()
        claimed = Once(ends.sender._rooms, "claim")
        one = ends.receiver.fetch(leg, [1, 2], first)
        claimed.wait()
        outbound = None
        if when != "awaited":
            outbound = ends.admit(leg, [1, 2], prefill)
        if when == "done":
            ends.compute(outbound)
            assert one.settled.wait(WAIT_S)
            assert outbound.settled.wait(WAIT_S)
        second = Sink()
        two = ends.receiver.fetch(leg, [1, 2], second)
        assert two.settled.wait(WAIT_S)
        assert isinstance(second.error, TicketRejected)
        assert "used before" in second.error.message
        if outbound is not None:
            with pytest.raises(TicketRejected):
                ends.admit(leg, [1, 2], Prefill())
        else:
            outbound = ends.admit(leg, [1, 2], prefill)
        if when != "done":
            ends.compute(outbound)
        assert one.settled.wait(WAIT_S)
        assert first.committed


def test_another_contract_is_refused_by_name():
    """The fingerprint is compared before anything else of a Hello."""
    with both_ends() as ends, both_ends() as other:
        other.receiver._services = type(other.receiver._services)(
            **{
                name: getattr(other.receiver._services, name)
                for name in other.receiver._services.__struct_fields__
            }
            | {"digest": "ee" * 32}
        )
        sink = Sink()
        inbound = other.receiver.fetch(ends.leg(), [1, 2], sink)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, ContractRejected)
        assert "eeeeeeee" in sink.error.message


def test_a_prompt_over_the_whole_budget_fails_at_once_and_says_what_fits():
    """R40: before prefill, naming the longest prompt; the waiting receiver learns it."""
    with both_ends(budget_bytes=3 * SMALL.page_bytes + 1) as ends:
        claimed = Once(ends.sender._rooms, "claim")
        leg, sink, prefill = ends.leg(), Sink(), Prefill()
        inbound = ends.receiver.fetch(leg, list(range(193)), sink)
        claimed.wait()
        with pytest.raises(BudgetExceeded, match="longest that does has 192"):
            ends.admit(leg, list(range(193)), prefill)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, BudgetExceeded)
        assert prefill.settled_calls == 0
        late = Sink()
        with pytest.raises(BudgetExceeded):
            ends.admit(other := ends.leg(), list(range(193)), prefill)
        inbound = ends.receiver.fetch(other, list(range(193)), late)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(late.error, BudgetExceeded)
        assert ends.sent.read().failures == {"over_budget": 2}
        check(ends, 192, Sink(), chunk=70)


def test_contention_is_ordered_bounded_and_cancellable():
    """R41: prompts wait in order; too many are refused; a cancelled one leaves the queue."""
    with both_ends(budget_bytes=SMALL.page_bytes) as ends:
        holder = ends.admit(ends.leg(), [1, 2], Prefill())
        waiting = [Prefill() for _ in range(MAX_WAITERS)]
        queued = [ends.admit(ends.leg(), [1, 2], prefill) for prefill in waiting]
        assert ends.sent.read().waiters == MAX_WAITERS
        with pytest.raises(QueueFull):
            ends.admit(ends.leg(), [1, 2], Prefill())
        queued[0].cancel()
        assert queued[0].settled.wait(WAIT_S)
        holder.cancel()
        assert holder.settled.wait(WAIT_S)
        assert [prefill.reserved.is_set() for prefill in waiting[:3]] == [False, True, False]
        for outbound in queued:
            outbound.cancel()
        for outbound in queued:
            assert outbound.settled.wait(WAIT_S)


def test_on_reserved_that_raises_fails_its_own_prompt(caplog):
    """R34, R42: the bytes come back and the next prompt is served."""
    with both_ends(budget_bytes=SMALL.page_bytes) as ends:

        def fails(outbound) -> None:
            raise RuntimeError("engine is full")

        outbound = ends.sender.admit(
            ends.leg(), [1, 2], on_reserved=fails, on_settled=lambda outbound: None
        )
        assert outbound.settled.wait(WAIT_S)
        assert "engine is full" in outbound.error.message
        check(ends, 60, Sink(), chunk=70)


def test_a_failing_callback_masks_nothing(caplog):
    """R17, R18: on_settled and on_failed may raise; pages, budget and the result are right."""
    with both_ends() as ends:

        def fails(*args) -> None:
            raise RuntimeError("callback")

        ends.sender._on_failed = fails
        outbound = ends.sender.admit(
            ends.leg(), [1, 2], on_reserved=lambda outbound: None, on_settled=fails
        )
        outbound.fail(HandoffError("first error"))
        assert outbound.settled.wait(WAIT_S)
        assert outbound.error.message == "first error"
        assert ends.sent.read().buffer_bytes_used == 0
        check(ends, 70, Sink(), chunk=70)


def test_callbacks_hold_no_lock():
    """R69: from inside each callback another thread can use everything."""
    with both_ends() as ends:
        reports: list[bool] = []

        def usable(outbound) -> None:
            def use() -> None:
                outbound.written(0)
                ends.sender.check()
                ends.receiver.check()
                reports.append(True)

            thread = threading.Thread(target=use)
            thread.start()
            thread.join(WAIT_S)
            reports.append(not thread.is_alive())

        leg = ends.leg()
        inbound = ends.receiver.fetch(leg, [1, 2], Sink())
        outbound = ends.sender.admit(leg, [1, 2], on_reserved=usable, on_settled=usable)
        ends.compute(outbound)
        assert inbound.settled.wait(WAIT_S)
        assert outbound.settled.wait(WAIT_S)
        ends.sender.close()
        assert reports == [True] * 4


def test_calls_after_the_end_are_ignored_or_typed():
    """R13, R15, R16: late producer calls neither raise foreign errors nor revive the room."""
    with both_ends() as ends:
        leg, prefill = ends.leg(), Prefill()
        outbound = ends.admit(leg, list(range(70)), prefill)
        pages = outbound.pages()
        outbound.cancel()
        assert outbound.settled.wait(WAIT_S)
        pages[:] = 9
        outbound.written(70)
        outbound.finish(3)
        outbound.cancel()
        outbound.fail(HandoffError("late"))
        assert outbound.begin_last() is False
        with pytest.raises(HandoffCancelled):
            outbound.pages()
        assert isinstance(outbound.error, HandoffCancelled)
        assert prefill.told_once()
        with pytest.raises(HandoffError):
            ends.admit(leg, list(range(70)), Prefill())
        sink = Sink()
        inbound = ends.receiver.fetch(leg, list(range(70)), sink)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, HandoffCancelled)
        check(ends, 70, Sink(), chunk=70)


def test_more_positions_than_the_prompt_has_is_the_callers_error():
    """A producer that counts wrongly hears of it before anything is sent."""
    with both_ends() as ends:
        outbound = ends.admit(ends.leg(), [1, 2], Prefill())
        with pytest.raises(ValueError, match="3 positions"):
            outbound.written(3)
        outbound.cancel()


def test_ipv6():
    """R59: a sender that listens on ::1 is reached as [::1]:port."""
    with both_ends(host="::1") as ends:
        check(ends, 70, Sink(), chunk=70)


def test_a_port_that_is_taken_is_named():
    """U25: the address stands in the error."""
    with both_ends() as ends, pytest.raises(PeerLost, match=f"127.0.0.1:{ends.port}"):
        TcpTransport().listen(("127.0.0.1", ends.port))


@pytest.mark.parametrize("address", ["nowhere", "a:b", "::1:5", "h:0", "h:70000", ":5", ""])
def test_bad_sender_addresses_fail_that_handoff(address):
    """R59: an address that can't be is PeerLost, and the sink is told."""
    with both_ends() as ends:
        sink = Sink()
        inbound = ends.receiver.fetch(ends.leg(sender=address), [1], sink)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, PeerLost)


def test_nobody_listening():
    """R12, U10: a refused connection is an error at once, and no room is left."""
    with both_ends() as ends:
        ends.sender.close()
        sink = Sink()
        inbound = ends.receiver.fetch(ends.leg(), [1], sink)
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(sink.error, PeerLost)


def test_closed_ends_refuse_by_name():
    """After close nothing starts that nobody would end."""
    with both_ends() as ends:
        ends.close()
        with pytest.raises(HandoffCancelled):
            ends.admit(ends.leg(), [1], Prefill())
        with pytest.raises(HandoffCancelled):
            ends.receiver.fetch(ends.leg(), [1], Sink())
