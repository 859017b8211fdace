"""What the engines' own handoffs need of their replicas' environments. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdctl.engines.interface import Probe
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Topology
from pdctl.topology.native import OWN, is_native
from pdctl.topology.plan import pairs


def judge_native(topology: Topology, probes: Mapping[str, Probe]) -> list[Diagnostic]:
    """Every native replica that lacks NIXL, and pairs whose ends would not shake hands.

    Args:
        probes: replica → what its environment answered; without those that did not.
    """
    return [*_without_nixl(topology, probes), *_other_versions(topology, probes)]


def _without_nixl(topology: Topology, probes: Mapping[str, Probe]) -> Iterator[Diagnostic]:
    for replica in topology.replicas:
        probe = probes.get(replica.name)
        if probe is None or probe.has_nixl or not is_native(topology, replica):
            continue
        yield Diagnostic(
            code="host.no_nixl",
            summary=f'replica "{replica.name}": its environment has no nixl, which '
            f"{OWN.get(replica.engine, replica.engine)} needs",
            replica=replica.name,
            field="python",
            hint='install nixl there (Linux alone), or write transport = "auto"',
        )


def _other_versions(topology: Topology, probes: Mapping[str, Probe]) -> Iterator[Diagnostic]:
    """vLLM's connector refuses a peer of another version at the first request."""
    for pair in pairs(topology):
        ends = [topology.replica(name) for name in (pair.prefill, pair.decode)]
        if not all(is_native(topology, end) and end.engine is Engine.VLLM for end in ends):
            continue
        versions = [probes[end.name].engine_version for end in ends if end.name in probes]
        if len(set(versions)) < 2:
            continue
        yield Diagnostic(
            code="host.native_version",
            summary=f'pair "{pair.prefill}" → "{pair.decode}": vLLM {versions[0]} and '
            f"{versions[1]} have no handoff of their own in common",
            replica=pair.decode,
            field="python",
            hint="install one version of vLLM for both",
        )
