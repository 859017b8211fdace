"""A cluster whose replicas, or whose router, are on other machines: each one an sshd of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from e2e.cluster import PDCTL, Cluster, engine_env
from namespaces import Network
from sshd import Machines, machines

from pdctl.engines.channel import RUN_ENV
from pdctl.runtime.cluster.state import ClusterRecord

LEFT_S = 10.0
"""For what was told to end to be gone."""
ROLES = {"p0": "prefill", "d0": "decode", "o0": "both", "o1": "both"}


def host_table(name: str, address: str, extra: str = "") -> str:
    """One host of the file. Engines and their environment are the same everywhere."""
    env = ", ".join(f'{key} = "{value}"' for key, value in engine_env().items())
    ssh = "" if name == "local" else f'ssh = "{name}"\n'
    place = f'address = "{address}"\npython = "{sys.executable}"\nenv = {{ {env} }}\n'
    return f"[hosts.{name}]\n{ssh}{place}{extra}"


def replica_table(name: str, host: str, role: str, model: Path, extra: str = "") -> str:
    return (
        f'[[replicas]]\nname = "{name}"\nhost = "{host}"\nengine = "mlx"\nrole = "{role}"\n'
        f'model = "{model}"\ncompute_dtype = "float32"\n{extra}'
    )


class OverSsh(Cluster):
    """Driven by `pdctl` on this machine; `down` is proven on all of them.

    Args:
        where: of p0, d0 and ordinary o0 and o1 some → host; "local" is this machine.
        addresses: host → where its data plane is reached.
        router: the router's host.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        far: Machines,
        where: Mapping[str, str],
        addresses: Mapping[str, str],
        *,
        router: str = "local",
    ) -> None:
        super().__init__(folder, model)
        self.far = far
        self.where = dict(where)
        self.router_host = router
        self.env |= far.environment
        hosts = "".join(host_table(*one) for one in addresses.items())
        replicas = "".join(replica_table(n, h, ROLES[n], model) for n, h in where.items())
        self.topology.write_text(
            f'schema = 1\nname = "{self.name}"\n'
            f'[model]\nname = "tiny"\ncontext_length = 2048\n[handoff]\ntimeout_s = 60.0\n'
            f'[router]\nhost = "{router}"\nbind = "{self.bind}"\n{hosts}{replicas}'
        )

    def __exit__(self, *_: object) -> None:
        self.http.close()
        record = self.state_dir.read()
        if record is not None:
            said = self.pdctl("down", self.topology).stdout
            self.assert_nothing_left(record)
            assert {n for n in self.where if str(self.log(n).parent) not in said} == set(), said

    def edit(self, old: str, new: str) -> None:
        text = self.topology.read_text()
        assert old in text
        self.topology.write_text(text.replace(old, new, 1))

    @contextmanager
    def begin(self, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on while its block runs; killed where it still does at the end."""
        words = [str(PDCTL), *(str(a) for a in arguments)]
        with subprocess.Popen(
            words, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            try:
                yield running
            finally:
                running.kill()

    def hosts(self) -> dict[str, dict[str, Any]]:
        """The hosts beside the router's, as `ps` has them."""
        return {host["name"]: host for host in self.ps(check=False)["hosts"]}

    def log(self, name: str) -> Path:
        """Where the log of a replica, or the router, lies."""
        host = self.where.get(name, self.router_host)
        if host == "local":
            return self.state_dir.log(name)
        place = self.far[host].state_home / "pdctl" / self.name / "hosts" / host
        return place / "logs" / f"{name}.log"

    def assert_nothing_left(self, record: ClusterRecord) -> None:
        """No process, port, socket or key of that run on any machine; its logs are there, and
        where they lie is known. What was measured stays too."""
        with suppress(AssertionError):
            self.wait("no process of it", lambda: not processes(self.far, record), LEFT_S)
        assert processes(self.far, record) == []
        ports = {port for host in record.plan.agent_ports for port in record.plan.ports(host)}
        for inside in ((), *(machine.inside for machine in self.far)):
            assert listening(ports, inside) == []
        assert not Path(record.socket_dir).exists()
        kept = ("ended.json", "costs.json")
        left = {p.suffix or p.name for p in self._files() if p.name not in kept}
        assert left <= {".log", "lock"}, self._files()
        for name in (*self.where, "router"):
            assert self.log(name).exists()

    def _files(self) -> list[Path]:
        """Of this cluster, on every machine."""
        trees = [self.state, *(machine.state_home for machine in self.far)]
        found = (path for tree in trees for path in tree.rglob("*"))
        return [path for path in found if path.is_file() and self.name in path.parts]


@contextmanager
def apart(net: Network, *names: str) -> Iterator[tuple[Machines, dict[str, str]]]:
    """Machines behind SSH that each have an address on the network; host → address, this machine's
    too."""
    addresses = {"local": net.address}
    with machines() as far:
        for name in names:
            addresses[name] = net.add(name)
            far.add(name, far.environment, address=addresses[name], inside=net.inside(name))
        yield far, addresses


def processes(far: Machines, record: ClusterRecord) -> list[str]:
    """Command lines of everything of that run, and of every connection to these machines."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words, environment = process.cmdline(), process.environ()
            there = environment.get("HOME", "").startswith(str(far.folder))
            way = str(far.config) in words or (there and any("far_end" in w for w in words))
            if way or environment.get(RUN_ENV) == record.run:
                found.append(f"{process.pid} {' '.join(words)}")
    return found


def listening(ports: set[int], inside: tuple[str, ...] = ()) -> list[int]:
    """Those on which somebody listens, at any address of a machine."""
    argv = (*inside, "ss", "-ltnH")
    words = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return sorted(ports & {int(line.split()[3].rpartition(":")[2]) for line in words.splitlines()})
