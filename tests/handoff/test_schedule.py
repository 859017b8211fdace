"""Which page can leave when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.errors import ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PagePart, Schedule
from pdctl.handoff.wire import End, Grant

GEOMETRY = PageGeometry(1, 1, 1)


def schedule(offered: int, **grant: object) -> Schedule:
    made = Schedule(GEOMETRY, offered)
    if grant:
        made.granted(Grant(**{"held_tokens": 0, "first_token": False, **grant}))
    return made


def leaves(made: Schedule) -> list[int | str]:
    """What can be sent now."""
    out: list[int | str] = []
    while (step := made.step()) is not None:
        if isinstance(step, End):
            return [*out, "end"]
        out.append(step.page)
    return out


@given(st.integers(1, 400), st.data())
@settings(deadline=None)
def test_every_wanted_page_leaves_once_in_order_and_not_before_it_is_written(tokens, data):
    """R28: for any chunks, grant and held prefix, the pages are those granted, each once."""
    want = tokens - data.draw(st.integers(0, 1))
    held = data.draw(st.integers(0, want))
    made = schedule(tokens, tokens=want, held_tokens=held)
    seen: list[int] = []
    while made.written < want:
        made.written += data.draw(st.integers(1, want - made.written))
        for page in leaves(made):
            if page != "end":
                assert min(64 * (page + 1), want) <= made.written
                seen.append(page)
    seen += [page for page in leaves(made) if page != "end"]
    assert seen == list(range(held // 64, max(held // 64, -(-want // 64))))


@pytest.mark.parametrize(("tokens", "want", "pages"), [(65, 64, [0]), (65, 65, [0, 1])])
def test_one_token_past_a_page(tokens, want, pages):
    """R25: n % 64 == 1, with either number of pages wanted."""
    made = schedule(tokens, tokens=want)
    made.written = tokens
    assert leaves(made) == [*pages, "end"]


def test_a_page_that_is_being_written_is_held_back():
    """The tail page never leaves while the engine writes the last position into it."""
    made = Schedule(GEOMETRY, 70)
    made.written, made.last_begun = 69, True
    made.granted(Grant(tokens=69, held_tokens=0, first_token=False))
    assert leaves(made) == [0]
    made.written = 70
    assert made.step() == PagePart(page=1, slots=5)
    assert leaves(made) == ["end"]


def test_a_prefill_that_ends_without_its_last_position_releases_the_tail():
    """finish() ends the hold: nothing waits for a position that is not wanted."""
    made = Schedule(GEOMETRY, 70)
    made.written, made.last_begun = 69, True
    made.granted(Grant(tokens=69, held_tokens=64, first_token=False))
    assert leaves(made) == []
    made.finished = True
    assert leaves(made) == [1, "end"]


def test_the_end_waits_for_a_wanted_first_token():
    """R31: the first token comes with End, after every page."""
    made = schedule(3, tokens=3, first_token=True)
    made.written = 3
    assert leaves(made) == [0]
    made.finished, made.first_token = True, 42
    assert made.step() == End(pages=1, first_token=42)


def test_without_it_the_end_does_not_wait_for_sampling():
    """A decode that recomputes the last token starts while the prefill still samples."""
    made = schedule(3, tokens=2)
    made.written = 2
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
    made.written, made.last_begun = 64, True
    assert leaves(made) == []
    made.written = 65
    assert leaves(made) == ["end"]
