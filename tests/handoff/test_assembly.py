"""In which orders a receiver takes what it has granted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import HandoffError, ProtocolViolation
from pdctl.handoff.assembly import Assembly
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sink import Want
from pdctl.handoff.wire import End, Header, Kind

GEOMETRY = PageGeometry(layers=4, kv_heads=1, head_dim=1)
Piece = tuple[int, int, int]
"""Page, first layer, layers."""


def header(piece: Piece) -> Header:
    page, first_layer, layers = piece
    return Header(
        kind=Kind.PAGES,
        room=1,
        page=page,
        first_layer=first_layer,
        layers=layers,
        length=0,
        checksum=0,
        seed=0,
    )


def assembly(first: int, pages: int) -> Assembly:
    """Wants `pages` pages from `first` on, no token."""
    tokens = (first + pages) * 64
    return Assembly(GEOMETRY, Want(tokens=tokens, held_tokens=first * 64), tokens)


def staircase(chance: random.Random, first: int, pages: int) -> list[Piece]:
    """Every layer of those pages once, in some order that is allowed."""
    sent, pieces = [0] * pages, []
    while sent and sent[-1] < GEOMETRY.layers:
        at = chance.randrange(pages)
        most = (sent[at - 1] if at else GEOMETRY.layers) - sent[at]
        if most:
            layers = chance.randint(1, most)
            pieces.append((first + at, sent[at], layers))
            sent[at] += layers
    return pieces


def outcome(first: int, pages: int, pieces: list[Piece]) -> bool:
    """Whether they are taken, to the end."""
    made = assembly(first, pages)
    try:
        for piece in pieces:
            made.take(header(piece))
        made.complete(End(pages=pages, first_token=None))
    except ProtocolViolation:
        return False
    return True


@given(st.integers(0, 3), st.integers(0, 5), st.builds(random.Random, st.integers(0, 1 << 32)))
def test_every_staircase_is_taken(first, pages, chance):
    """Page by page, layer by layer, and whatever lies between."""
    assert outcome(first, pages, staircase(chance, first, pages))


@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.builds(random.Random, st.integers(0, 1 << 32)),
    st.data(),
)
def test_every_other_sequence_is_refused(first, pages, chance, data):
    """R28: a piece more, fewer, twice, elsewhere, or before its time commits nothing."""
    pieces = staircase(chance, first, pages)
    at = data.draw(st.integers(0, len(pieces) - 1))
    page, layer, layers = pieces[at]
    broken = {
        "missing": pieces[:at] + pieces[at + 1 :],
        "duplicate": [*pieces[: at + 1], *pieces[at:]],
        "again at the end": [*pieces, pieces[at]],
        "a page too many": [*pieces, (first + pages, 0, 4)],
        "below the grant": [*pieces[:at], (first - 1, layer, layers), *pieces[at + 1 :]],
        "another page": [*pieces[:at], (page + 1, layer, layers), *pieces[at + 1 :]],
        "a gap": [*pieces[:at], (page, layer + 1, layers), *pieces[at + 1 :]],
        "one layer short": [*pieces[:at], (page, layer, layers - 1), *pieces[at + 1 :]],
    }
    name = data.draw(st.sampled_from(sorted(broken)))
    assert not outcome(first, pages, broken[name])


@given(
    st.integers(0, 3),
    st.integers(1, 6),
    st.builds(random.Random, st.integers(0, 1 << 32)),
    st.integers(-1, 7),
    st.integers(1, 8),
    st.integers(0, 4),
    st.integers(1, 4),
)
def test_pages_at_once_are_taken_where_each_would_be(
    first, pages, chance, page, count, layer, layers
):
    """R28: the same layers of consecutive pages, after any beginning; and they count as each."""
    one, at_once = assembly(first, pages), assembly(first, pages)
    came = staircase(chance, first, pages)
    for piece in came[: chance.randint(0, len(came))]:
        one.take(header(piece))
        at_once.take(header(piece))
    try:
        for each in range(count):
            one.take(header((first + page + each, layer, layers)))
    except ProtocolViolation:
        with pytest.raises(ProtocolViolation, match="was due"):
            at_once.take(header((first + page, layer, layers)), count)
    else:
        at_once.take(header((first + page, layer, layers)), count)
        assert at_once._came == one._came


@given(st.integers(2, 5), st.builds(random.Random, st.integers(0, 1 << 32)))
def test_a_page_that_overtakes_is_refused(pages, chance):
    """R28: no page has a layer that the one before it has not."""
    made, sent = assembly(0, pages), [0] * pages
    for page, layer, layers in staircase(chance, 0, pages):
        at = chance.randrange(1, pages)
        if sent[at] == sent[at - 1] < GEOMETRY.layers:
            with pytest.raises(ProtocolViolation, match="was due"):
                made.take(header((at, sent[at], 1)))
        made.take(header((page, layer, layers)))
        sent[page] += layers
    assert made.complete(End(pages=pages, first_token=None)) is None


@pytest.mark.parametrize("said", [0, 1, 3])
def test_the_number_of_pages_is_compared(said):
    """R28: End says how many were sent."""
    made = assembly(0, 2)
    made.take(header((0, 0, 4)))
    made.take(header((1, 0, 4)))
    with pytest.raises(ProtocolViolation, match=f"of {said} pages came, the end of 2"):
        made.complete(End(pages=said, first_token=None))


@pytest.mark.parametrize("token", [None, 5])
def test_the_first_token_comes_exactly_where_it_is_wanted(token):
    """R31."""
    made = Assembly(GEOMETRY, Want(tokens=64, held_tokens=64, first_token=token is None), 64)
    with pytest.raises(ProtocolViolation, match="first token"):
        made.complete(End(pages=0, first_token=token))


@pytest.mark.parametrize(("tokens", "held"), [(62, 0), (65, 0), (64, 65), (63, -1)])
def test_an_engine_may_not_want_what_was_not_offered(tokens, held):
    """Its mistake, not the peer's."""
    with pytest.raises(HandoffError, match="of 64"):
        Assembly(GEOMETRY, Want(tokens=tokens, held_tokens=held), 64)
