"""Clusters under measurement, launched as a user does, and servers beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from gpu_engines import Server, Site, free_port

from pdctl.runtime.bench.target import Target, running

PDCTL = [sys.executable, "-c", "from pdctl.cli.app import main; main()"]
UP_S = 420.0
DOWN_S = 60.0
POLL_S = 0.2
BUFFER = {"cuda": "2GiB", "cpu": "256MiB", "host": "256MiB"}
ROLES = {"p": "prefill", "d": "decode", "o": "both"}
LETTERS = {"v": "vllm", "s": "sglang", "m": "mlx"}


@dataclass(frozen=True)
class Member:
    """A replica. Its name's first letter is the engine's, its second the role's: "vp", "md2"."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    more: str = ""
    """Lines of its table."""

    @property
    def engine(self) -> str:
        return LETTERS[self.name[0]]

    @property
    def role(self) -> str:
        return ROLES[self.name[1]]


@dataclass(frozen=True)
class System:
    """A cluster to be launched."""

    name: str
    members: tuple[Member, ...]
    transport: str = "tcp"
    policy: str = "round_robin"
    disaggregate: str = "always"
    sharing: str | None = None
    """Bytes of its page store, as a topology spells them."""
    graphs: bool | None = None
    """None: as the site has it."""


def members(names: str) -> tuple[Member, ...]:
    """ "vp vd" as two of them."""
    return tuple(Member(name) for name in names.split())


def topology(system: System, site: Site, bind: str) -> str:
    if system.graphs is not None:
        site = replace(site, graphs=system.graphs)
    sharing = "" if system.sharing is None else f'[sharing]\nbuffer_bytes = "{system.sharing}"\n'
    head = f"""schema = 1
name = "{system.name}"
[model]
name = "{site.model.name}"
dtype = "float16"
context_length = {site.context_length}
[handoff]
transport = "{system.transport}"
buffer_bytes = "{BUFFER[site.device]}"
timeout_s = 120.0
{sharing}[router]
bind = "{bind}"
policy = "{system.policy}"
disaggregate = "{system.disaggregate}"
[hosts.local]
"""
    return head + "".join(_replica(member, site) for member in system.members)


def _replica(member: Member, site: Site) -> str:
    engine = member.engine
    last = member.role == "decode" or member.name.endswith("2")
    return f"""[[replicas]]
name = "{member.name}"
engine = "{engine}"
role = "{member.role}"
devices = {site.devices_of(engine, last=last)}
model = "{site.model}"
python = "{site.pythons[engine]}"
compute_dtype = "{site.compute_dtype}"
env = {_table({**site.environment(engine), **member.env})}
engine_config = {_table({**site.options(engine), **member.options})}
{member.more}
"""


def _table(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


class Fleet:
    """What was started together. What did not come up is in `failed`, with what it said, and
    is no reason not to measure the rest."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._paths: dict[str, Path] = {}
        self._launching: list[subprocess.Popen[str]] = []
        self.targets: dict[str, Target] = {}
        self.servers: dict[str, Server] = {}
        self.failed: dict[str, str] = {}
        self.up_s = 0.0

    def start(self, systems: Sequence[System], servers: Iterable[Server], wait_s: float) -> None:
        """Returns when each is up or has failed."""
        began_s = time.monotonic()
        launched = self._launching = [self._launched(system, wait_s) for system in systems]
        for server in servers:
            try:
                server.wait(began_s + wait_s)
            except RuntimeError as error:
                self.failed[server.name] = str(error)[-2000:]
            else:
                self.servers[server.name] = server
        for system, process in zip(systems, launched, strict=True):
            said = process.communicate()[0]
            if process.returncode == 0:
                self.targets[system.name] = running(str(self._paths[system.name]))
            else:
                self.failed[system.name] = f"exit {process.returncode}: {said[-2000:]}"
        self.up_s = time.monotonic() - began_s
        for name, why in self.failed.items():
            print(f"{name} did not come up: {why}", flush=True)
        print(f"up in {self.up_s:.0f} s: {[*self.targets, *self.servers]}", flush=True)
        while self._site.after is not None and runs(self._site.after):
            time.sleep(POLL_S)

    def apply(self, system: System) -> None:
        """Brings a running cluster to what `system` says now."""
        path = self._paths[system.name]
        bind = self.targets[system.name].plan.router_bind
        path.write_text(topology(system, self._site, bind))
        subprocess.run([*PDCTL, "up", str(path), "--detach"], check=True, capture_output=True)

    def forecast(self, name: str) -> dict[str, Any]:
        """What `pdctl plan` expects of a running cluster."""
        argv = [*PDCTL, "plan", str(self._paths[name]), "--offline", "--json"]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        return dict(json.loads(done.stdout)["forecast"])

    def stop(self) -> None:
        """All at once; the replicas' logs stay among the site's. A launch that is still under way
        rolls back first."""
        for process in (each for each in self._launching if each.poll() is None):
            process.terminate()
        _ended(self._launching)
        for name in self._paths:
            kept = Path(os.environ["XDG_STATE_HOME"]) / "pdctl" / name / "logs"
            for log in kept.glob("*.log"):
                (self._site.logs / f"{name}-{log.name}").write_bytes(log.read_bytes())
        _ended([_pdctl("down", str(path)) for path in self._paths.values()])

    def _launched(self, system: System, wait_s: float) -> subprocess.Popen[str]:
        path = self._site.logs / f"{system.name}.toml"
        path.write_text(topology(system, self._site, f"127.0.0.1:{free_port()}"))
        self._paths[system.name] = path
        return _pdctl("up", str(path), "--detach", "--wait-timeout", str(int(wait_s)))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ended(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits for those whose words have not been read yet."""
    for process in (each for each in processes if each.stdout and not each.stdout.closed):
        try:
            process.communicate(timeout=DOWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _pdctl(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PDCTL, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@contextmanager
def fleet(
    site: Site, systems: Sequence[System], servers: Iterable[Server] = (), wait_s: float = UP_S
) -> Iterator[Fleet]:
    """All of them started at once, and stopped with the block, however it ends."""
    started = Fleet(site)
    with ExitStack() as stack:
        stack.callback(started.stop)
        entered = [stack.enter_context(server) for server in servers]
        started.start(systems, entered, wait_s)
        yield started
