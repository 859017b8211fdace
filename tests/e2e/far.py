"""A cluster on three machines: p0 and d0 each behind an sshd of its own, router and o0 here."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.cluster import ENGINE_PYTHON, engine_env
from e2e.data_link import DataLink, ways
from e2e.faults import Mending
from ports import free_port
from runtime.fleet import own_address
from sshd import Machines

from pdctl.engines.channel import RUN_ENV
from pdctl.runtime.cluster.state import ClusterRecord

P_HOST, D_HOST = "gpu1", "studio"
HOSTS = ("local", P_HOST, D_HOST)
KINDS = {
    "pdctl.runtime.agent.watchdog": "watchdog",
    "pdctl.runtime.agent": "agent",
    "pdctl.runtime.router": "router",
    "pdctl.runtime.hosts.far_end": "far end",
    "pdctl.engines.mlx.server": "engine",
}

HEAD = """
schema = 1
name = "{name}"
[model]
name = "tiny"
dtype = "float16"
context_length = 2048
[handoff]
timeout_s = {timeout_s}
buffer_bytes = "2MiB"
[router]
bind = "{bind}"
"""
HOST = """
[hosts.{name}]
{ssh}
address = "{address}"
python = "{python}"
agent_python = "{agent_python}"
env = {{ {env} }}
"""
REPLICA = """
[[replicas]]
name = "{name}"
host = "{host}"
engine = "mlx"
role = "{role}"
model = "{model}"
compute_dtype = "float32"
{more}
"""


class FarCluster(Mending):
    """Through `link` goes every byte between p0 and d0."""

    def __init__(
        self, folder: Path, model_dir: Path, machines: Machines, *, timeout_s: float = 6.0
    ) -> None:
        super().__init__(folder, model_dir)
        address = own_address()
        if address is None:
            pytest.skip("needs an address of this machine's own beyond loopback")
        self.machines = machines
        self.env |= machines.environment
        self.data_port = free_port()
        self.link = DataLink((address, self.data_port))
        self.model_dir = model_dir
        self.timeout_s = timeout_s
        self._head = HEAD.format(name=self.name, bind=self.bind, timeout_s=timeout_s)
        self._address = address
        self.run = ""
        self.write()

    def write(self, *, p_env: str = "") -> None:
        """The topology's file; `p_env` is added to p0's environment."""
        python = {"python": ENGINE_PYTHON, "agent_python": sys.executable}
        env = ", ".join(f'{k} = "{v}"' for k, v in engine_env().items())
        text = self._head
        for name in HOSTS:
            ssh = "" if name == "local" else f'ssh = "{name}"'
            text += HOST.format(name=name, ssh=ssh, address=self._address, env=env, **python)
        model = {"model": self.model_dir}
        more = f"data_port = {self.data_port}\nenv = {{ {p_env} }}"
        text += REPLICA.format(name="p0", host=P_HOST, role="prefill", more=more, **model)
        env = ", ".join(f'{k} = "{v}"' for k, v in ways([self.link]).items())
        more = f"env = {{ {env} }}"
        text += REPLICA.format(name="d0", host=D_HOST, role="decode", more=more, **model)
        text += REPLICA.format(name="o0", host="local", role="both", more="", **model)
        self.topology.write_text(text)

    def __enter__(self) -> FarCluster:
        self.link.__enter__()
        self.up()
        self.run = self.record().run
        self.at_rest = self.census()
        return self

    def __exit__(self, *ended: object) -> None:
        self.link.mend()
        record = self.record()
        super().__exit__(*ended)
        self.link.__exit__()
        assert not list(gone_wrong(record))

    # -- processes

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """(kind, process) of everything that this cluster runs, on every machine."""
        folder = str(self.machines.folder)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                kind = _kind(words)
                if kind is None:
                    mine = f"{folder}/config" in words and words[0].endswith("ssh")
                elif kind == "far end":
                    mine = process.environ().get("HOME", "").startswith(folder)
                else:
                    ours = process.environ().get(RUN_ENV) == self.run
                    mine = ours or str(self.state) in str(words)
                if mine:
                    yield kind or "ssh", process

    def census(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.processes())

    def agent(self, host: str, kind: str = "agent") -> psutil.Process:
        """An agent's process, or (kind "watchdog") its watchdog's."""
        for found, process in self.processes():
            if found == kind and process.cmdline()[-1] == host:
                return process
        raise AssertionError(f"no {kind} of {host}")

    def renewed(self, host: str, before: psutil.Process) -> bool:
        """Whether another agent runs there than `before`."""
        found = [p for kind, p in self.processes() if kind == "agent" and p.cmdline()[-1] == host]
        return any(process.pid != before.pid for process in found)

    def leftovers(self) -> Iterator[str]:
        """A moment is granted to the far ends of the last command."""
        until_s = time.monotonic() + 3
        while self.census() and time.monotonic() < until_s:
            time.sleep(0.05)
        yield from (f"{kind}: {process}" for kind, process in self.processes())
        yield from super().leftovers()

    # -- what is asked of it

    def host_of(self, replica: str) -> str:
        return str(self.replica(replica)["host"])

    def hosts(self) -> dict[str, str]:
        return {host["name"]: host["state"] for host in self.ps(check=False)["hosts"]}

    def mend(self) -> None:
        """The link, and both machines."""
        self.link.mend()
        for machine in (self.machines[P_HOST], self.machines[D_HOST]):
            machine.start()


def _kind(words: list[str]) -> str | None:
    if "-m" not in words:
        return None
    return KINDS.get(words[words.index("-m") + 1])


def gone_wrong(record: ClusterRecord) -> Iterator[str]:
    """After `down`: what of the cluster is still to be found, a sentence each."""
    ports = {port for host in HOSTS for port in record.plan.ports(host)}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports:
            yield f"port {connection.laddr.port} listens"
    if Path(record.socket_dir).exists():
        yield f"{record.socket_dir} is there"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_ENV) == record.run:
                yield f"{process} runs"
