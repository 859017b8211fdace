"""The connector's worker half, with real handoff ends over TCP and numpy for vLLM's blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from engines.vllm.sides import BLOCK, GEOMETRY, WAIT_S, Memory, Side

from pdctl.engines.interface import Leg
from pdctl.engines.vllm.interface import Span
from pdctl.engines.vllm.legs import PrefillLeg
from pdctl.engines.vllm.steps import Begin, Doom, Export, Finish, News, Notice, Place, Step
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import Patterns
from pdctl.handoff.receiver import Receiver
from pdctl.handoff.sender import Sender
from pdctl.handoff.ticket import mint

KEY, DIGEST = bytes(32), "d" * 64


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side, Leg]]:
    p, d = Side("p0", 1), Side("d0", 2)
    common = {"timeout_s": 20.0, "on_failed": lambda room, cause, detail: None}
    sender = Sender(
        *(Identity("p0", KEY, DIGEST), GEOMETRY),
        listen=("127.0.0.1", 0),
        budget_bytes=1 << 20,
        board=p.session.board,
        **common,
    )
    receiver = Receiver(Identity("d0", KEY, DIGEST), GEOMETRY, board=d.session.board, **common)
    p.session.sender, d.session.receiver = sender, receiver
    leg = Leg(
        room=5,
        ticket=mint(KEY, 5, "p0", "d0", DIGEST, time.time() + 60),
        prefill="p0",
        decode="d0",
        sender=f"127.0.0.1:{sender.start()}",
        timeout_s=20.0,
    )
    yield p, d, leg
    receiver.close()
    sender.close()


def begin(leg: Leg, tokens: int) -> list[Begin]:
    return [Begin(request_id="r", leg=leg, token_ids=list(range(tokens)))]


def row(side: Side, blocks: list[int], stop: int) -> Patterns:
    pages = GEOMETRY.empty(stop)
    side.memory.begin_step([Span(blocks, 0, stop, pages)])
    for layer in range(GEOMETRY.layers):
        side.memory.gather(layer, lambda: None)
    return pages


@pytest.mark.parametrize("tokens", [65, 129, 193])
@pytest.mark.parametrize("spare", [0, 1])
def test_positions_arrive_bit_by_bit_and_no_other_cell_changes(
    sides: tuple[Side, Side, Leg], tokens: int, spare: int
) -> None:
    """R25, R26: chunk by chunk, with either number of destination blocks; the extra one and the
    last position's place keep every byte."""
    p, d, leg = sides
    needed = -(-tokens // BLOCK)
    source, target = list(range(2, 2 + needed)), list(range(20, 20 - needed - spare, -1))
    before = d.memory.cells.copy()
    p.step(begin=begin(leg, tokens))
    d.step(begin=begin(leg, tokens))
    p.until(lambda: p.told(News.RESERVED))
    for positions in (40, 64, tokens):
        p.step(export=[Export(request_id="r", blocks=source, positions=positions)])
    d.until(lambda: d.told(News.OFFERED))
    d.step(place=[Place(request_id="r", blocks=target, held_tokens=0, private=target)])
    p.step(finish=[Finish(request_id="r", first_token=3)])
    d.until(lambda: d.loaded == {"r"})
    assert d.lost == set()
    assert np.array_equal(row(p, source, tokens - 1), row(d, target, tokens - 1))
    for at in range(tokens - 1):
        before[target[at // BLOCK], :, :, at % BLOCK] = d.memory.cells[
            target[at // BLOCK], :, :, at % BLOCK
        ]
    assert np.array_equal(before, d.memory.cells)


def test_layers_are_at_the_receiver_before_the_forward_ends(
    sides: tuple[Side, Side, Leg],
) -> None:
    """Each leaves before the next is computed; with the last one decode may go on, while prefill
    still samples."""
    p, d, leg = sides
    blocks = [1, 2, 3, 4, 5]
    p.step(begin=begin(leg, 130))
    d.step(begin=begin(leg, 130))
    p.until(lambda: p.told(News.RESERVED))
    d.until(lambda: d.told(News.OFFERED))
    d.step(place=[Place(request_id="r", blocks=blocks, held_tokens=0, private=blocks)])
    step = Step(export=[Export(request_id="r", blocks=blocks, positions=130)])
    p.half.obey(step)
    first, last = Memory.names
    p.half.saved(first)
    source, target = (side.memory.cells[5, 0, :, 0] for side in (p, d))
    p.until(lambda: np.array_equal(source, target))
    assert d.loaded == set()
    p.half.saved(last)
    d.until(lambda: d.loaded == {"r"})
    assert np.array_equal(row(p, blocks, 129), row(d, blocks, 129))
    assert d.memory.flushed == 1
    p.half.forwarded(step)


def test_layers_that_no_call_names_are_sent_all_the_same(sides: tuple[Side, Side, Leg]) -> None:
    """vLLM may skip `save_kv_layer`, as whole CUDA graphs do: the step's end catches up."""
    p, d, leg = sides
    p.step(begin=begin(leg, 70))
    d.step(begin=begin(leg, 70))
    p.until(lambda: p.told(News.RESERVED))
    p.step(saves=(), export=[Export(request_id="r", blocks=[1, 2, 3], positions=70)])
    d.until(lambda: d.told(News.OFFERED))
    d.step(place=[Place(request_id="r", blocks=[5, 6, 7], held_tokens=0, private=[5, 6, 7])])
    d.until(lambda: d.loaded == {"r"})
    assert np.array_equal(row(p, [1, 2, 3], 69), row(d, [5, 6, 7], 69))


def test_blocks_that_cannot_be_flushed_are_given_back_as_lost(
    sides: tuple[Side, Side, Leg],
) -> None:
    """R34, U1: decode never goes on with what may not stand in its blocks; prefill is told."""
    p, d, leg = sides
    d.memory.breaks = True
    p.step(begin=begin(leg, 70))
    d.step(begin=begin(leg, 70))
    p.until(lambda: p.told(News.RESERVED))
    d.until(lambda: d.told(News.OFFERED))
    d.step(place=[Place(request_id="r", blocks=[5, 6, 7], held_tokens=0, private=[6, 7])])
    p.step(export=[Export(request_id="r", blocks=[1, 2, 3], positions=70)])
    d.until(lambda: d.loaded == {"r"})
    assert (d.memory.fenced, d.lost) == (1, {6, 7})
    p.until(lambda: p.session.board.read().handoffs_active == 0)
    assert p.session.board.read().handoffs_failed == 1


def test_held_positions_are_not_written(sides: tuple[Side, Side, Leg]) -> None:
    """A page that is held in part is written only beyond what is held."""
    p, d, leg = sides
    source, target = [1, 2, 3, 4], [10, 11, 12, 13]
    held = d.memory.cells[[10, 11, 12]].copy()
    p.step(begin=begin(leg, 120))
    d.step(begin=begin(leg, 120))
    p.until(lambda: p.told(News.RESERVED))
    p.step(export=[Export(request_id="r", blocks=source, positions=120)])
    d.until(lambda: d.told(News.OFFERED))
    d.step(place=[Place(request_id="r", blocks=target, held_tokens=96, private=[13])])
    d.until(lambda: d.loaded == {"r"})
    assert np.array_equal(held, d.memory.cells[[10, 11, 12]])
    assert np.array_equal(p.memory.cells[4, :, :, :23], d.memory.cells[13, :, :, :23])
    d.until(lambda: d.session.board.read().handoffs_active == 0)
    assert d.session.board.read().imported_tokens == 23


def test_a_preempted_prefill_goes_on_at_its_high_water_mark(
    sides: tuple[Side, Side, Leg],
) -> None:
    """What was copied is not copied again, from whatever blocks it is computed anew."""
    p, d, leg = sides
    p.step(begin=begin(leg, 130))
    p.until(lambda: p.told(News.RESERVED))
    p.step(export=[Export(request_id="r", blocks=[1, 2, 3, 4, 5], positions=100)])
    p.step(export=[Export(request_id="r", blocks=[6, 7], positions=64)])
    p.step(export=[Export(request_id="r", blocks=[6, 7, 8, 9, 10], positions=130)])
    d.step(begin=begin(leg, 130))
    d.until(lambda: d.told(News.OFFERED))
    target = [20, 21, 22, 23, 24]
    d.step(place=[Place(request_id="r", blocks=target, held_tokens=0, private=target)])
    d.until(lambda: d.loaded == {"r"})
    assert np.array_equal(d.memory.cells[20:23], p.memory.cells[1:4])
    assert np.array_equal(d.memory.cells[23, :, :, 4:], p.memory.cells[9, :, :, 4:])


def test_an_abort_while_blocks_are_filled_gives_them_back_once(
    sides: tuple[Side, Side, Leg],
) -> None:
    """U1, R10: both ends abort; vLLM holds the blocks until it is told, exactly once."""
    p, d, leg = sides
    p.step(begin=begin(leg, 130))
    d.step(begin=begin(leg, 130))
    d.until(lambda: d.told(News.OFFERED))
    d.step(place=[Place(request_id="r", blocks=[1, 2, 3, 4, 5], held_tokens=0, private=[1, 2])])
    p.step(finish=[Finish(request_id="r", first_token=None)])
    d.step(finish=[Finish(request_id="r", first_token=None)])
    d.until(lambda: d.loaded == {"r"})
    assert d.lost == {1, 2}
    p.until(lambda: p.session.board.read().buffer_bytes_used == 0)


def test_an_abort_before_any_block_reports_no_load(sides: tuple[Side, Side, Leg]) -> None:
    """U2: naming a request that vLLM does not load would end its engine."""
    _, d, leg = sides
    d.step(begin=begin(leg, 130))
    d.step(finish=[Finish(request_id="r", first_token=None)])
    d.until(lambda: d.told(News.FAILED))
    assert d.loaded == set()


def test_blocks_that_come_after_the_end_are_given_back_at_once(
    sides: tuple[Side, Side, Leg],
) -> None:
    """The sender went away between the offer and the placing."""
    p, d, leg = sides
    p.step(begin=begin(leg, 130))
    d.step(begin=begin(leg, 130))
    d.until(lambda: d.told(News.OFFERED))
    p.step(finish=[Finish(request_id="r", first_token=None)])
    d.until(lambda: d.session.board.read().handoffs_active == 1)
    d.step(place=[Place(request_id="r", blocks=[1, 2, 3], held_tokens=0, private=[1, 2, 3])])
    d.until(lambda: d.loaded == {"r"})
    assert d.lost == {1, 2, 3}


def test_what_cannot_begin_is_told_to_scheduler_and_agent(
    sides: tuple[Side, Side, Leg],
) -> None:
    """R34: by name, on either side; nothing is held for it."""
    p, d, leg = sides
    p.step(begin=begin(msgspec.structs.replace(leg, ticket="v1.1.forged"), 70))
    d.step(begin=begin(msgspec.structs.replace(leg, decode="x"), 70))
    assert (p.told(News.FAILED), d.told(News.FAILED)) == (True, True)
    assert [failed.cause for failed in (*p.failures, *d.failures)] == ["ticket", "handoff"]
    p.step(doom=[Doom(request_id="r", blocks=[3])])
    assert (p.loaded, p.lost) == ({"r"}, {3})


def test_a_copy_that_breaks_ends_that_handoff_alone(sides: tuple[Side, Side, Leg]) -> None:
    """R34: the step goes on."""
    p, _, leg = sides
    p.step(begin=begin(leg, 130))
    p.until(lambda: p.told(News.RESERVED))
    p.step(export=[Export(request_id="r", blocks=[999], positions=20)])
    p.until(lambda: p.session.board.read().handoffs_active == 0)
    assert p.session.board.read().handoffs_failed == 1


def test_an_error_that_nobody_foresaw_fails_the_request_that_begins(
    sides: tuple[Side, Side, Leg], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R34: the scheduler and the agent are told, as of any other failure."""
    p, _, leg = sides
    monkeypatch.setattr(p.session.sender, "admit", lambda *_, **__: 1 / 0)
    p.step(begin=begin(leg, 70))
    assert p.told(News.FAILED)
    assert [(failed.leg, failed.cause) for failed in p.failures] == [("prefill", "handoff")]


def test_an_end_that_fails_holds_up_no_other(
    sides: tuple[Side, Side, Leg], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R36: two requests end in one step, and the first one's release raises."""
    p, _, leg = sides
    broken = PrefillLeg("broken", p.half, 70)
    p.half._prefill["broken"] = broken
    monkeypatch.setattr(broken, "finish", lambda _: 1 / 0)
    p.step(begin=begin(leg, 70))
    p.step(finish=[Finish(request_id=name, first_token=None) for name in ("broken", "r")])
    p.until(lambda: p.session.board.read().handoffs_active == 0)
    assert p.session.board.read().handoffs_cancelled == 1


def test_a_released_room_gives_its_pages_back(sides: tuple[Side, Side, Leg]) -> None:
    """U2: prefill was answered, and no receiver came; others' rooms stay as they are."""
    p, _, leg = sides
    p.step(begin=begin(leg, 70))
    p.until(lambda: p.told(News.RESERVED))
    p.step(export=[Export(request_id="r", blocks=[1, 2, 3], positions=70)])
    p.step(finish=[Finish(request_id="r", first_token=3)])
    p.step(release=[leg.room + 1])
    assert p.session.board.read().buffer_bytes_used > 0
    p.step(release=[leg.room])
    p.until(lambda: p.session.board.read().handoffs_cancelled == 1)
    assert p.session.board.read().buffer_bytes_used == 0


def test_news_that_are_heard_go_out_with_no_step(sides: tuple[Side, Side, Leg]) -> None:
    """Where vLLM's scheduler is in this process; what was loaded goes its own way."""
    p, _, leg = sides
    assert p.half.news() == []
    p.half.begin(begin(leg, 70)[0])
    heard: list[Notice] = []
    deadline = time.monotonic() + WAIT_S
    while not heard:
        assert time.monotonic() < deadline
        assert p.half.collect() == ([], set(), set())
        heard = p.half.news()
    assert heard == [Notice(request_id="r", news=News.RESERVED)]
    assert p.half.news() == []
    p.step(doom=[Doom(request_id="r", blocks=[3])])
    assert (p.notices, p.loaded, p.lost) == ([], {"r"}, {3})
