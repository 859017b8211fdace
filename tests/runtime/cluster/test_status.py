from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from runtime.clusters import written

from pdctl.engines.channel import MemberState, PairState
from pdctl.errors import AgentLost, HostError
from pdctl.handoff.counters import INNER, Counters, PairCounters
from pdctl.runtime.agent.journal import Entry, Journal
from pdctl.runtime.agent.view import RouterState, Snapshot
from pdctl.runtime.cluster.status import from_journal, from_snapshot
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.machine import process
from pdctl.topology.model import ComputeDtype, Engine, Host, Role

KEYS = {
    "name", "engine", "role", "host", "state", "pid", "uptime_s", "restarts", "compute_dtype",
}  # fmt: skip


def member(name: str, role: Role, counters: Counters) -> MemberState:
    return MemberState(
        name=name,
        engine=Engine.MLX,
        role=role,
        host="local",
        state="ready",
        pid=7,
        started_at=1.0,
        compute_dtype=ComputeDtype.FLOAT32,
        counters=counters,
    )


def test_a_pairs_counters_are_those_of_its_ends(tmp_path: Path) -> None:
    """DESIGN §6: the same names as in /status, per replica and per pair."""
    sent = PairCounters(handoffs_completed=2, host_bytes=64)
    got = PairCounters(handoffs_completed=1, host_bytes=64, imported_tokens=9)
    snapshot = Snapshot(
        host="local",
        run="r",
        version=1,
        members=(
            member("p0", Role.PREFILL, Counters(host_bytes=64, pairs={"d0": sent})),
            member("d0", Role.DECODE, Counters(imported_tokens=9, pairs={"p0": got})),
        ),
        router=RouterState(state="ready", url="http://127.0.0.1:1", requests_total=3),
        pairs=(PairState(prefill="p0", decode="d0", transport="tcp", state="ready"),),
    )
    with written(tmp_path) as (_, record):
        found = msgspec.to_builtins(from_snapshot(record, snapshot))
    (pair,) = found["pairs"]
    assert (pair["prefill"], pair["decode"], pair["state"]) == ("p0", "d0", "ready")
    assert (pair["handoffs_completed"], pair["imported_tokens"], pair["host_bytes"]) == (2, 9, 64)
    assert set(PairCounters.__struct_fields__) <= set(pair)
    for replica in found["replicas"]:
        assert set(replica) >= KEYS | (set(Counters.__struct_fields__) - set(INNER))
    assert found["router"]["requests_total"] == 3
    assert found["url"] == "http://127.0.0.1:1"


@pytest.mark.parametrize("alive", [True, False])
def test_without_an_agent_the_journal_speaks(tmp_path: Path, alive: bool) -> None:
    """What still runs is shown as unsupervised, what does not as gone, and why it is so."""
    here = process.mark_of(1) if alive else Mark(pid=1, birth="long ago")
    entry = Entry(name="p0", mark=here, started_at=1.0, incarnation=3, restarts=2, wanted=True)
    with written(tmp_path) as (_, record):
        record = msgspec.structs.replace(record, phase="running")
        found = from_journal(record, Journal(entries=(entry,)), AgentLost("no answer"))
    p0, d0 = found.replicas
    assert p0["state"] == ("unsupervised" if alive else "gone")
    assert p0["pid"] == (1 if alive else None)
    assert p0["restarts"] == 2
    assert (d0["state"], d0["pid"]) == ("gone", None)
    assert (found.phase, found.problem) == ("agent lost", "no answer")
    assert found.hint == f"`pdctl down {record.cluster}` ends what is left"
    assert found.pairs[0]["state"] == "unknown"
    assert set(p0) >= KEYS


@pytest.mark.parametrize("keeper", ["local", "far"])
def test_of_a_host_that_cannot_be_asked_nothing_is_claimed(tmp_path: Path, keeper: str) -> None:
    """Its processes may well run: they are unknown, not gone."""
    with written(tmp_path) as (_, record):
        hosts = {**record.topology.hosts, "far": Host(name="far", ssh="far")}
        d0 = msgspec.structs.replace(record.plan.replica("d0"), host="far")
        plan = msgspec.structs.replace(
            record.plan, replicas=(record.plan.replica("p0"), d0), router_host=keeper
        )
        topology = msgspec.structs.replace(record.topology, hosts=hosts)
        far = msgspec.structs.replace(record, topology=topology, plan=plan)
        found = from_journal(far, Journal(), HostError("no answer", hint="plug it in"))
    assert found.hint == "plug it in"
    states = {r["name"]: r["state"] for r in found.replicas}
    assert states == {"p0": "gone" if keeper == "local" else "unknown", "d0": "unknown"}
    assert found.router["state"] == ("gone" if keeper == "local" else "unknown")
