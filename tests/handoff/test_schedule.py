"""Which layers of which page can leave when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.errors import ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PagePart, Schedule
from pdctl.handoff.wire import End, Grant

GEOMETRY = PageGeometry(1, 1, 1)
LAYERED = PageGeometry(layers=5, kv_heads=8, head_dim=128)
"""Two of its layers fill a piece."""


def schedule(
    offered: int, geometry: PageGeometry = GEOMETRY, *, together: bool = False, **grant: object
) -> Schedule:
    made = Schedule(geometry, offered, together=together)
    if grant:
        made.granted(Grant(**{"held_tokens": 0, "first_token": False, **grant}))
    return made


def leaves(made: Schedule) -> list[int | str]:
    """The pages of the pieces that can be sent now."""
    out: list[int | str] = []
    while (step := made.step()) is not None:
        if isinstance(step, End):
            return [*out, "end"]
        out.append(step.page)
    return out


def parts(made: Schedule) -> list[tuple[int, int, int]]:
    """(page, first layer, layers) of the pieces that can be sent now."""
    out = []
    while isinstance(step := made.step(), PagePart):
        out.append((step.page, step.first_layer, step.layers))
    return out


class Engine:
    """Writes in steps, layer by layer, and remembers what stands in the pages."""

    def __init__(self, made: Schedule, data: st.DataObject, tokens: int) -> None:
        self.made, self.data, self.tokens = made, data, tokens
        self.stands = np.zeros((tokens, LAYERED.layers), dtype=bool)
        self.stop = self.layer = 0

    def go_on(self) -> None:
        """Writes the next layers of a step; one that brings the last position asks first."""
        if self.layer in (0, LAYERED.layers):
            self.layer = 0
            self.stop = self.tokens - self.data.draw(st.integers(0, self.tokens - self.stop - 1))
            if self.stop == self.tokens and self.made.wants_last:
                self.made.last_begun = True
        self.layer = LAYERED.layers - self.data.draw(st.integers(0, 4 - self.layer))
        self.stands[: self.stop, : self.layer] = True
        self.made.write(self.stop, self.layer)

    @property
    def ended(self) -> bool:
        return self.stop == self.tokens and self.layer == LAYERED.layers


@given(st.integers(1, 400), st.data())
@settings(deadline=None)
def test_every_granted_layer_leaves_once_in_a_staircase_and_not_before_it_is_written(tokens, data):
    """R28: for any steps of the engine, grant and held prefix, whenever the grant comes and
    however often the sender looks."""
    want = tokens - data.draw(st.integers(0, 1))
    held = data.draw(st.integers(0, want))
    made = schedule(tokens, LAYERED, together=data.draw(st.booleans()))
    engine = Engine(made, data, tokens)
    first, end = held // 64, max(held // 64, -(-want // 64))
    sent = dict.fromkeys(range(first, end), 0)
    last = None
    while not isinstance(last, End):
        if not engine.ended and not data.draw(st.booleans()):
            engine.go_on()
        if made.grant is None and (engine.ended or not data.draw(st.booleans())):
            made.granted(Grant(tokens=want, held_tokens=held, first_token=False))
        looks = 5 - data.draw(st.integers(0, 5))
        while looks and isinstance(last := made.step(), PagePart):
            looks -= 1
            after, stop = last.first_layer + last.layers, last.page + last.pages
            assert {sent[page] for page in range(last.page, stop)} == {last.first_layer}
            assert after <= sent.get(last.page - 1, LAYERED.layers)
            assert 1 <= last.layers <= 2
            assert engine.stands[last.page * 64 : min(stop * 64, want), :after].all()
            assert last.slots == min(64, want - (stop - 1) * 64)
            sent.update(dict.fromkeys(range(last.page, stop), after))
    assert engine.stands[:want].all()
    assert last == End(pages=end - first, first_token=None)
    assert sent == dict.fromkeys(range(first, end), LAYERED.layers)


def test_pages_that_are_whole_leave_one_after_the_other():
    """An engine that has every layer at once sends page by page."""
    made = schedule(100, LAYERED, tokens=100)
    made.write(100)
    assert parts(made) == [(0, 0, 2), (0, 2, 2), (0, 4, 1), (1, 0, 2), (1, 2, 2), (1, 4, 1)]


def test_layers_leave_as_they_land():
    """What one sweep over the pages has missed leaves together in the next, up to a piece."""
    made = schedule(192, LAYERED, tokens=192)
    made.write(192, 1)
    assert parts(made) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    made.write(192, 3)
    assert parts(made) == [(0, 1, 2), (1, 1, 2), (2, 1, 2)]
    made.write(192)
    assert parts(made) == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]


def blocks(made: Schedule) -> list[tuple[int, int, int, int]]:
    """(page, pages, first layer, layers) of what can be sent now."""
    out = []
    while isinstance(step := made.step(), PagePart):
        out.append((step.page, step.pages, step.first_layer, step.layers))
    return out


def test_the_same_layers_of_all_pages_leave_as_one():
    """What a chunk brings is as many parts as it has landings, however many pages it has."""
    made = schedule(64 * 40, LAYERED, together=True, tokens=64 * 40 - 1)
    made.write(1000, 2)
    assert blocks(made) == [(0, 15, 0, 2)]
    made.write(1000)
    assert blocks(made) == [(0, 15, 2, 2), (0, 15, 4, 1)]
    made.write(64 * 40, 2)
    assert blocks(made) == [(15, 25, 0, 2)]
    made.write(64 * 40)
    assert blocks(made) == [(15, 25, 2, 2), (15, 25, 4, 1)]


def test_of_a_block_the_tail_alone_is_held_back():
    """While the last position is written into it."""
    made = schedule(200, LAYERED, together=True, tokens=199)
    made.last_begun = True
    made.write(199, 2)
    assert blocks(made) == [(0, 3, 0, 2)]
    made.write(200, 2)
    assert made.step() == PagePart(page=3, first_layer=0, layers=2, slots=7)


def test_a_page_never_overtakes_the_one_before():
    """R28: a layer that lands in the middle of a sweep waits for its first page."""
    made = schedule(192, LAYERED, tokens=192)
    made.write(192, 1)
    assert made.step() == PagePart(0, 0, 1, 64)
    made.write(192, 2)
    assert parts(made)[:3] == [(0, 1, 1), (1, 0, 2), (2, 0, 2)]


def test_a_chunk_goes_on_where_the_last_ended():
    """Pages that the next chunk fills follow layer by layer, behind those that are whole."""
    made = schedule(192, LAYERED, tokens=192)
    made.write(100)
    assert parts(made) == [(0, 0, 2), (0, 2, 2), (0, 4, 1)]
    made.write(192, 1)
    assert parts(made) == [(1, 0, 1), (2, 0, 1)]
    assert made.written == 100


def test_what_is_computed_again_is_nothing_new():
    """After a preemption each layer goes on from its own high-water mark."""
    made = schedule(192, LAYERED, tokens=192)
    made.write(100)
    made.write(150, 3)
    assert not made.write(64)
    assert (made.write(120), made.written) == (True, 120)
    assert parts(made)[3:] == [(1, 0, 2), (1, 2, 1)]


@pytest.mark.parametrize(("tokens", "want", "pages"), [(65, 64, [0]), (65, 65, [0, 1])])
def test_one_token_past_a_page(tokens, want, pages):
    """R25: n % 64 == 1, with either number of pages wanted."""
    made = schedule(tokens, tokens=want)
    made.write(tokens)
    assert leaves(made) == [*pages, "end"]


def test_a_page_that_is_being_written_is_held_back():
    """The tail page never leaves while the engine writes the last position into it."""
    made = Schedule(GEOMETRY, 70)
    made.write(69)
    made.last_begun = True
    made.granted(Grant(tokens=69, held_tokens=0, first_token=False))
    assert leaves(made) == [0]
    made.write(70)
    assert made.step() == PagePart(page=1, first_layer=0, layers=1, slots=5)
    assert leaves(made) == ["end"]


def test_a_layer_of_the_tail_leaves_while_others_are_being_written():
    """The last position is held back layer by layer."""
    made = schedule(70, LAYERED, tokens=70)
    made.write(69)
    made.last_begun = True
    assert [page for page, _, _ in parts(made)] == [0, 0, 0]
    made.write(70, 1)
    assert parts(made) == [(1, 0, 1)]
    made.write(70)
    assert [*parts(made), made.step()] == [(1, 1, 2), (1, 3, 2), End(pages=2, first_token=None)]


def test_a_prefill_that_ends_without_its_last_position_releases_the_tail():
    """finish() ends the hold: nothing waits for a position that is not wanted."""
    made = Schedule(GEOMETRY, 70)
    made.write(69)
    made.last_begun = True
    made.granted(Grant(tokens=69, held_tokens=64, first_token=False))
    assert leaves(made) == []
    made.finished = True
    assert leaves(made) == [1, "end"]


def test_the_end_waits_for_a_wanted_first_token():
    """R31: the first token comes with End, after every page."""
    made = schedule(3, tokens=3, first_token=True)
    made.write(3)
    assert leaves(made) == [0]
    made.finished, made.first_token = True, 42
    assert made.step() == End(pages=1, first_token=42)


def test_without_it_the_end_does_not_wait_for_sampling():
    """A decode that recomputes the last token starts while the prefill still samples."""
    made = schedule(3, tokens=2)
    made.write(2)
    assert leaves(made) == [0, "end"]


@pytest.mark.parametrize(("tokens", "held"), [(68, 0), (71, 0), (70, 71), (0, 0)])
def test_grants_beyond_the_offer_are_refused(tokens, held):
    """R29: a grant for positions that were not offered is the peer's error."""
    with pytest.raises(ProtocolViolation, match="of 70"):
        schedule(70, tokens=tokens, held_tokens=held)


def test_the_end_waits_for_what_the_receiver_already_holds():
    """Done frees the pages: it can't come while the engine still writes into them."""
    made = schedule(65, tokens=64, held_tokens=64)
    assert leaves(made) == []
    made.write(64)
    made.last_begun = True
    assert leaves(made) == []
    made.write(65)
    assert leaves(made) == ["end"]
