"""The state directory of one cluster: what `up` wrote and `ps`, `logs` and `down` read.

    ~/.local/state/pdctl/NAME/      0700, XDG_STATE_HOME honoured; every file 0600
        cluster.json                ClusterRecord
        key                         32 random bytes, hex
        api_key                     the router's, where the topology names one
        costs.json                  what the router measured of its paths; kept after `down`
        lock                        held while a command changes the cluster; says by whom
        agent-HOST.json             the agent's journal
        logs/REPLICA.log            kept until the next `up`
        logs/ended.json             of a cluster that was taken down: where its other logs lie

Unix sockets lie elsewhere, in `/tmp/pdctl-UID/RUN8/`: their paths are limited to 104 bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tomllib
from pathlib import Path

import msgspec

from pdctl.errors import ClusterError, PdctlError, TopologyError
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.machine.folders import state_home
from pdctl.topology.contract import Contract
from pdctl.topology.fields import NAME
from pdctl.topology.model import Topology
from pdctl.topology.plan import Plan

RECORD_FORMAT = 1


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One host's agent."""

    port: int
    mark: Mark


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `up`: everything that an agent needs to run it, and `down` to end it."""

    format: int = RECORD_FORMAT
    run: str
    """Random; in the environment of every process of this `up`."""
    phase: str
    """ "starting" | "running" | "stopping"."""
    created_at: float
    """Unix seconds."""
    topology_path: str
    topology: Topology
    plan: Plan
    contract: Contract
    agents: dict[str, AgentRecord] = {}
    unsettled: tuple[str, ...] = ()
    """Replicas, or "router", that a change in progress has not brought to this record yet."""
    url: str | None = None

    @property
    def cluster(self) -> str:
        return self.topology.name

    @property
    def socket_dir(self) -> str:
        return f"/tmp/pdctl-{os.getuid()}/{self.run[:8]}"


class StateDir:
    """The files of one cluster. Owns no process; not locked by itself (`lock.py`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._host = LocalHost()

    @classmethod
    def of(cls, cluster: str) -> StateDir:
        return cls(state_home() / cluster)

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """Of a replica, "router", "agent-HOST" or "store-HOST"."""
        return self.logs / f"{name}.log"

    def journal(self, host: str) -> Path:
        return self.path / f"agent-{host}.json"

    @property
    def costs(self) -> Path:
        return self.path / "costs.json"

    def make(self) -> None:
        """The folder and its logs, 0700. HostError when it is somebody else's."""
        self._host.make_dir(str(self.path))
        self._host.make_dir(str(self.logs))

    def read(self) -> ClusterRecord | None:
        """None where nothing was launched.

        Raises:
            ClusterError: written by another version, or damaged.
        """
        return self._read_record(self.path / "cluster.json")

    def _read_record(self, path: Path) -> ClusterRecord | None:
        raw = self._host.read(str(path), max_bytes=64 << 20)
        if raw is None:
            return None
        hint = "use the version of pdctl that launched this cluster"
        try:
            record = msgspec.json.decode(raw, type=ClusterRecord)
        except msgspec.MsgspecError as error:
            raise ClusterError(f"{path} can't be read: {error}", hint=hint) from error
        if record.format != RECORD_FORMAT:
            raise ClusterError(f"{path} has format {record.format}", hint=hint)
        return record

    def write(self, record: ClusterRecord) -> None:
        self._host.write(str(self.path / "cluster.json"), msgspec.json.encode(record))

    def read_ended(self) -> ClusterRecord | None:
        """What was taken down last, while its logs are kept; None where none of them lies on
        another machine, or that can't be read."""
        with contextlib.suppress(ClusterError):
            return self._read_record(self.logs / "ended.json")
        return None

    def write_ended(self, record: ClusterRecord) -> None:
        """Also where no log lies on this machine, and `prune` has taken their folder."""
        self.make()
        self._host.write(str(self.logs / "ended.json"), msgspec.json.encode(record))

    def create_key(self) -> str:
        key = secrets.token_hex(32)
        self._host.write(str(self.path / "key"), key.encode())
        return key

    def write_api_key(self, key: str) -> None:
        self._host.write(str(self.path / "api_key"), key.encode())

    def read_key(self) -> str:
        """Raises ClusterError where there is none."""
        raw = self._host.read(str(self.path / "key"))
        if not raw:
            raise ClusterError(f"{self.path}/key is missing")
        return raw.decode()

    def read_api_key(self) -> str | None:
        raw = self._host.read(str(self.path / "api_key"))
        return raw.decode() if raw else None

    def clear_logs(self) -> None:
        for log in (*self.logs.glob("*.log"), self.logs / "ended.json"):
            self._host.remove(str(log))

    def clear(self) -> None:
        """Removes everything but logs and lock; nothing runs any more. The record goes last:
        whatever fails before it can be tried again."""
        names = list(self.path.glob("agent-*.json"))
        names += [self.path / name for name in ("key", "api_key", "cluster.json")]
        for name in names:
            self._host.remove(str(name))

    def prune(self) -> None:
        """Removes the folders where nothing is in them: a launch that never began."""
        for folder in (self.logs, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()


def clusters() -> list[StateDir]:
    """Every cluster that this user launched and did not take down."""
    return [StateDir(p.parent) for p in sorted(state_home().glob("*/cluster.json"))]


def own_plan(topology: str | os.PathLike[str]) -> Plan | None:
    """The plan of the very cluster of this file, whose ports are no clash to `validate` and
    `plan`. None where it does not run, or can't be read."""
    with contextlib.suppress(PdctlError, OSError):
        record = StateDir.of(declared_name(Path(topology).expanduser())).read()
        return record.plan if record is not None else None
    return None


def resolve(target: str) -> StateDir:
    """The state of a cluster by its name or by its topology's path.

    A file that is no longer valid still names its cluster: one must be able to stop it.

    Raises:
        TopologyError: neither a file nor a cluster that runs.
    """
    path = Path(target).expanduser()
    if not _is_file(path):
        if NAME.fullmatch(target) is not None and StateDir.of(target).path.is_dir():
            return StateDir.of(target)
        raise TopologyError(
            f'"{target}" is neither a topology file nor a cluster that was launched here',
            hint="give the path of a topology, or the name that stands in it",
        )
    for state in clusters():
        record = state.read()
        if record is not None and record.topology_path == str(path.resolve()):
            return state
    return StateDir.of(declared_name(path))


def running(target: str) -> tuple[StateDir, ClusterRecord]:
    """As `resolve`, with the record of what was launched.

    Raises:
        ClusterError: that cluster does not run.
    """
    state = resolve(target)
    record = state.read()
    if record is None:
        raise ClusterError(
            f'cluster "{state.path.name}" is not running', hint="`pdctl up` launches it"
        )
    return state, record


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def declared_name(path: Path) -> str:
    """The name in a topology file, whatever else is wrong with the file.

    Raises:
        TopologyError: it has none.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        name = tomllib.loads(path.read_text("utf-8-sig"))["name"]
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise TopologyError(
            f"{path}: no cluster name can be read from it",
            hint="give the cluster's name instead of the file",
        ) from error
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise TopologyError(f"{path}: name is not a cluster name")
    return name


def actor_key(key: str) -> str:
    """What agents and their callers prove to each other. Engines never see it: frames of the
    actor system are pickles, so whoever has it runs code."""
    return hmac.new(bytes.fromhex(key), b"pdctl.actor.v1", hashlib.sha256).hexdigest()


def handoff_key(key: str) -> bytes:
    """What tickets and the two ends of a handoff are proven with; 32 bytes."""
    return hmac.new(bytes.fromhex(key), b"pdctl.handoff.v1", hashlib.sha256).digest()
