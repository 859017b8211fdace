"""The way to a cluster's keeper: the agent of its router's host, which knows all of it."""

from __future__ import annotations

from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.state import ClusterRecord, StateDir


def keeper_of(state: StateDir, record: ClusterRecord) -> AgentClient:
    """Raises ClusterError where the cluster's key is gone."""
    host = record.plan.router_host
    return AgentClient(host, record.plan.agent_ports[host], record.run, state.read_key())
