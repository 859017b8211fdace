"""What each pair's link carries, measured before the sweep and in the same run."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdctl.engines.commands import environment_of
from pdctl.errors import PdctlError
from pdctl.handoff.transport.sockets import PACING_ENV
from pdctl.runtime.bench.target import Target
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.outcome import Silent
from pdctl.runtime.checks.speeds import speeds
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.topology.model import Transport
from pdctl.topology.plan import ReplicaPlan


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One pair's way from its prefill to its decode replica, as TCP (or TLS) sees it."""

    bytes_per_s: float
    """One stream's, or what the sender's environment paces it to."""
    round_trip_ms: float | None = None


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """By path; and of each pair that has none, why, in a sentence."""

    found: dict[str, Link] = {}
    missing: tuple[str, ...] = ()


def measure_links(target: Target, hosts: Mapping[str, RuntimeHost]) -> Links:
    """Dials every pair's sender from its receiver's host, beside the ports of the cluster that
    runs, and times a stream: up to two seconds a link. Blocks; raises nothing for a link that
    can't be measured. Pairs over another transport than TCP are left out."""
    ground = Ground(target.topology, hosts, Silent(), kept=target.plan)
    try:
        tried = speeds(ground, target.plan)
    except PdctlError as error:
        return Links(missing=(f"no link was measured: {error.message}",))
    found: dict[str, Link] = {}
    missing = [f"links of {name} were not measured: {e.message}" for name, e in ground.lost.items()]
    for one in tried:
        pair, dialled = one.trial.pair, one.dialled
        if pair.transport is not Transport.TCP:
            continue
        if dialled.bytes_per_s is None:
            why = dialled.error or "nothing came"
            missing.append(f"the link of {pair.path} was not measured: {why}")
            continue
        found[pair.path] = Link(
            bytes_per_s=_paced(target, one.trial.sender, dialled.bytes_per_s),
            round_trip_ms=None if dialled.round_trip_s is None else dialled.round_trip_s * 1000,
        )
    return Links(found=found, missing=tuple(missing))


def _paced(target: Target, sender: ReplicaPlan, bytes_per_s: float) -> float:
    host = target.topology.hosts[sender.host]
    pace = environment_of(sender.declared, host, {}).get(PACING_ENV)
    return min(bytes_per_s, float(pace)) if pace else bytes_per_s
