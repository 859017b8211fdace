"""The seam between pdctl and what it must know of a host: seven questions, asked on the spot.

Like `RuntimeHost`: every method blocks, is bounded, and may be called from any thread; what
goes wrong on the way is a `HostError` that names the host. Nothing is left listening.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.fingerprint import Fingerprint

HashProgress = Callable[[int, int], None]
"""(bytes hashed, bytes in all); from any thread."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a host before anything runs there."""

    pdctl_version: str
    python: str
    """The interpreter that answers: what would run the agent."""
    python_version: str
    xoscar_version: str | None
    """None where it is not installed: no agent can run there."""
    uid: int
    state_home: str
    """Absolute; where clusters' state lies there."""
    boot: str
    """The kernel's boot id, or what comes closest: another after every reboot."""
    clock_s: float
    """Unix seconds there, at the moment of the answer."""
    memory_free_bytes: int
    disk_free_bytes: int
    """Of the file system that holds `state_home`: logs are written there."""
    devices: tuple[Device, ...] = ()


class CheckpointRead(msgspec.Struct, frozen=True, kw_only=True):
    """What one model directory holds, or why it can't be served."""

    model_dir: str
    """`~` expanded."""
    real_dir: str
    """Links followed: equal for two names of one directory."""
    checkpoint: Checkpoint | None
    problems: tuple[Diagnostic, ...] = ()


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """An address that something of the plan will listen on."""

    subject: str
    """As a sentence starts: `replica "p0" http_port`."""
    address: tuple[str, int]
    field: str | None
    replica: str | None = None


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP port that something listens on."""

    port: int
    pid: int | None = None
    """None where it belongs to another user."""
    since: float | None = None
    """Unix seconds of that process's start."""


class Dialled(msgspec.Struct, frozen=True, kw_only=True):
    """How dialling the other end of a pair went."""

    error: str | None = None
    """None: the right listener answered."""
    connected: bool = False
    """Whether anything took the connection, be it the wrong one."""
    resolved: str | None = None
    """The address that the name stands for there."""
    round_trip_s: float | None = None
    """Median of several small messages."""
    bytes_per_s: float | None = None
    """Of what the listener sent; None where nothing was asked for."""


class Survey(Protocol):
    def facts(self) -> HostFacts: ...

    def checkpoint(self, model_dir: str) -> CheckpointRead:
        """Reads config.json; weights are not touched. `~` is that host's home."""
        ...

    def fingerprint(
        self, model_dir: str, checkpoint: Checkpoint, progress: HashProgress
    ) -> Fingerprint:
        """Raises FingerprintError for what is wrong with the files."""
        ...

    def listeners(self) -> list[Listener]:
        """Every TCP port that is listened on now."""
        ...

    def bindings(self, wanted: tuple[Binding, ...]) -> list[Diagnostic]:
        """Tries to listen on each for a moment; what prevents it, in words."""
        ...

    def answer(
        self, address: tuple[str, int], token: str, *, for_s: float, encrypt: bool = False
    ) -> None:
        """Returns once it listens at `address`; until `for_s` have passed (or the asker has
        gone) it answers whoever sends `token`, and nobody else. HostError where it can't.

        Args:
            encrypt: whether both ends speak under TLS 1.3.
        """
        ...

    def dial(
        self,
        address: tuple[str, int],
        token: str,
        *,
        timeout_s: float,
        measure_bytes: int = 0,
        encrypt: bool = False,
    ) -> Dialled:
        """Dials an `answer` from here; `measure_bytes` of payload are asked for and timed."""
        ...
