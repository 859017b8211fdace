"""What an agent started, on disk: `down` works when the agent is dead, and the next agent
takes living processes over."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from pdctl.engines.channel import Ready
from pdctl.errors import HostError
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.hosts.local import LocalHost

log = logging.getLogger("pdctl.agent")

ROUTER = "router"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as it was last seen. Entries are written before anything can rely on them;
    a process started a moment before its agent died is found by its run's mark."""

    name: str
    """The replica's name, or "router"."""
    mark: Mark | None
    started_at: float | None
    """Unix seconds."""
    incarnation: int
    restarts: int
    wanted: bool
    """Whether it should run."""
    ready: Ready | None = None
    """What it said when it became ready; None where it has not, or is a router."""
    attached: bool = False
    """It was ready."""
    drained: bool = False
    """It is to get no new request."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[Entry, ...] = ()

    def entry(self, name: str) -> Entry | None:
        return next((e for e in self.entries if e.name == name), None)

    @property
    def stop_order(self) -> tuple[Entry, ...]:
        """The router first, so that no request meets a replica that is going."""
        return tuple(sorted(self.entries, key=lambda e: e.name != ROUTER))


def read(path: Path) -> Journal:
    """An absent or damaged journal is an empty one: the run's mark finds the rest."""
    return decode(LocalHost().read(str(path)))


def decode(raw: bytes | None) -> Journal:
    """As `read`, of a file's content; None where there is no file."""
    if raw is None:
        return Journal()
    try:
        return msgspec.json.decode(raw, type=Journal)
    except msgspec.MsgspecError:
        return Journal()


def write(path: Path, journal: Journal) -> None:
    LocalHost().write(str(path), msgspec.json.encode(journal))


def keep(path: Path, entries: tuple[Entry, ...]) -> bool:
    """As `write`; False where it can't be. A full disk must not end the agent: without a
    journal, the run's mark is left."""
    try:
        write(path, Journal(entries=entries))
    except HostError as error:
        log.error("%s", error.message)
        return False
    return True


def uptime_s(started_at: float | None) -> float | None:
    return None if started_at is None else max(0.0, time.time() - started_at)
