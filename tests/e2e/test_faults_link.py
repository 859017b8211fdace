"""The data link between two machines at fault in mid-transfer: nothing is committed, both ends
let go, the client is told, and the next request is right."""

from __future__ import annotations

import pytest
from e2e.far import FarCluster
from e2e.way import EDITS, Way

pytestmark = [pytest.mark.engine, pytest.mark.ssh]


@pytest.mark.parametrize("fault", EDITS)
def test_frames_to_the_receiver_are_wrong(way: Way, fault: str) -> None:
    """U29: whatever is not exactly what was promised ends the handoff, and commits nothing."""
    way.broken(fault)


def test_frames_to_the_sender_are_wrong(way: Way) -> None:
    way.grant_broken()


def test_the_link_is_cut(way: Way) -> None:
    """U10: both ends are freed at once."""
    way.cut()


def test_the_link_freezes(way: Way) -> None:
    """R5's other half: 5 s of silence end it at both ends, long before its deadline."""
    way.frozen()


def test_the_link_is_slow(far: FarCluster, way: Way) -> None:
    """R5: bytes that come slowly are progress, however long they take in all."""
    far.link.bytes_per_s = 150e3
    request = way.ask(8)
    request.good(way.expected)
    took_s = request.ended_s - request.began_s
    assert took_s > far.timeout_s
    fault = f"data link: 150 kB/s, deadline {far.timeout_s:g} s"
    way.row(fault, request.answer, took_s, way.recovered())


def test_the_sender_is_paced(far: FarCluster, way: Way) -> None:
    """R5: the same where the sender's own kernel is what is slow; `up` brings it there."""
    far.write(p_env='PDCTL_PACING_BYTES_PER_S = "150000"')
    far.pdctl("up", far.topology)
    try:
        request = way.ask(8)
        request.good(way.expected)
    finally:
        far.write()
        far.pdctl("up", far.topology)
    took_s = request.ended_s - request.began_s
    assert took_s > far.timeout_s
    fault = f"sender paced, deadline {far.timeout_s:g} s"
    way.row(fault, request.answer, took_s, way.recovered())
