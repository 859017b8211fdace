"""The way to every host of a topology, for one owner: a command, or the keeper."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType

import psutil

from pdctl.errors import HostError
from pdctl.runtime.hosts.connection import HELLO_S, Connection
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.remote import RemoteHost
from pdctl.runtime.hosts.ssh import CONNECT_TIMEOUT_S, Forward, far_end_argv
from pdctl.runtime.hosts.ways import Ways
from pdctl.topology.model import Host

CLOSE_S = 10.0


class Hosts(Mapping[str, RuntimeHost]):
    """Connects to a host at its first use; leaving it closes all, bounded. Any thread.

    Args:
        hosts: as a topology declares them.
        forwards: per host, the ports of it that this machine's loopback leads to while its
            connection lasts.
        connect_timeout_s: ssh's, whole seconds; the far end has `hello_s` more.
    """

    def __init__(
        self,
        hosts: Mapping[str, Host],
        *,
        forwards: Mapping[str, tuple[Forward, ...]] | None = None,
        connect_timeout_s: int = CONNECT_TIMEOUT_S,
        hello_s: float = HELLO_S,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._hello_s = hello_s
        self._forwards = dict(forwards or {})
        self._far = {
            name: self._remote(host) for name, host in hosts.items() if host.ssh is not None
        }
        self._local = {name: LocalHost(name) for name, host in hosts.items() if host.ssh is None}

    def __getitem__(self, name: str) -> RuntimeHost:
        return self._far[name] if name in self._far else self._local[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._local
        yield from self._far

    def __len__(self) -> int:
        return len(self._local) + len(self._far)

    def far(self, name: str) -> RemoteHost:
        """A host over SSH. HostError where it is this machine."""
        if name not in self._far:
            raise HostError(f'host "{name}" is this machine: there is no connection to it')
        return self._far[name]

    def close(self) -> None:
        """Ends every connection at once; bounded. Idempotent."""
        threads = [threading.Thread(target=far.close, daemon=True) for far in self._far.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CLOSE_S)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _remote(self, host: Host) -> RemoteHost:
        hello_s = self._connect_timeout_s + self._hello_s

        def start(forwards: tuple[Forward, ...]) -> Connection:
            argv = far_end_argv(host, forwards=forwards, connect_timeout_s=self._connect_timeout_s)
            if forwards:
                _end_strays(argv)
            return Connection(host, argv, hello_s=hello_s)

        return RemoteHost(host.name, Ways(start, self._forwards.get(host.name, ())))


def _end_strays(argv: tuple[str, ...]) -> None:
    """Ends what a killed owner left that leads to the same far end with one of these forwards:
    ssh outlives its pipes while somebody uses one of them, and holds their ports."""
    bare, wanted = _apart(argv)
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if one.pid == os.getpid() or one.uids().real != os.getuid():
                continue
            words, laid = _apart(tuple(one.cmdline()))
            same = words[1 - len(bare) :] == bare[1:] and not laid.isdisjoint(wanted)
            if same and one.ppid() != os.getpid():
                os.killpg(one.pid, signal.SIGKILL)
                one.wait(1.0)


def _apart(argv: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """A command line without its forwards, and those."""
    at = {place + 1 for place, word in enumerate(argv) if word == "-L"}
    rest = tuple(w for place, w in enumerate(argv) if place not in at and place + 1 not in at)
    return rest, frozenset(argv[place] for place in at if place < len(argv))
