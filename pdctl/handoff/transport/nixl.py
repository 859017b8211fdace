"""NIXL (UCX) between memories of one kind, hosts' or devices': in-engine, Linux, imported only
where it is asked for.

Reads. Between host memories of one host the kernel copies inside `transfer`, 15 GB/s at 512 KiB,
and lets the interpreter go meanwhile; a request costs 10 µs beside that (bench/nixl_plane.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdctl.errors import HandoffError, PeerLost
from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import DeviceMemory, MemoryKind, Run
from pdctl.handoff.transport.progress import resting
from pdctl.handoff.transport.reach import Rows, Where, address_of, rows

log = logging.getLogger("pdctl.handoff")

DISTRIBUTIONS = {"nixl-cu12": "nixl_cu12", "nixl-cu13": "nixl_cu13"}
"""Distribution → module: the same library, built for one CUDA or the next; neither needs one."""
SUPPORTED = ("1.5", "2")
"""Oldest version that is supported, and the first that is not."""
INSTALL = "pip install --no-deps nixl-cu12"
_WORDS = {MemoryKind.HOST: "host memory", MemoryKind.DEVICE: "a device's memory"}
ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
"""Between devices: without it UCX reads another process's memory over TCP, at 0.4 GB/s (measured
on an H200, NIXL 1.5.1)."""


def installed() -> tuple[str, str] | None:
    """(module, version) of this environment's NIXL; None where it has none."""
    for distribution, module in DISTRIBUTIONS.items():
        with contextlib.suppress(PackageNotFoundError):
            return module, version(distribution)
    return None


def load() -> ModuleType:
    """The library.

    Raises:
        HandoffError: it is missing, of another version, or does not load here.
    """
    if not sys.platform.startswith("linux"):
        raise HandoffError("NIXL runs on Linux only", hint='write transport = "tcp"')
    found = installed()
    if found is None:
        raise HandoffError("NIXL is missing in this environment", hint=f"run `{INSTALL}` there")
    module, present = found
    oldest, newest = ([int(part) for part in each.split(".")] for each in SUPPORTED)
    if not oldest <= _numbers(present) < newest:
        raise HandoffError(
            f"NIXL {present} is not supported; {SUPPORTED[0]} and newer before {SUPPORTED[1]} is",
            hint=f"run `{INSTALL}` there",
        )
    try:
        return import_module(module)
    # a library that is linked against what this host lacks fails in ways of its own
    except Exception as error:
        raise HandoffError(f"NIXL {present} does not load: {error}") from error


def problem() -> str:
    """Why NIXL can't be used in this environment; "" where it can."""
    try:
        load()
    except HandoffError as error:
        return error.message
    return ""


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".")[:2] if part.isdigit()]


class NixlReach:
    """A `Reach` over one NIXL agent.

    The agent is not thread-safe by itself: a lock is around every call of it. None of them waits
    for a peer, but one that copies on this host holds it meanwhile.

    Args:
        replica: its agents are named after it, each process' with a nonce of its own, so that a
            peer never takes one that was restarted for the one before.
        one_host: every peer is on this host: then UCX listens on loopback alone, unless the
            environment says otherwise.
        kind: of the memory that is exposed and read, at both ends.

    Raises:
        HandoffError: NIXL can't be used here.
    """

    name = "nixl"

    def __init__(
        self, replica: str, *, one_host: bool = False, kind: MemoryKind = MemoryKind.HOST
    ) -> None:
        library = load()
        self._kind = kind
        if kind is MemoryKind.DEVICE:
            for name, value in ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        if one_host:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._lock = threading.Lock()
        self._exposed: list[tuple[Any, Bytes | DeviceMemory]] = []
        self._shown: dict[Where, bytes] = {}
        self._peers: dict[bytes, str] = {}
        """Card → agent name, of every peer that NIXL knows."""
        self._pulling: dict[bytes, int] = {}
        name = f"{replica}-{secrets.token_hex(8)}"
        try:
            config = library.nixl_agent_config(backends=["UCX"])
            with resting(library):
                self._agent: Any = library.nixl_agent(name, config)
        # whatever UCX finds wrong with this host
        except Exception as error:
            raise HandoffError(f"NIXL can't start here: {error}") from error
        if "UCX" not in self._agent.backends:
            raise HandoffError("NIXL can't start here: it came without UCX")

    def expose(self, memory: Bytes | DeviceMemory) -> None:
        if isinstance(memory, np.ndarray):
            row = (memory.ctypes.data, memory.nbytes, 0, "")
        else:
            row = (memory.address, memory.size, memory.index, "")
        with self._translated("memory can't be registered", HandoffError), self._lock:
            self._exposed.append((self._agent.register_memory([row], self._kind.value), memory))

    def card(self) -> bytes:
        with self._translated("no card", HandoffError), self._lock:
            return self._prefix + bytes(self._agent.get_agent_metadata())

    def meet(self, where: Where, card: bytes) -> None:
        with self._lock:
            self._check_kind(where, card)
            before = self._shown.get(where)
            self._shown[where] = card
            if before not in (None, card):
                self._forget_unused(before)
            self._name_of(card)

    def pull(self, card: bytes, there: Rows, into: memoryview | Run) -> NixlPull:
        here = _one_after_the_other(into, there[:, 1])
        with self._lock:
            name = self._name_of(card)
            handle = self._prepared(card, name, here, there)
            self._pulling[card] = self._pulling.get(card, 0) + 1
            try:
                state = self._agent.transfer(handle)
            # NIXL's errors have no base of their own
            except Exception as error:
                log.debug("%s", error)
                state = "ERR"
        return NixlPull(self, card, name, handle, state)

    def close(self) -> None:
        with self._lock:
            for registered, _ in self._exposed:
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(registered)
            self._exposed.clear()
            self._peers.clear()
            self._agent = None

    # -- of pulls ------------------------------------------------------------------------

    def state_of(self, handle: Any) -> str:
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def free(self, card: bytes, handle: Any) -> None:
        """Raises whatever NIXL does where the read can't be ended."""
        with self._lock:
            self._agent.release_xfer_handle(handle)
            self._pulling[card] -= 1
            if not self._pulling[card]:
                del self._pulling[card]
                self._forget_unused(card)

    def failed(self, card: bytes) -> None:
        """A read of that peer's memory failed: whoever reads there next meets it anew."""
        with self._lock:
            self._drop(card)

    # -- with the lock held --------------------------------------------------------------

    @property
    def _prefix(self) -> bytes:
        return f"{self._kind}:".encode()

    def _check_kind(self, where: Where, card: bytes) -> None:
        other = next((kind for kind in MemoryKind if kind is not self._kind), None)
        if other is not None and card.startswith(f"{other}:".encode()):
            raise HandoffError(
                f"the sender at {where[0]}:{where[1]} keeps pages in {_WORDS[other]}, this replica "
                f"reads {_WORDS[self._kind]}",
                hint="name the devices of both replicas in the topology, or of neither",
            )

    def _prepared(self, card: bytes, name: str, here: Rows, there: Rows) -> Any:
        agent, kind = self._agent, self._kind.value
        try:
            return agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(here, kind),
                agent.get_xfer_descs(there, kind),
                name,
            )
        except Exception as error:
            if card not in self._pulling:
                self._drop(card)
            raise _lost(name, error) from error

    def _name_of(self, card: bytes) -> str:
        name = self._peers.get(card)
        if name is None:
            try:
                said = self._agent.add_remote_agent(card.removeprefix(self._prefix))
            except Exception as error:
                raise PeerLost(f"the sender's NIXL card is refused: {error}") from error
            name = said.decode() if isinstance(said, bytes) else str(said)
            self._peers[card] = name
        return name

    def _forget_unused(self, card: bytes | None) -> None:
        if card is None or card in self._shown.values() or card in self._pulling:
            return
        self._drop(card)

    def _drop(self, card: bytes) -> None:
        name = self._peers.pop(card, None)
        if name is not None:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                log.debug("NIXL had forgotten %s already: %s", name, error)

    @contextlib.contextmanager
    def _translated(self, what: str, kind: type[HandoffError]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise kind(f"NIXL: {what}: {error}") from error


class NixlPull:
    """A `Pull`."""

    def __init__(self, reach: NixlReach, card: bytes, name: str, handle: Any, state: str) -> None:
        self._reach = reach
        self._card = card
        self._name = name
        self._handle = handle
        self._state = state

    def landed(self) -> bool:
        if self._state == "PROC":
            try:
                self._state = self._reach.state_of(self._handle)
            except Exception as error:
                self._state = "ERR"
                self._reach.failed(self._card)
                raise _lost(self._name, error) from error
        if self._state not in ("PROC", "DONE"):
            self._reach.failed(self._card)
            raise _lost(self._name, "the transfer failed")
        return self._state == "DONE"

    def release(self) -> bool:
        if self._handle is None:
            return True
        try:
            self._reach.free(self._card, self._handle)
        except Exception as error:
            log.debug("a read of %s is still under way: %s", self._name, error)
            return False
        self._handle = None
        return True


def _one_after_the_other(into: memoryview | Run, sizes: NDArray[np.uint64]) -> Rows:
    """That memory, cut into rows of these sizes."""
    start, device = (
        (into.address, into.memory.index) if isinstance(into, Run) else (address_of(into), 0)
    )
    if len(sizes) == 1:
        return rows(start, int(sizes[0]), device)
    found = np.empty((len(sizes), 3), np.uint64)
    found[:, 0] = np.cumsum(sizes) - sizes + np.uint64(start)
    found[:, 1] = sizes
    found[:, 2] = device
    return found


def _lost(name: str, error: object) -> PeerLost:
    return PeerLost(
        f"NIXL can't read the memory of {name}: {error}",
        hint='look for UCX in both replicas\' logs, or write transport = "tcp"',
    )
