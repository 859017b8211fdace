"""What a pair's link carries, over real sockets, beside the port that the cluster has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from ports import free_port
from runtime.bench.bench_router import plan, replica_plan, topology

from pdctl.errors import HostError
from pdctl.runtime.bench.links import Links, measure_links
from pdctl.runtime.bench.target import Target
from pdctl.runtime.hosts.local import LocalHost
from pdctl.topology.model import Role, Transport


@pytest.fixture
def port() -> Iterator[int]:
    """Where a sender of the cluster listens."""
    found = free_port(run=3)
    with socket.create_server(("127.0.0.1", found)):
        yield found


def target(port: int, *, env: dict[str, str] | None = None, **pair: Any) -> Target:
    prefill = replica_plan("p0", Role.PREFILL)
    declared = msgspec.structs.replace(prefill.declared, env=env or {})
    prefill = msgspec.structs.replace(prefill, data_port=port, declared=declared)
    decodes = [replica_plan(name, Role.DECODE) for name in ("d0", "d1")]
    planned = plan(prefill, *decodes, pairs=(("p0", "d0"), ("p0", "d1")))
    pairs = tuple(msgspec.structs.replace(one, **pair) for one in planned.pairs)
    planned = msgspec.structs.replace(planned, pairs=pairs)
    return Target(plan=planned, topology=topology(planned), url="")


def measured(asked: Target) -> Links:
    return measure_links(asked, {"local": LocalHost("local")})


def test_every_pair_has_a_speed_and_a_round_trip(port: int) -> None:
    links = measured(target(port))
    assert links.missing == ()
    assert list(links.found) == ["p0>d0", "p0>d1"]
    for link in links.found.values():
        assert link.bytes_per_s > 0
        assert link.round_trip_ms is not None
        assert link.round_trip_ms > 0


def test_a_link_that_two_pairs_share_is_measured_once(port: int) -> None:
    links = measured(target(port))
    assert links.found["p0>d0"] == links.found["p0>d1"]


def test_a_paced_sender_s_link_is_as_fast_as_its_pace(port: int) -> None:
    links = measured(target(port, env={"PDCTL_PACING_BYTES_PER_S": "250000"}))
    assert links.found["p0>d0"].bytes_per_s == 250_000.0


def test_a_transport_that_is_not_tcp_has_no_figure_of_tcp(port: int) -> None:
    assert measured(target(port, transport=Transport.NIXL)) == Links()


def test_a_host_that_is_away_is_named_and_nothing_is_raised(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = LocalHost("local")

    def away() -> list[Any]:
        raise HostError('host "local": it is away')

    monkeypatch.setattr(host.survey, "listeners", away)
    links = measure_links(target(port), {"local": host})
    assert links.found == {}
    assert links.missing == ('links of local were not measured: host "local": it is away',)


def test_a_closed_link_is_named_with_its_reason(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = LocalHost("local")

    def refused(*_: Any, **__: Any) -> None:
        raise HostError("the port can't be listened on")

    monkeypatch.setattr(host.survey, "answer", refused)
    links = measure_links(target(port), {"local": host})
    assert links.missing == tuple(
        f"the link of {path} was not measured: the port can't be listened on"
        for path in ("p0>d0", "p0>d1")
    )
