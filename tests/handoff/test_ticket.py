"""Tickets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import TicketRejected
from pdctl.handoff.ticket import mint, verify

KEY = b"k" * 32
RIGHT = {"room": 9, "prefill": "p0", "decode": "d0", "digest": "ab"}


def minted(**changes) -> str:
    return mint(KEY, *{**RIGHT, **changes}.values(), 1000.5)


def test_a_ticket_holds_until_its_expiry():
    """The router's word holds to the millisecond, and not longer."""
    assert verify(KEY, minted(), now_s=1000.4, **RIGHT) == 1000.5
    with pytest.raises(TicketRejected, match="expired"):
        verify(KEY, minted(), now_s=1000.5, **RIGHT)


@pytest.mark.parametrize(
    "changes", [{"room": 8}, {"prefill": "p1"}, {"decode": "d1"}, {"digest": "ac"}]
)
def test_a_ticket_is_for_one_room_and_one_pair(changes):
    """A ticket for another room, replica or contract is refused."""
    with pytest.raises(TicketRejected, match="not minted"):
        verify(KEY, minted(**changes), now_s=0, **RIGHT)


def test_names_cannot_be_shifted_into_each_other():
    """ "a" and "bc" is not "ab" and "c"."""
    ticket = minted(prefill="ab", decode="c")
    with pytest.raises(TicketRejected):
        verify(KEY, ticket, now_s=0, **{**RIGHT, "prefill": "a", "decode": "bc"})


def test_another_clusters_key_is_refused():
    """A ticket of an earlier `up` opens nothing."""
    with pytest.raises(TicketRejected, match="not minted"):
        verify(b"x" * 32, minted(), now_s=0, **RIGHT)


def test_expiry_cannot_be_extended():
    """The expiry is under the MAC."""
    version, _, mac = minted().split(".")
    with pytest.raises(TicketRejected, match="not minted"):
        verify(KEY, f"{version}.99999999.{mac}", now_s=0, **RIGHT)


@given(st.text(max_size=200) | st.from_regex(r"v1\.[0-9]{1,20}\.[0-9a-f]{0,70}"))
def test_any_other_text_is_refused(text):
    """Whatever a peer sends as a ticket ends as TicketRejected."""
    with pytest.raises(TicketRejected):
        verify(KEY, text, now_s=0, **RIGHT)
