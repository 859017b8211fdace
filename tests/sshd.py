"""Other machines on this one: each a real sshd on loopback with a host key, a home and a state
directory of its own. The user's key lies in an agent. Works as root and unprivileged."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from ports import free_port

from pdctl.topology.model import Host

START_S = 30.0
_TOOLS = ("ssh", "ssh-agent", "ssh-add", "ssh-keygen")


class Machine:
    """One sshd; its name is an alias in the ssh configuration.

    Args:
        address: where it listens.
        inside: the command that runs another one inside that machine; empty: no such is needed.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        *,
        address: str = "127.0.0.1",
        inside: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.address = address
        self.port = free_port()
        self.inside = inside
        self.home = folder / name
        self.state_home = self.home / "state"
        self.host_key = self.home / "host_key"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.state_home.mkdir(parents=True, mode=0o700)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.host_key))

    @property
    def user(self) -> str:
        return getpass.getuser()

    @property
    def url(self) -> str:
        return f"ssh://{self.user}@{self.address}:{self.port}"

    @property
    def known_line(self) -> str:
        kind, key = self.host_key.with_suffix(".pub").read_text().split()[:2]
        return f"[{self.address}]:{self.port} {kind} {key}\n"

    def host(self, *, ssh: str | None = None, python: str | None = sys.executable) -> Host:
        """As a topology declares it."""
        return Host(name=self.name, ssh=ssh or self.name, address=self.address, python=python)

    def start(self) -> None:
        """Does nothing where it runs."""
        if self._process is not None:
            return
        config = self.home / "sshd_config"
        config.write_text(self._config())
        with (self.home / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self.inside, _sshd(), "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((self.address, self.port), timeout=1).close()
                return
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError((self.home / "sshd.log").read_text())
            threading.Event().wait(0.02)

    def sessions(self) -> list[psutil.Process]:
        """What runs below sshd: its own session processes, shells, commands."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def cut(self) -> None:
        """Kills sshd's own process of every connection; what they started is left alone."""
        for process in self.sessions():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("sshd"):
                    process.kill()

    def stop(self) -> None:
        """The machine is gone: no sshd, no connection."""
        if self._process is None:
            return
        self.cut()
        self._process.kill()
        self._process.wait()
        self._process = None

    def _config(self) -> str:
        environment = {
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.state_home),
            **self._environment,
        }
        lines = [
            f"ListenAddress {self.address}",
            f"Port {self.port}",
            f"HostKey {self.host_key}",
            "PidFile none",
            f"AuthorizedKeysFile {self.home.parent}/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "PrintMotd no",
            "SetEnv " + " ".join(f'"{k}={v}"' for k, v in environment.items()),
        ]
        if _penalises():
            lines.append("PerSourcePenalties no")
        return "\n".join([*lines, ""])


class Machines:
    """Several machines, and the way of this one's user to them.

    `environment` is what a process needs to reach them: a PATH that starts with an `ssh` which
    reads this configuration alone, and the agent's socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known_hosts = folder / "known_hosts"
        self.config = folder / "config"
        self.agent_socket = folder / "agent"
        self.environment: dict[str, str] = {}
        self._machines: dict[str, Machine] = {}

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def add(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        *,
        address: str = "127.0.0.1",
        inside: tuple[str, ...] = (),
    ) -> Machine:
        machine = Machine(name, self.folder, environment or {}, address=address, inside=inside)
        self._machines[name] = machine
        machine.start()
        with self.known_hosts.open("a") as known:
            known.write(machine.known_line)
        with self.config.open("a") as config:
            config.write(
                f"Host {name}\n  HostName {address}\n  Port {machine.port}\n"
                f"  HostKeyAlias [{address}]:{machine.port}\n"
            )
        return machine

    def prepare(self) -> None:
        """Key, agent's content, configuration, and the wrapper."""
        key = self.folder / "user_key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        self.folder.joinpath("authorized_keys").write_text(key.with_suffix(".pub").read_text())
        _run("ssh-add", "-q", str(key), env={"SSH_AUTH_SOCK": str(self.agent_socket)})
        key.unlink()
        self.known_hosts.touch()
        self.config.write_text(
            f"UserKnownHostsFile {self.known_hosts}\nGlobalKnownHostsFile none\n"
            f"IdentityFile none\nUser {getpass.getuser()}\n"
        )
        wrapper = self.folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
        wrapper.chmod(0o755)
        self.environment = {
            "PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}",
            "SSH_AUTH_SOCK": str(self.agent_socket),
        }

    def stop(self) -> None:
        for machine in self:
            machine.stop()


@contextlib.contextmanager
def machines(*names: str, environment: Mapping[str, str] | None = None) -> Iterator[Machines]:
    """Starts one sshd per name; ends them, and what is left of their connections.

    Args:
        environment: added to every remote process's, beside HOME and XDG_STATE_HOME.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or not os.access(_sshd(), os.X_OK):
        pytest.skip(f"needs an OpenSSH server: {', '.join(missing) or 'sshd'} is not here")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pdctl-far-", dir="/tmp"))
    found = Machines(folder)
    agent = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(found.agent_socket)], stdout=subprocess.DEVNULL
    )
    try:
        _until(found.agent_socket.exists)
        found.prepare()
        for name in names:
            found.add(name, environment)
        yield found
    finally:
        found.stop()
        agent.terminate()
        agent.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _sshd() -> str:
    return shutil.which("sshd") or "/usr/sbin/sshd"


def _penalises() -> bool:
    """Since 9.8 sshd keeps out who failed before, which here is everybody."""
    words = subprocess.run([_sshd(), "-V"], capture_output=True, text=True).stderr
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", words)
    return version is not None and (int(version[1]), int(version[2])) >= (9, 8)


def _run(*argv: str, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, env={**os.environ, **(env or {})}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.decode()}")


def _until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + START_S
    while not true():
        if time.monotonic() > until_s:
            raise RuntimeError("ssh-agent does not start")
        threading.Event().wait(0.02)
