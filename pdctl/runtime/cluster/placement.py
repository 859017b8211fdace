"""What an agent needs on its host before it can start: its state directory, record and keys."""

from __future__ import annotations

import sys

import msgspec

from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import Mark, RuntimeHost
from pdctl.topology.model import Host


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one agent's files lie on its host; absolute paths."""

    state: str
    socket_dir: str

    @property
    def logs(self) -> str:
        return f"{self.state}/logs"

    def log(self, name: str) -> str:
        return f"{self.logs}/{name}.log"


def placement(host: RuntimeHost, record: ClusterRecord, state: StateDir | None = None) -> Placement:
    """Where its agent's files lie; asks a host over SSH who we are there (HostError).

    Args:
        state: of the launching machine: its own agent uses the same directory.
    """
    if record.topology.hosts[host.name].ssh is None and state is not None:
        return Placement(state=str(state.path), socket_dir=record.socket_dir)
    facts = host.survey.facts()
    return Placement(
        state=f"{facts.state_home}/{record.cluster}/hosts/{host.name}",
        socket_dir=f"/tmp/pdctl-{facts.uid}/{record.run[:8]}",
    )


def deposit(
    host: RuntimeHost, place: Placement, record: ClusterRecord, *, key: str, api_key: str | None
) -> None:
    """Writes what the agent there reads. The key is written over the connection, 0600. Logs of
    another run are removed; those of this one stay (its agent is started again)."""
    host.make_dir(place.state)
    if _run_there(host, place) != record.run:
        host.remove(place.logs)
    host.make_dir(place.logs)
    host.write(f"{place.state}/key", key.encode())
    if api_key is not None:
        host.write(f"{place.state}/api_key", api_key.encode())
    host.write(f"{place.state}/cluster.json", msgspec.json.encode(record))


class _Run(msgspec.Struct, frozen=True):
    run: str


def _run_there(host: RuntimeHost, place: Placement) -> str | None:
    """None after a `down`, and where it can't be read."""
    raw = host.read(f"{place.state}/cluster.json", max_bytes=64 << 20)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=_Run).run
    except msgspec.MsgspecError:
        return None


def clear(host: RuntimeHost, place: Placement) -> None:
    """Removes what `deposit` and the agent wrote, but for logs."""
    for name in ("key", "api_key", "cluster.json", f"agent-{host.name}.json"):
        host.remove(f"{place.state}/{name}")


def agent_command(declared: Host, state: str, run: str) -> Command:
    """The agent with its watchdog."""
    own = sys.executable if declared.ssh is None else declared.python or "python3"
    return Command(
        argv=(
            declared.agent_python or own,
            *("-m", "pdctl.runtime.agent.watchdog"),
            *("--state", state),
            *("--host", declared.name),
        ),
        env={RUN_ENV: run},
    )


def start_agent(
    host: RuntimeHost, declared: Host, record: ClusterRecord, *, state: str, log: str
) -> Mark:
    """Starts the agent of one host, detached."""
    return host.spawn(agent_command(declared, state, record.run), log=log)
