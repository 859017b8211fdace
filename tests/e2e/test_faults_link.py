"""The data link between two machines at fault in mid-transfer: nothing is committed, both ends
let go, the client is told, and the next request is right."""

from __future__ import annotations

import time

import pytest
from e2e import data_link
from e2e.data_link import Edit
from e2e.far import FarCluster
from e2e.faults import ANSWER_S, SILENCE_S, Ledger, Request

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

HELD_PAGES = 3


def told(request: Request, since_s: float, within_s: float = ANSWER_S) -> float:
    """An error object before any token, in time, that names a leg and its replica."""
    took_s = request.told(since_s=since_s, within_s=within_s)
    assert request.status in (502, 503, 504)
    assert not request.text
    legs = [f'{leg} replica "{name}"' for leg, name in (("prefill", "p0"), ("decode", "d0"))]
    assert any(leg in request.answer for leg in legs), request.answer
    return took_s


@pytest.mark.parametrize(
    ("fault", "edit"),
    [
        ("cut inside a page", data_link.cut_off),
        ("a page truncated", data_link.truncated),
        ("a page duplicated", data_link.duplicated),
        ("a page missing", data_link.skipped),
        ("two pages reordered", data_link.Reordered()),
        ("a page of 2 GiB announced", data_link.oversized),
        ("a bit of a page flipped", data_link.flipped),
        ("garbage for a page", data_link.garbage),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_frames_to_the_receiver_are_wrong(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str, fault: str, edit: Edit
) -> None:
    """U29: whatever is not exactly what was promised ends the handoff, and commits nothing."""
    pids = [r["pid"] for r in far.status()["replicas"]]
    far.link.to_decode = edit
    request = Request(far, prompt)
    took_s = told(request, request.began_s)
    ledger.row(f"data link: {fault}", request.answer, took_s, far.recovered(prompt, expected))
    assert [r["pid"] for r in far.status()["replicas"]] == pids


def test_frames_to_the_sender_are_wrong(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    far.link.to_prefill = data_link.garbled_grant
    request = Request(far, prompt)
    took_s = told(request, request.began_s)
    left = far.recovered(prompt, expected)
    ledger.row("data link: garbage for the receiver's grant", request.answer, took_s, left)


def test_the_link_is_cut(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> None:
    """U10: both ends are freed at once."""
    far.link.hold(HELD_PAGES)
    request = Request(far, prompt)
    assert far.link.held.wait(20)
    cut_s = time.monotonic()
    far.link.cut()
    took_s = told(request, cut_s)
    left = far.recovered(prompt, expected)
    ledger.row("data link: cut after 3 pages", request.answer, took_s, left)


def test_the_link_freezes(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> None:
    """R5's other half: 5 s of silence end it at both ends, long before its deadline."""
    far.link.hold(HELD_PAGES)
    request = Request(far, prompt)
    assert far.link.held.wait(20)
    took_s = told(request, time.monotonic(), SILENCE_S)
    left = far.left(SILENCE_S)
    far.recovered(prompt, expected)
    ledger.row("data link: frozen after 3 pages", request.answer, took_s, left)


def test_the_link_is_slow(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> None:
    """R5: bytes that come slowly are progress, however long they take in all."""
    far.link.bytes_per_s = 150e3
    request = Request(far, prompt, max_tokens=8)
    request.good(expected)
    took_s = request.ended_s - request.began_s
    assert took_s > far.timeout_s
    left = far.recovered(prompt, expected)
    ledger.row(f"data link: 150 kB/s, deadline {far.timeout_s:g} s", request.answer, took_s, left)


def test_the_sender_is_paced(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> None:
    """R5: the same where the sender's own kernel is what is slow; `up` brings it there."""
    far.write(p_env='PDCTL_PACING_BYTES_PER_S = "150000"')
    far.pdctl("up", far.topology)
    try:
        request = Request(far, prompt, max_tokens=8)
        request.good(expected)
    finally:
        far.write()
        far.pdctl("up", far.topology)
    took_s = request.ended_s - request.began_s
    assert took_s > far.timeout_s
    left = far.recovered(prompt, expected)
    ledger.row(f"sender paced, deadline {far.timeout_s:g} s", request.answer, took_s, left)
