"""What reading pages through NIXL needs of the replicas' environments. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdctl.engines.interface import Probe
from pdctl.handoff.transport.nixl import INSTALL
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Topology, Transport
from pdctl.topology.plan import pairs


def judge_reads(topology: Topology, probes: Mapping[str, Probe]) -> Iterator[Diagnostic]:
    """Every replica of a pair for which the file asks for NIXL, and whose environment can't do it.

    Args:
        probes: replica → what its environment answered; without those that did not.
    """
    if topology.handoff.transport is not Transport.NIXL:
        return
    named = pairs(topology)
    for name in dict.fromkeys(end for pair in named for end in (pair.prefill, pair.decode)):
        probe = probes.get(name)
        if probe is not None and probe.nixl_problem:
            yield Diagnostic(
                code="host.nixl",
                summary=f'replica "{name}": transport "nixl": {probe.nixl_problem}',
                replica=name,
                field="python",
                hint=f'run `{INSTALL}` in that environment, or write transport = "auto"',
            )
