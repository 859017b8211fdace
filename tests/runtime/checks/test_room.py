"""Memory of devices, against a plan whose replicas name them."""

from __future__ import annotations

import msgspec
import pytest
from topology.test_nixl import auto
from topology.texts import GOOD

from pdctl.runtime.checks import room
from pdctl.runtime.checks.machines import Seen
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.survey import Device
from pdctl.topology.load import loads
from pdctl.topology.model import Engine
from pdctl.topology.plan import Plan, derive

GIB = 1 << 30


def planned(*devices: int) -> Plan:
    topology, _ = loads(GOOD)
    assert topology is not None
    plan = derive(topology)
    replicas = tuple(
        msgspec.structs.replace(r, declared=msgspec.structs.replace(r.declared, devices=devices))
        for r in plan.replicas
    )
    return msgspec.structs.replace(plan, replicas=replicas)


def seen(*free_bytes: int) -> dict[str, Seen]:
    devices = tuple(
        Device(index=i, name="NVIDIA L4", total_bytes=24 * GIB, free_bytes=free)
        for i, free in enumerate(free_bytes)
    )
    facts = msgspec.structs.replace(
        LocalHost().survey.facts(), devices=devices, memory_free_bytes=64 * GIB
    )
    one = Seen(facts=facts, clock_offset_s=0.0, clock_doubt_s=0.0, round_trip_s=None)
    return {"local": one}


def test_a_device_that_is_not_there_is_an_error() -> None:
    """Where the host's devices are known; where they are not, nothing is said."""
    found = room.check_room(planned(3), {}, seen(GIB, GIB))
    assert [d.code for d in found] == ["host.device", "host.device"]
    assert found[0].summary == 'replica "p0": host "local" has no device 3; it has 0, 1'
    assert room.check_room(planned(3), {}, seen()) == []


def test_replicas_of_one_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and KV lie on the device, the page budget in the host's memory."""
    monkeypatch.setattr(room, "GPU_ENGINES", frozenset({Engine.MLX}))
    monkeypatch.setattr(room, "_need", lambda replica, facts: 3 * GIB)
    assert room.check_room(planned(0), {}, seen(7 * GIB)) == []
    (told,) = room.check_room(planned(0), {}, seen(5 * GIB))
    assert told.summary == (
        'host "local": the replicas need about 6.0 GiB of memory of device 0 (NVIDIA L4), and '
        "5.0 GiB is free"
    )
    apart = planned(0)
    second = msgspec.structs.replace(apart.replicas[1].declared, devices=(1,))
    replicas = (apart.replicas[0], msgspec.structs.replace(apart.replicas[1], declared=second))
    apart = msgspec.structs.replace(apart, replicas=replicas)
    assert room.check_room(apart, {}, seen(5 * GIB, 5 * GIB)) == []


def test_pages_on_their_way_count_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two devices: a prefill replica's budget on its device, not in the host's memory, and
    what a decode replica reads into."""
    topology, _ = loads(auto("vllm", "vllm", "p0", "d0"))
    assert topology is not None
    plan = msgspec.structs.replace(derive(topology), buffer_bytes=3 * GIB)
    monkeypatch.setattr(room, "_need", lambda replica, facts: GIB)
    here = seen(5 * GIB)
    assert room.check_room(plan, {}, seen(6 * GIB)) == []
    (told,) = room.check_room(plan, {}, here)
    assert "need about 5.1 GiB of memory of device 0" in told.summary
    assert room._budget(plan.replica("p0"), plan) == 0
    over_tcp = tuple(msgspec.structs.replace(p, on_device=False) for p in plan.pairs)
    plan = msgspec.structs.replace(plan, pairs=over_tcp)
    assert room.check_room(plan, {}, here) == []
    assert room._budget(plan.replica("p0"), plan) == 3 * GIB
