"""What a drain waits for, decided on snapshots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdctl.engines.channel import MemberState, PairState
from pdctl.handoff.counters import Counters
from pdctl.runtime.agent.view import RouterState, Snapshot
from pdctl.runtime.change.draining import active, closing
from pdctl.runtime.change.rolling import (
    NotBack,
    Rolling,
    broken,
    has_joined,
    has_left,
    is_newer,
)
from pdctl.topology.model import ComputeDtype, Dtype, Engine, Replica, Role, Transport
from pdctl.topology.plan import PairPlan, Plan, ReplicaPlan

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "o": Role.BOTH}


def member(
    name: str, state: str = "ready", *, incarnation: int = 1, running: int = 0
) -> MemberState:
    return MemberState(
        name=name,
        engine=Engine.MLX,
        role=ROLES[name[0]],
        host="local",
        state=state,
        incarnation=incarnation,
        counters=Counters(requests_active=running),
    )


def path(prefill: str, decode: str, state: str, *incarnations: int) -> PairState:
    return PairState(
        prefill=prefill, decode=decode, transport="tcp", state=state, incarnations=incarnations
    )


def snapshot(
    *members: MemberState, router: RouterState | None = None, pairs: tuple[PairState, ...] = ()
) -> Snapshot:
    router = router or RouterState(state="ready")
    return Snapshot(host="local", run="r", version=1, members=members, router=router, pairs=pairs)


def plan(*names: str) -> Plan:
    replicas = tuple(
        ReplicaPlan(
            name=name,
            host="local",
            engine=Engine.MLX,
            role=ROLES[name[0]],
            model="/m",
            dtype=Dtype.FLOAT16,
            compute_dtype=ComputeDtype.FLOAT32,
            http_port=1,
            declared=Replica(name=name, engine=Engine.MLX, role=ROLES[name[0]], model="/m"),
        )
        for name in names
    )
    return Plan(
        cluster="c",
        model="m",
        dtype=Dtype.FLOAT16,
        context_length=256,
        contract_digest=None,
        token_kv_bytes=None,
        page_bytes=None,
        buffer_bytes=None,
        timeout_s=60.0,
        router_host="local",
        router_bind="127.0.0.1:1",
        agent_ports={"local": 2},
        replicas=replicas,
        pairs=tuple(
            PairPlan(prefill=p, decode=d, transport=Transport.TCP, reason="")
            for p in names
            for d in names
            if p[0] == "p" and d[0] == "d"
        ),
    )


@pytest.mark.parametrize(
    ("state", "router", "running", "count"),
    [
        ("draining", RouterState(state="ready"), 0, None),
        ("draining", RouterState(state="ready", draining=("p0",), active={"p0": 2}), 0, 2),
        ("draining", RouterState(state="ready", draining=("p0",)), 1, 1),
        ("draining", RouterState(state="ready", draining=("p0",)), 0, 0),
        ("draining", RouterState(state="backoff"), 3, 3),
        ("backoff", RouterState(state="ready", active={"p0": 1}), 1, 0),
    ],
    ids=["unheard", "routed", "engine", "idle", "no-router", "dead"],
)
def test_active_is_what_either_end_counts_once_the_router_has_heard(
    state: str, router: RouterState, running: int, count: int | None
) -> None:
    """Until the router says that it knows, it may still send a new request there."""
    assert active(snapshot(member("p0", state, running=running), router=router), "p0") == count


def test_a_draining_router_is_idle_by_its_own_count() -> None:
    draining = RouterState(state="draining", draining=("router",), requests_active=4)
    assert active(snapshot(router=draining), "router") == 4
    assert active(snapshot(router=RouterState(state="draining")), "router") is None
    assert active(snapshot(router=RouterState(state="failed")), "router") == 0


def test_closing_names_what_goes_and_what_stays() -> None:
    pairs = (path("p0", "d0", "ready"), path("p1", "d0", "ready"), path("p1", "d1", "failed"))
    assert closing(snapshot(pairs=pairs), "p0") == (("p0>d0",), ("p1>d0",))
    assert closing(snapshot(pairs=pairs), "d0") == (("p0>d0", "p1>d0"), ())


def test_it_has_joined_when_its_paths_hold_for_this_incarnation() -> None:
    """U14: what the router said of an earlier incarnation counts for nothing, nor does a path
    that it has not announced yet; a path whose other end does not serve is not waited for."""
    both = (member("p0", incarnation=2), member("d0"))
    whole = plan("p0", "d0")
    assert not has_joined(snapshot(*both), "p0", whole)
    assert not has_joined(snapshot(*both, pairs=(path("p0", "d0", "ready", 1, 1),)), "p0", whole)
    assert has_joined(snapshot(*both, pairs=(path("p0", "d0", "ready", 2, 1),)), "p0", whole)
    other_dead = (member("p0", incarnation=2), member("d0", "failed"))
    assert has_joined(snapshot(*other_dead), "p0", whole)
    starting = (member("p0", "starting", incarnation=2), member("d0", "failed"))
    assert not has_joined(snapshot(*starting), "p0", whole)


def test_it_is_broken_when_it_ends_or_fails_its_canary() -> None:
    """The patient leave its agent to try again; a canary that fails is said at once."""
    crashed = snapshot(member("p0", "backoff"), member("d0"))
    assert broken(crashed, "p0", patient=True) is None
    assert broken(crashed, "p0", patient=False) == "it is backoff"
    assert broken(snapshot(member("p0", "failed")), "p0", patient=True) == "it is failed"
    canary = path("p0", "d0", "failed", 1, 1)
    told = broken(snapshot(member("p0"), member("d0"), pairs=(canary,)), "p0", patient=True)
    assert told is not None
    assert "p0>d0 failed its canary" in told


def test_it_has_left_once_it_serves_no_more_or_another_does() -> None:
    before = snapshot(member("p0"))
    assert not has_left(before, before, "p0")
    assert has_left(snapshot(member("p0", "stopping")), before, "p0")
    assert has_left(snapshot(member("p0", incarnation=2)), before, "p0")
    assert is_newer(snapshot(router=RouterState(state="ready", restarts=1)), before, "router")


class Keeper:
    """Shows one picture."""

    def __init__(self, shown: Snapshot) -> None:
        self.shown = shown

    async def snapshot(self) -> Snapshot:
        return self.shown


@pytest.mark.anyio
async def test_a_canary_that_fails_keeps_its_replica_from_rejoining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`up` on a running cluster, and `restart`, fail where a pair's KV cache is not its own."""

    async def not_back(self: Rolling, name: str, cause: str) -> NotBack:
        return NotBack(cause)

    monkeypatch.setattr(Rolling, "_not_back", not_back)
    canary = path("p0", "d0", "failed", 2, 1)
    shown = snapshot(member("p0", incarnation=2), member("d0"), pairs=(canary,))
    record = SimpleNamespace(plan=plan("p0", "d0"))
    work = Rolling(None, record, Keeper(shown), {}, lambda event: None)
    with pytest.raises(NotBack, match="p0>d0 failed its canary"):
        await work.rejoined("p0", snapshot(member("p0"), member("d0")), 5.0)
