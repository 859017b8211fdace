"""What happens during `up` and `down`, as data; the command renders it."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec


class Stage(enum.StrEnum):
    VALIDATE = "validate"
    AGENT = "agent"
    REPLICA = "replica"
    STORE = "page store"
    ROUTER = "router"
    PAIR = "pair"
    """A pair's canary."""
    PATH = "path"
    """That of a replica which answers alone."""
    ROLLBACK = "rollback"
    STOP = "stop"
    LOG = "log"
    """One line of a failed process's log."""


class LaunchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change. The same subject appears with each of its states, in order."""

    stage: Stage
    subject: str
    """A replica's name, a host's, "router", or a path "p0>d0"."""
    state: str
    """In a process's or a pair's words: "starting", "ready", "stopped" …"""
    detail: str | None = None
    pid: int | None = None


Emit = Callable[[LaunchEvent], None]
"""Called in the event loop; must not wait."""


def nothing(event: LaunchEvent) -> None:
    """Shows nothing."""
