"""Handoffs between engines whose data planes are processes of their own."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from handoff.apart.planes import ApartEnds, apart, at_rest, opening, settle
from handoff.ends import DIGEST, KEY, SMALL, WAIT_S, Prefill, Sink, kv
from handoff.test_layers import GEOMETRY, Layers, wanted

from pdctl.errors import (
    BudgetExceeded,
    HandoffCancelled,
    HandoffError,
    HandoffExpired,
    PeerLost,
    TicketRejected,
)
from pdctl.handoff.apart.receives import PIECES
from pdctl.handoff.apart.sending import ApartOutbound, ApartSender
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.page import Patterns
from pdctl.handoff.sink import HELD_PIECES


@pytest.fixture(scope="module")
def shared() -> Iterator[ApartEnds]:
    with apart() as ends:
        yield ends


@pytest.fixture(scope="module")
def narrow() -> Iterator[ApartEnds]:
    """Whose buffer holds two pages."""
    with apart(budget_bytes=2 * SMALL.page_bytes) as ends:
        yield ends


@pytest.fixture
def ends(shared: ApartEnds) -> Iterator[ApartEnds]:
    """At rest before and after, and still able to do a whole handoff."""
    shared.failed.clear()
    yield shared
    assert shared.run(70, Sink()) is None
    at_rest(shared)


def expected(tokens: int, sink: Sink) -> Patterns:
    positions = tokens - sink.spare
    pages = kv(tokens)[: SMALL.pages_for(positions)]
    pages[-1, :, :, positions - (len(pages) - 1) * 64 :] = 0
    pages[: sink.held_tokens // 64] = 0
    return pages


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 66, 129, 130, 193, 5000])
@pytest.mark.parametrize("first_token", [False, True])
def test_every_length_lands_bit_by_bit(ends: ApartEnds, tokens: int, first_token: bool) -> None:
    """R25, R26: pages written in one process stand in the other, through two more."""
    sink = Sink(spare=0 if first_token else 1, first_token=first_token)
    assert ends.run(tokens, sink, chunk=50) is None
    assert sink.committed
    assert np.array_equal(sink.pages, expected(tokens, sink))
    assert sink.first_token == (7 if first_token else None)


def test_a_held_prefix_is_not_sent_again(ends: ApartEnds) -> None:
    """R26, R45: only pages from the first one that is not whole travel."""
    sink = Sink(held_tokens=130)
    before = ends.got.read()
    assert ends.run(300, sink) is None
    assert np.array_equal(sink.pages, expected(300, sink))
    after = ends.got.read()
    assert after.imported_tokens - before.imported_tokens == 299 - 130
    assert after.reused_pages - before.reused_pages == 2


def test_a_prompt_of_one_token_holds_nobody_up(ends: ApartEnds) -> None:
    """R27: the receiver lacks nothing of it and is done at once, perhaps before the engine hears
    of its pages: it hears of them all the same, and computes the prompt."""
    for _ in range(100):
        outbound, inbound, prefill = ends.begin(1, Sink())
        assert prefill.reserved.wait(WAIT_S)
        outbound.finish(7)
        settle(outbound, inbound)
        assert (outbound.error, outbound.done) == (None, True)


def test_an_end_that_comes_first_tells_the_engine_to_go_on(shared: ApartEnds) -> None:
    """Reserved and settled come in that order, each once, whatever the data plane said first."""
    told: list[str] = []
    outbound = ApartOutbound(
        *(shared.sender, 0, shared.leg(), 1),
        on_reserved=lambda outbound: told.append("reserved"),
        on_settled=lambda outbound: told.append("settled"),
    )
    outbound.settle(None, done=True)
    assert told == ["reserved", "settled"]


def test_layers_leave_as_they_are_written() -> None:
    """R28: chunks of any length, layer by layer, with and without the last position."""
    rng = random.Random(4)
    with apart(geometry=GEOMETRY) as ends:
        for spare in (0, 1, 0, 1):
            sink = Sink(GEOMETRY, spare=spare)
            outbound, inbound, prefill = ends.begin(200, sink)
            assert prefill.reserved.wait(WAIT_S)
            layers = Layers(outbound)
            cuts = sorted(rng.sample(range(1, 200), 3))
            for positions in (*cuts, 200):
                layers.chunk(positions)
            outbound.finish(7)
            settle(outbound, inbound)
            assert outbound.error is None
            assert np.array_equal(sink.pages, wanted(sink, 200))


def test_the_last_position_is_skipped_once_nobody_wants_it(ends: ApartEnds) -> None:
    """R30: also where the engine has begun to write it before the grant was known."""
    sink = Sink()
    sink.hold("offered")
    outbound, inbound, prefill = ends.begin(100, sink)
    assert prefill.reserved.wait(WAIT_S)
    assert outbound.begin_last()
    sink.proceed.set()
    outbound.pages()[:] = kv(100)
    outbound.written(99)
    outbound.written(100)
    outbound.finish(7)
    settle(outbound, inbound)
    assert np.array_equal(sink.pages, expected(100, sink))


def test_many_at_once(narrow: ApartEnds) -> None:
    """U3, R41: more prompts than the buffer holds; every one lands."""
    before = narrow.sent.read().handoffs_completed
    sinks = [Sink() for _ in range(20)]
    threads = [threading.Thread(target=narrow.run, args=(100, sink)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(np.array_equal(sink.pages, expected(100, sink)) for sink in sinks)
    assert narrow.sent.read().handoffs_completed == before + 20


def test_phases_and_bytes_are_counted_in_the_engine(ends: ApartEnds) -> None:
    """The engine's board says what its data plane did, before `on_settled`."""
    before, got = ends.sent.read(), ends.got.read()
    assert ends.run(129, Sink()) is None
    after = ends.sent.read()
    assert after.handoffs_completed - before.handoffs_completed == 1
    assert after.host_bytes - before.host_bytes == 2 * SMALL.page_bytes
    assert {"queue", "transfer"} <= set(after.phases)
    (sent,) = after.pairs.values()
    assert sent.phases == after.phases
    (received,) = ends.got.read().pairs.values()
    assert received.round_trip_s is not None
    assert ends.got.read().host_bytes - got.host_bytes == 2 * SMALL.page_bytes


def test_open_rooms_are_told_with_their_rest(ends: ApartEnds) -> None:
    """A handoff that stands still is seen to."""
    outbound, inbound, prefill = ends.begin(100, Sink())
    assert prefill.reserved.wait(WAIT_S)
    seen = threading.Event()

    def look() -> None:
        while outbound.room not in ends.sent.read().rooms:
            seen.wait(0.05)
        seen.set()

    threading.Thread(target=look, daemon=True).start()
    assert seen.wait(WAIT_S)
    inbound.cancel()
    settle(outbound, inbound)


# -- cancels


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("call", ["offered", "write", None])
def test_a_cancel_at_every_stall_point_ends_both(
    ends: ApartEnds, side: str, call: str | None
) -> None:
    """R10: while the engine allocates, while it takes a piece, and before anything is written:
    `abort` comes after the call has returned, and once."""
    sink = Sink()
    if call is not None:
        sink.hold(call)
    outbound, inbound, prefill = ends.begin(200, sink)
    assert prefill.reserved.wait(WAIT_S)
    if call == "write":
        outbound.pages()[:] = kv(200)
        outbound.written(150)
    if call is not None:
        assert sink.inside.wait(WAIT_S)
    (outbound if side == "prefill" else inbound).cancel()
    assert outbound.settled.wait(WAIT_S)
    assert "abort" not in sink.calls or call is None
    sink.proceed.set()
    settle(inbound)
    assert isinstance(outbound.error, HandoffCancelled)
    assert isinstance(inbound.error, HandoffCancelled)
    assert sink.calls.count("abort") == 1
    assert ends.failed == []


def test_a_cancel_during_commit_comes_too_late(ends: ApartEnds) -> None:
    """R11: the decode engine has taken everything; both ends complete."""
    sink = Sink()
    sink.hold("commit")
    outbound, inbound, prefill = ends.begin(100, sink)
    assert prefill.reserved.wait(WAIT_S)
    ends.compute(outbound)
    assert sink.inside.wait(WAIT_S)
    inbound.cancel()
    sink.proceed.set()
    settle(outbound, inbound)
    assert (outbound.error, inbound.error) == (None, None)
    assert outbound.done


def test_a_prompt_that_waits_for_pages_can_be_cancelled(narrow: ApartEnds) -> None:
    """R41: it leaves the queue, and the one behind it is served."""
    first, first_in, reserved = narrow.begin(100, Sink())
    assert reserved.reserved.wait(WAIT_S)
    second, second_in, _ = narrow.begin(100, Sink())
    sink = Sink()
    third, third_in, prefill = narrow.begin(100, sink)
    second.cancel()
    settle(second, second_in)
    first.cancel()
    assert prefill.reserved.wait(WAIT_S)
    narrow.compute(third)
    settle(first, first_in, third, third_in)
    assert sink.committed


def test_released_rooms_end(ends: ApartEnds) -> None:
    """The receiver will not come: `release` names the room."""
    leg, prefill = ends.leg(), Prefill()
    outbound = ends.sender.admit(
        leg, range(9), on_reserved=prefill.on_reserved, on_settled=prefill.on_settled
    )
    ends.sender.release(leg.room)
    settle(outbound)
    assert isinstance(outbound.error, HandoffCancelled)
    with pytest.raises(HandoffCancelled):
        outbound.pages()


# -- failures


@pytest.mark.parametrize("call", ["offered", "write", "commit"])
def test_a_failing_engine_fails_that_handoff_only(
    ends: ApartEnds, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R34: what a sink raises in the engine's process ends its handoff on both sides, by cause."""
    sink = Sink()
    sink.raises[call] = RuntimeError("broken")
    error = ends.run(100, sink)
    assert isinstance(error, HandoffError)
    assert "broken" in error.message
    assert sink.calls[-2:] == [call, "abort"]
    # what was logged holds the piece
    caplog.clear()
    assert {(side, cause) for side, _, cause in ends.failed} == {
        ("p0", "handoff"),
        ("d0", "handoff"),
    }


def test_a_typed_refusal_keeps_its_cause(ends: ApartEnds) -> None:
    """What the decode engine says is what the prefill leg reports."""
    sink = Sink()
    sink.raises["offered"] = BudgetExceeded("no block fits", hint="a larger pool")
    assert isinstance(ends.run(100, sink), BudgetExceeded)
    assert isinstance(sink.error, BudgetExceeded)


def test_a_prefill_that_fails_ends_the_decode_leg(ends: ApartEnds) -> None:
    """R21: with its cause."""
    sink = Sink()
    outbound, inbound, prefill = ends.begin(100, sink)
    assert prefill.reserved.wait(WAIT_S)
    outbound.fail(HandoffError("the prefill engine failed: broken"))
    settle(outbound, inbound)
    assert sink.error is not None
    assert "broken" in sink.error.message


def test_what_only_the_data_plane_knows_fails_the_handoff(narrow: ApartEnds) -> None:
    """R40, R16: a prompt over the buffer, a ticket used twice; reported, and the engine told."""
    narrow.failed.clear()
    leg, prefill = narrow.leg(), Prefill()
    told = {"on_reserved": prefill.on_reserved, "on_settled": prefill.on_settled}
    outbound = narrow.sender.admit(leg, range(129), **told)
    settle(outbound)
    assert isinstance(outbound.error, BudgetExceeded)
    assert "128" in outbound.error.message
    leg = narrow.leg()
    first = narrow.sender.admit(leg, range(9), **told)
    again = narrow.sender.admit(leg, range(9), **told)
    settle(again)
    assert isinstance(again.error, TicketRejected)
    assert not first.settled.is_set()
    assert {cause for _, _, cause in narrow.failed} == {"over_budget", "ticket"}
    first.cancel()
    settle(first)


def test_bad_legs_are_refused_at_once(ends: ApartEnds) -> None:
    """R8, R27: what this process can tell, it raises."""
    prefill = Prefill()
    told = {"on_reserved": prefill.on_reserved, "on_settled": prefill.on_settled}
    with pytest.raises(HandoffExpired):
        ends.sender.admit(ends.leg(timeout_s=0.0), range(9), **told)
    with pytest.raises(HandoffError):
        ends.sender.admit(ends.leg(), [], **told)
    with pytest.raises(HandoffError):
        ends.receiver.fetch(ends.leg(), [-1], Sink())
    outbound, inbound, prefill = ends.begin(9, Sink())
    with pytest.raises(ValueError, match="10 positions"):
        outbound.written(10)
    with pytest.raises(ValueError, match="3 layers"):
        outbound.written(9, layers=3)
    outbound.cancel()
    settle(outbound, inbound)


def test_a_port_that_is_taken_is_named(ends: ApartEnds) -> None:
    """U25: the data plane's error is the engine's."""
    taken = ApartSender(
        opening(SMALL, sends=True, port=ends.port, buffer_bytes=1 << 16),
        lock=None,
        board=CounterBoard(),
        on_failed=lambda room, cause, detail: None,
        on_lost=lambda error: None,
    )
    with pytest.raises(PeerLost, match=str(ends.port)):
        taken.start()
    taken.close()


def test_secrets_are_in_neither_arguments_nor_environment(ends: ApartEnds) -> None:
    """The cluster's key travels over the socket alone."""
    for pid in (ends.sender.pid, ends.receiver.pid):
        told = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        assert DIGEST.encode() not in told
        assert KEY not in told
        assert KEY.hex().encode() not in told


# -- memory


def test_an_engine_that_takes_nothing_holds_up_itself_alone(ends: ApartEnds) -> None:
    """R34: at most `PIECES` lie untaken, others go on, and afterwards nothing was overwritten."""
    tokens = 64 * (PIECES + 100)
    slow = Sink()
    slow.hold("write")
    outbound, inbound, prefill = ends.begin(tokens, slow)
    assert prefill.reserved.wait(WAIT_S)
    ends.compute(outbound, chunk=tokens)
    assert slow.inside.wait(WAIT_S)
    for _ in range(3):
        assert ends.run(300, Sink()) is None
    assert inbound._calls.qsize() < PIECES
    assert not outbound.settled.is_set()
    slow.proceed.set()
    settle(outbound, inbound)
    assert np.array_equal(slow.pages, expected(tokens, slow))


class Remembering(Sink):
    """An engine whose copies read the last pieces after `write` has returned."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[tuple[Patterns, bytes]] = []
        self.intact = True

    def forget(self) -> None:
        self._last.clear()

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        super().write(page, first_layer, piece)
        self._last = [*self._last[1 - HELD_PIECES :], (piece, piece.tobytes())]
        self.intact &= all(view.tobytes() == held for view, held in self._last)


def test_pieces_stay_while_an_engine_reads_them_late() -> None:
    """`HELD_PIECES`: memory that an engine has locked is not received into while it reads it;
    each place is locked before it is first used, and pages when they are made."""
    locked: list[int] = []
    with apart(lock=lambda memory: locked.append(memory.nbytes)) as ends:
        sinks = [Remembering() for _ in range(3)]
        for sink in sinks:
            tokens = 64 * 3 * PIECES
            assert ends.run(tokens, sink) is None
            assert sink.intact
            sink.forget()
            assert np.array_equal(sink.pages, expected(tokens, sink))
    assert len(locked) == 2


def test_pages_that_an_engine_still_holds_are_nobody_elses(narrow: ApartEnds) -> None:
    """R10: a copy may run on after its handoff's end; the pages come back with the array."""
    outbound, inbound, prefill = narrow.begin(128, Sink())
    assert prefill.reserved.wait(WAIT_S)
    held = outbound.pages()
    held[:] = 7
    outbound.cancel()
    settle(outbound, inbound)
    waiting, waiting_in, reserved = narrow.begin(128, Sink())
    assert not reserved.reserved.wait(0.3)
    assert (held == 7).all()
    del held
    assert reserved.reserved.wait(WAIT_S)
    narrow.compute(waiting)
    settle(waiting, waiting_in)
    assert waiting.error is None
