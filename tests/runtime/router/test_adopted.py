"""A cluster that is changed under a running router: replicas and paths come and go."""

from __future__ import annotations

import msgspec
import pytest
from runtime.router.cluster import CHAT, Cluster, cluster, eventually, plan_of
from runtime.router.fakes import FakeEngine

from pdctl.engines.channel import Members, Poll
from pdctl.runtime.router.members import Roster, Verdict
from pdctl.runtime.router.policy import Path
from pdctl.topology.model import Role

pytestmark = pytest.mark.anyio


async def change(c: Cluster, names: str, *, policy: str = "round_robin") -> None:
    """The keeper's part of a change: the new assignment, then the members that are left."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "o": Role.BOTH}
    for name in names.split():
        if name not in c.keeper.engines:
            engine = c.keeper.engines[name] = FakeEngine(name, roles[name[0]])
            await engine.start()
    for name in [name for name in c.keeper.engines if name not in names.split()]:
        await c.keeper.engines.pop(name).kill()
    plan = msgspec.structs.replace(plan_of(names), timeout_s=20.0)
    c.keeper.assignment = msgspec.structs.replace(c.keeper.assignment, plan=plan, policy=policy)
    c.keeper.push(c.keeper.assignment)
    c.keeper.push()


async def test_an_added_pair_takes_requests_after_its_canary() -> None:
    """U22 for a pair that the router did not know at its start; the old pair serves on."""
    async with cluster("p0 d0") as c:
        await change(c, "p0 p1 d0")
        await c.ready("p0>d0", "p1>d0")
        assert c.keeper.engines["p1"].bodies, "its canary went through it"
        paths = {(await c.ask(CHAT)).headers["x-pdctl-path"] for _ in range(4)}
        assert paths == {"p0>d0", "p1>d0"}
        await c.keeper.engines["p1"].kill()


async def test_a_removed_replica_is_gone_from_every_answer() -> None:
    """No path, no status row, no pin; what stays serves, and the policy is the new one."""
    async with cluster("p0 p1 d0 o0") as c:
        await change(c, "p1 d0", policy="least_loaded")
        await eventually(lambda: {p.text for p in c.router.roster.ready()} == {"p1>d0"})
        status = await (await c.http.get(c.url("/status"))).json()
        assert [r["name"] for r in status["replicas"]] == ["p1", "d0"]
        assert (await c.ask(CHAT)).headers["x-pdctl-path"] == "p1>d0"
        pinned = await c.ask(CHAT, x_pdctl_path="o0")
        assert (pinned.status, "unknown_path" in await pinned.text()) == (400, True)


async def test_a_router_without_its_agent_learns_the_change_when_it_attaches_again() -> None:
    """The assignment of the next attachment counts, not the first."""
    async with cluster("p0 p1 d0") as c:
        await c.keeper.stop()
        await change(c, "p0 d0")
        await c.keeper.start()
        await eventually(lambda: [p.text for p in c.router.roster.paths] == ["p0>d0"])
        assert (await c.ask(CHAT)).status == 200


async def test_a_replica_that_comes_under_an_old_name_needs_its_own_canary() -> None:
    """U14: verdicts go with their path, though incarnations are counted anew."""
    roster = Roster(plan_of("o0"))
    alone = Path(None, "o0")
    verdict = Verdict(incarnations=roster.incarnations(alone), cause=None)
    roster.end_canary(alone, verdict)
    assert roster.verdict(alone) is not None
    roster.adopt(plan_of("p0 d0"))
    roster.end_canary(alone, verdict)
    roster.adopt(plan_of("o0"))
    assert roster.verdict(alone) is None


async def test_draining_is_said_and_obeyed() -> None:
    """The report names who drains and what still runs there; a draining router refuses every
    new request with 503."""
    async with cluster("o0 o1") as c:
        c.keeper.set_state("o0", "draining")
        c.keeper.push(Poll(seq=3))
        await eventually(lambda: bool(c.keeper.reports))
        assert (c.keeper.reports[-1].draining, c.keeper.reports[-1].active["o0"]) == (("o0",), 0)
        assert (await c.ask(CHAT)).headers["x-pdctl-path"] == "o1"
        members = c.keeper._members()
        c.keeper.push(Members(version=99, members=members.members, draining=True))
        c.keeper.push(Poll(seq=4))
        await eventually(lambda: c.keeper.reports[-1].seq == 4)
        assert c.keeper.reports[-1].draining == ("o0", "router")
        refused = await c.ask(CHAT)
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] == "router_draining"
        ready = await c.http.get(c.url("/ready"))
        assert (ready.status, (await ready.json())["ready"]) == (503, [])
