"""The roster: what the agent says, what the router saw, and the socket between them."""

from __future__ import annotations

import asyncio

import pytest
from runtime.router.cluster import CHAT, PATIENCE_S, cluster, eventually, plan_of
from runtime.router.fakes import FakeEngine, cuts, stall

from pdctl.engines.channel import Members, MemberState, Poll
from pdctl.errors import LaunchError
from pdctl.runtime.router import link, probes
from pdctl.runtime.router.members import Roster, Verdict
from pdctl.runtime.router.policy import Path
from pdctl.runtime.router.server import attached, split_bind
from pdctl.topology.model import Engine, Role

pytestmark = pytest.mark.anyio

PAIR = Path("p0", "d0")


def member(name: str, state: str = "ready", incarnation: int = 1) -> MemberState:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "o": Role.BOTH}[name[0]]
    return MemberState(
        name=name,
        engine=Engine.MLX,
        role=role,
        host="local",
        state=state,
        incarnation=incarnation,
    )


def roster_of(*members: MemberState) -> Roster:
    roster = Roster(plan_of("p0 d0 o0"))
    roster.update(Members(version=1, members=members))
    return roster


def passed(roster: Roster, path: Path) -> None:
    roster.end_canary(path, Verdict(incarnations=roster.incarnations(path), cause=None))


async def test_a_pair_is_ready_after_its_canary_and_not_before() -> None:
    """U22: both ends ready is not enough."""
    roster = roster_of(member("p0"), member("d0"))
    assert roster.state(PAIR)[0] == "canary"
    passed(roster, PAIR)
    assert roster.state(PAIR) == ("ready", None)


@pytest.mark.parametrize("state", ["starting", "backoff", "stopped", "failed", "draining"])
@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_a_pair_closes_with_either_end(name: str, state: str) -> None:
    """U19: an end in any other state closes the pair, and only the pair (R71)."""
    roster = roster_of(member("p0"), member("d0"), member("o0"))
    passed(roster, PAIR)
    passed(roster, Path(None, "o0"))
    others = [member(n) for n in ("p0", "d0", "o0") if n != name]
    roster.update(Members(version=2, members=(member(name, state), *others)))
    assert [path.text for path in roster.ready()] == ["o0"]
    assert name in (roster.state(PAIR)[1] or "")


async def test_before_the_first_picture_nothing_is_said_of_a_replica() -> None:
    """`up` shows it right after "replica p0 ready"."""
    state, cause = Roster(plan_of("p0 d0 o0")).state(PAIR)
    assert (state, cause) == ("waiting", "the router has not heard of p0 yet")


async def test_a_verdict_holds_for_its_incarnations_only() -> None:
    """U14: prefill restarts; the pair needs a new canary."""
    roster = roster_of(member("p0"), member("d0"))
    passed(roster, PAIR)
    roster.update(Members(version=2, members=(member("p0", incarnation=2), member("d0"))))
    assert roster.state(PAIR)[0] == "canary"


async def test_a_restart_between_two_pictures_loses_the_old_seat() -> None:
    """R49: the agent's pictures skip the death; requests of the old incarnation still end."""
    roster = roster_of(member("p0"), member("d0"))
    old = roster.seat("p0")
    roster.update(Members(version=2, members=(member("p0", incarnation=2), member("d0"))))
    assert old is not None
    assert old.lost.is_set()
    assert roster.seat("p0") is not old


async def test_an_agent_that_came_back_loses_no_running_request() -> None:
    """The new agent says "starting" until the replica has attached again: no new request, but
    the running ones go on."""
    roster = roster_of(member("p0"), member("d0"))
    passed(roster, PAIR)
    seat = roster.seat("d0")
    assert seat is not None
    roster.update(Members(version=1, members=(member("p0"), member("d0", "starting"))))
    assert not seat.lost.is_set()
    assert roster.state(PAIR)[0] == "waiting"
    roster.update(Members(version=2, members=(member("p0"), member("d0"))))
    assert roster.state(PAIR)[0] == "ready"


async def test_draining_keeps_running_requests() -> None:
    roster = roster_of(member("p0"), member("d0"))
    roster.update(Members(version=2, members=(member("p0", "draining"), member("d0"))))
    seat = roster.seat("p0")
    assert seat is not None
    assert not seat.lost.is_set()


async def test_a_suspect_is_closed_until_it_answers() -> None:
    """A passive mark closes the pair at once; trust opens it without a new canary."""
    roster = roster_of(member("p0"), member("d0"))
    passed(roster, PAIR)
    seat = roster.seat("d0")
    assert seat is not None
    roster.suspect(seat, "refused")
    assert roster.state(PAIR) == ("waiting", "refused")
    roster.trust(seat)
    assert roster.state(PAIR)[0] == "ready"


async def test_a_broken_connection_closes_the_replica_until_a_probe_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live replica that broke one connection is back after its next probe."""
    monkeypatch.setattr(probes, "PROBE_SUSPECT_EVERY_S", 0.02)
    async with cluster("o0") as c:
        c["o0"].on["alone"] = cuts
        c["o0"].on["health"] = _held
        await c.router.roster.changed() if not c.router.roster.ready() else None
        first = await c.ask(CHAT)
        second = await c.ask(CHAT)
        assert {first.status, second.status} <= {502, 503}
        await eventually(lambda: not c.router.roster.ready())
        c["o0"].on.clear()
        c["o0"].release.set()
        await c.ready("o0")
        assert (await c.ask(CHAT)).status == 200


async def _held(engine: FakeEngine, request, body):
    await stall(engine)
    from aiohttp import web

    return web.json_response({})


async def test_the_agent_may_die_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router serves with its last picture meanwhile, dials again, and repeats its pair
    states to the new agent."""
    monkeypatch.setattr(link, "PAUSES_S", (0.01,))
    async with cluster("p0 d0") as c:
        await c.keeper.stop()
        assert (await c.ask(CHAT)).status == 200
        status = await (await c.http.get(c.url("/status"))).json()
        assert status["fresh"] is False
        c.keeper.heard.clear()
        await c.keeper.start()
        await eventually(lambda: c.keeper.attached == 2 and c.keeper.last_states is not None)
        assert c.keeper.last_states.pairs[0].state == "ready"
        assert (await c.ask(CHAT)).status == 200


async def test_poll_is_answered_with_counts() -> None:
    async with cluster("o0") as c:
        await c.ask(CHAT)
        await c.nothing_open()
        c.keeper.push(Poll(seq=7))
        await eventually(lambda: bool(c.keeper.reports))
        (report,) = c.keeper.reports
        assert (report.seq, report.requests_total, report.requests_active) == (7, 1, 0)


async def test_a_silent_agent_does_not_hang_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: Refresh is bounded; the last picture is shown and said to be old."""
    monkeypatch.setattr(link, "REFRESH_TIMEOUT_S", 0.05)
    async with cluster("o0") as c:
        c.keeper.answers_refresh = False
        status = await (await c.http.get(c.url("/status"))).json()
        assert status["fresh"] is False
        assert [replica["name"] for replica in status["replicas"]] == ["o0"]


async def test_no_agent_at_the_start_is_an_error(tmp_path) -> None:
    with pytest.raises(LaunchError):
        await attached(str(tmp_path / "none.sock"))


async def test_sixteen_streams_at_once_are_each_complete() -> None:
    """Concurrent streams over two pairs."""
    async with cluster("p0 p1 d0", policy="least_loaded") as c:
        asked = [c.ask({**CHAT, "stream": True}) for _ in range(64)]
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(*asked)
        for answer in found:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        paths = {answer.headers["x-pdctl-path"] for answer in found}
        assert paths == {"p0>d0", "p1>d0"}


@pytest.mark.parametrize(
    ("bind", "split"),
    [("127.0.0.1:8000", ("127.0.0.1", 8000)), ("[::1]:80", ("::1", 80))],
)
def test_a_bind_address_is_split(bind: str, split: tuple[str, int]) -> None:
    """R59: IPv6 too."""
    assert split_bind(bind) == split
