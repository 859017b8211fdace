"""Which of several failures the client is told."""

from __future__ import annotations

from itertools import permutations

import pytest

from pdctl.engines.channel import Failed
from pdctl.errors import PeerLost
from pdctl.runtime.router.blame import blame, explained
from pdctl.runtime.router.failure import ENGINE_ERROR, RequestFailed

DEAD = RequestFailed(502, "dead", code="replica_lost", dead=True, leg="prefill", replica="p0")
CLIENTS = RequestFailed(400, "clients")
CAUSE = RequestFailed(502, "cause", code="protocol", leg="prefill", replica="p0")
ECHO = RequestFailed(502, "echo", code=PeerLost.cause, leg="decode", replica="d0")
SILENT = RequestFailed(502, "no", code=ENGINE_ERROR, leg="decode", replica="d0")
"""vLLM's answer for every failed handoff."""


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ([DEAD, ECHO], DEAD),
        ([CAUSE, ECHO], CAUSE),
        ([CLIENTS, ECHO], CLIENTS),
        ([CLIENTS, CAUSE], CLIENTS),
        ([ECHO], ECHO),
        ([CAUSE, SILENT], CAUSE),
        ([CLIENTS, SILENT], CLIENTS),
    ],
)
def test_the_most_telling_one_is_told_in_any_order(
    failures: list[RequestFailed], told: RequestFailed
) -> None:
    """R67, R18."""
    for order in permutations(failures):
        assert blame(order) is told


def report(cause: str, leg: str = "prefill") -> Failed:
    return Failed(room=1, leg=leg, cause=cause, detail="its checksum is wrong")


def test_an_engines_own_report_explains_an_echo() -> None:
    """R67: the cause that travelled to the agent, not the lost peer."""
    found = explained(ECHO, [report("protocol")])
    assert found.code == "protocol"
    assert "prefill reported protocol: its checksum is wrong" in found.message


def test_a_dead_replica_stays_dead_when_explained() -> None:
    found = explained(DEAD, [report("protocol")])
    assert (found.code, found.dead, found.replica) == ("replica_lost", True, "p0")


@pytest.mark.parametrize("failure", [CLIENTS, CAUSE])
def test_a_failure_that_names_its_cause_is_left_alone(failure: RequestFailed) -> None:
    assert explained(failure, [report("protocol")]) is failure


def test_echoes_explain_nothing() -> None:
    assert explained(ECHO, [report("peer_lost"), report("cancelled")]) is ECHO
    assert explained(ECHO, []) is ECHO


@pytest.mark.parametrize(
    ("cause", "status", "told"),
    [
        ("protocol", 502, 'decode replica "d0": its checksum is wrong'),
        ("peer_lost", 502, 'decode replica "d0": its checksum is wrong'),
        ("queue_full", 503, 'decode replica "d0": its checksum is wrong'),
        ("over_budget", 400, "its checksum is wrong"),
    ],
)
def test_an_answer_without_a_cause_is_told_as_the_report_says(
    cause: str, status: int, told: str
) -> None:
    """R40, R67: a failed handoff is the same error whichever engine its leg ran on."""
    found = explained(SILENT, [report(cause, "decode")])
    assert (found.status, found.code, found.message) == (status, cause, told)
    assert (found.leg, found.replica) == ("decode", "d0")


def test_a_report_of_the_other_leg_is_told_as_such() -> None:
    found = explained(SILENT, [report("tokens")])
    assert found.message == ('decode replica "d0": prefill reported tokens: its checksum is wrong')


def test_an_echo_explains_only_where_nothing_else_does() -> None:
    found = explained(SILENT, [report("tokens"), report("peer_lost", "decode")])
    assert found.code == "tokens"
    assert explained(SILENT, []) is SILENT
