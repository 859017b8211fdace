"""Machines with a network of their own: namespaces behind one bridge. Linux and root only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


class Network:
    """This machine is `address`; each namespace hangs on the bridge by a pair of interfaces."""

    def __init__(self, tag: str, subnet: str) -> None:
        self.address = f"{subnet}.1"
        self.addresses: dict[str, str] = {}
        self._tag = tag
        self._subnet = subnet

    def create(self) -> None:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")

    def add(self, name: str) -> str:
        """A machine on the network; its address."""
        space = self._space(name)
        ip("netns", "add", space)
        self.addresses[name] = address = f"{self._subnet}.{len(self.addresses) + 2}"
        here, there = self._end(name), f"{self._end(name)}x"
        ip("link", "add", here, "type", "veth", "peer", "name", there)
        ip("link", "set", there, "netns", space)
        ip("link", "set", here, "master", self._bridge, "up")
        ip("-n", space, "addr", "add", f"{address}/24", "dev", there)
        ip("-n", space, "link", "set", there, "up")
        ip("-n", space, "link", "set", "lo", "up")
        return address

    def inside(self, name: str) -> tuple[str, ...]:
        """What runs a command there."""
        return ("ip", "netns", "exec", self._space(name))

    @contextlib.contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Its cable is out while the block runs."""
        ip("link", "set", self._end(name), "down")
        try:
            yield
        finally:
            ip("link", "set", self._end(name), "up")

    def remove(self) -> None:
        for name in self.addresses:
            with contextlib.suppress(RuntimeError):
                ip("link", "del", self._end(name))
            with contextlib.suppress(RuntimeError):
                ip("netns", "del", self._space(name))
        with contextlib.suppress(RuntimeError):
            ip("link", "del", self._bridge)

    @property
    def _bridge(self) -> str:
        return f"{self._tag}br"

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _end(self, name: str) -> str:
        return f"{self._tag}v{list(self.addresses).index(name)}"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A bridge without machines. Skips where this one does not let us make it."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2), to make network namespaces")
    tag = f"pd{os.getpid() % 1_000_000}"
    made = Network(tag, f"10.213.{os.getpid() % 251}")
    try:
        try:
            made.create()
            made.add("probe")  # whether it is allowed at all
        except RuntimeError as error:
            pytest.skip(f"this machine does not let us make network namespaces: {error}")
        yield made
    finally:
        made.remove()


def ip(*words: str) -> None:
    done = subprocess.run(("ip", *words), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
