"""Which of several failures the client is told."""

from __future__ import annotations

from itertools import permutations

import pytest

from pdctl.engines.channel import Failed
from pdctl.errors import PeerLost
from pdctl.runtime.router.blame import blame, explained
from pdctl.runtime.router.failure import RequestFailed

DEAD = RequestFailed(502, "dead", code="replica_lost", dead=True, leg="prefill", replica="p0")
CLIENTS = RequestFailed(400, "clients")
CAUSE = RequestFailed(502, "cause", code="protocol", leg="prefill", replica="p0")
ECHO = RequestFailed(502, "echo", code=PeerLost.cause, leg="decode", replica="d0")


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ([DEAD, ECHO], DEAD),
        ([CAUSE, ECHO], CAUSE),
        ([CLIENTS, ECHO], CLIENTS),
        ([CLIENTS, CAUSE], CLIENTS),
        ([ECHO], ECHO),
    ],
)
def test_the_most_telling_one_is_told_in_any_order(
    failures: list[RequestFailed], told: RequestFailed
) -> None:
    """R67, R18."""
    for order in permutations(failures):
        assert blame(order) is told


def report(cause: str) -> Failed:
    return Failed(room=1, leg="prefill", cause=cause, detail="its checksum is wrong")


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
