"""Processes on other machines killed around a transfer: what the client is told, and when."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from e2e.far import D_HOST, P_HOST, FarCluster
from e2e.faults import ANSWER_S, Ledger, Request
from e2e.way import HELD_PAGES

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

MOMENTS = ("before", "during", "after")


def fault(far: FarCluster, prompt: str, moment: str, strike: Callable[[], object]) -> Request:
    """Strikes before a request, once three of its pages have gone, or in its answer; the
    request's `began_s` is the moment of the fault."""
    if moment == "before":
        strike()
        return Request(far, prompt)
    if moment == "during":
        far.link.hold(HELD_PAGES)
    request = Request(far, prompt, max_tokens=4 if moment == "during" else 1200)
    waited = far.link.held if moment == "during" else request.begun
    assert waited.wait(20), request.answer
    strike()
    request.began_s = time.monotonic()
    if moment == "during":
        far.link.release()
    return request


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("replica", "leg"), [("p0", "prefill"), ("d0", "decode")])
def test_an_engine_is_killed(
    far: FarCluster,
    ledger: Ledger,
    prompt: str,
    expected: str,
    replica: str,
    leg: str,
    moment: str,
) -> None:
    """U14, U29, R61: the leg and the replica are named; a prefill replica that dies after its
    pages have gone concerns nobody. It is started again and serves again."""
    pid = far.replica(replica)["pid"]
    request = fault(far, prompt, moment, lambda: far.kill(replica))
    if (replica, moment) == ("p0", "after"):
        request.good()
        took_s = None
    else:
        took_s = request.told(leg, replica)
    far.wait("a new process", lambda: far.replica(replica)["pid"] not in (None, pid))
    ledger.row(
        f"{leg} killed {moment} a transfer", request.answer, took_s, far.recovered(prompt, expected)
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_agent_is_killed(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str, moment: str
) -> None:
    """R61: no request notices; its watchdog starts it again, and it takes its replica over."""
    pid = far.replica("p0")["pid"]
    agent = far.agent(P_HOST)
    request = fault(far, prompt, moment, agent.kill)
    request.good()
    far.wait("a new agent", lambda: far.renewed(P_HOST, agent))
    left = far.recovered(prompt, expected)
    assert far.replica("p0")["pid"] == pid
    ledger.row(f"agent of prefill's host killed {moment} a transfer", request.answer, None, left)


def test_an_agent_and_its_watchdog_are_killed(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """R61: the keeper starts both again; the replica went on meanwhile."""
    pid = far.replica("d0")["pid"]
    agent, watchdog = far.agent(D_HOST), far.agent(D_HOST, "watchdog")

    def strike() -> None:
        watchdog.kill()
        agent.kill()

    request = fault(far, prompt, "during", strike)
    request.good()
    far.wait("a new agent", lambda: far.census() == far.at_rest, timeout_s=40)
    left = far.recovered(prompt, expected)
    assert far.replica("d0")["pid"] == pid
    ledger.row("agent of decode's host killed, and its watchdog", request.answer, None, left)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_router_is_killed(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str, moment: str
) -> None:
    """U14: its clients lose their connections; both engines drop what they did for them."""
    pids = {r["name"]: r["pid"] for r in far.status()["replicas"]}
    router = next(process for kind, process in far.processes() if kind == "router")
    request = fault(far, prompt, moment, router.kill)
    took_s = request.told("connection")
    left = far.recovered(prompt, expected)
    assert {r["name"]: r["pid"] for r in far.status()["replicas"]} == pids
    ledger.row(f"router killed {moment} a transfer", request.answer, took_s, left)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_keeper_is_killed(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str, moment: str
) -> None:
    """R61: it holds the ways to the engines of other hosts: their requests end with an error,
    at once, and its watchdog brings it, and the ways, back."""
    pids = {r["name"]: r["pid"] for r in far.status()["replicas"]}
    keeper = far.agent("local")
    request = fault(far, prompt, moment, keeper.kill).result()
    took_s = request.ended_s - request.began_s
    assert request.complete or request.error is not None
    assert request.complete or took_s < ANSWER_S
    far.wait("a new keeper", lambda: far.renewed("local", keeper))
    far.wait("every host", lambda: set(far.hosts().values()) == {"ready"})
    left = far.recovered(prompt, expected)
    assert {r["name"]: r["pid"] for r in far.status()["replicas"]} == pids
    ledger.row(f"keeper killed {moment} a transfer", request.answer, took_s, left)
