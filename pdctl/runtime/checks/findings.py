"""What `doctor` finds, in the shape that `--json` prints (docs/doctor.md)."""

from __future__ import annotations

import msgspec

from pdctl.runtime.hosts.survey import Device
from pdctl.topology.diagnostics import Diagnostic


class EngineFound(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica's environment holds."""

    replica: str
    engine: str
    engine_version: str | None
    """None where its probe did not answer: a diagnostic says why."""
    python_version: str | None = None
    pdctl_version: str | None = None


class PortFound(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    address: str
    port: int
    state: str
    """ "free", "own" (of this running cluster) or "closed" (a diagnostic says why)."""


class HostFound(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    destination: str | None
    """As ssh takes it; None is this machine."""
    error: str | None = None
    """Why it can't be reached; everything below is then absent."""
    reached_ms: float | None = None
    round_trip_ms: float | None = None
    python: str | None = None
    """The interpreter that runs the agent; versions are its."""
    python_version: str | None = None
    pdctl_version: str | None = None
    xoscar_version: str | None = None
    clock_offset_s: float | None = None
    """Its clock minus this machine's."""
    disk_free_bytes: int | None = None
    memory_free_bytes: int | None = None
    devices: tuple[Device, ...] = ()
    engines: tuple[EngineFound, ...] = ()
    ports: tuple[PortFound, ...] = ()


class PairFound(msgspec.Struct, frozen=True, kw_only=True):
    prefill: str
    decode: str
    prefill_host: str
    decode_host: str
    transport: str
    address: str
    port: int
    note: str | None = None
    """Why another port than the data port was tried."""
    tried: bool = True
    """Whether anything was dialled; where not, `error` says why."""
    error: str | None = None
    resolved: str | None = None
    round_trip_ms: float | None = None
    bytes_per_s: float | None = None
    """From the prefill replica's host to the decode replica's, by one TCP stream, under TLS where
    the data plane will be."""
    opens: str | None = None
    """The command that opens a closed port."""
    tests: tuple[str, ...] = ()
    """By hand: what listens meanwhile, and what dials."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor --json` prints."""

    format_version: str = "1.0"
    cluster: str | None
    fit: bool
    """No error among the diagnostics."""
    running: bool
    """Whether this very cluster was running meanwhile."""
    encrypt: bool | None
    data_plane: str | None
    """In words: plain or TLS."""
    hosts: tuple[HostFound, ...] = ()
    pairs: tuple[PairFound, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
