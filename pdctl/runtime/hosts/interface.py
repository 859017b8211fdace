"""The seam between pdctl and a host: its methods, each of which is also one remote command.

All methods block, are bounded, and may be called from any thread. Paths are the host's own;
`~` is its user's home. Whatever goes wrong on the way is a `HostError` that names the host.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdctl.engines.interface import Command
from pdctl.runtime.hosts.survey import Survey


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A command that ended by itself."""

    returncode: int
    """Negative: ended by that signal."""
    stdout: bytes
    stderr: bytes


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is known by. A pid alone is used again; with its birth it is unique."""

    pid: int
    birth: str
    """Opaque: the boot and the start time in it, as the host's kernel counts them."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a file that may grow."""

    size: int
    """Of the whole file, in bytes; 0 where there is none."""
    content: bytes


class RuntimeHost(Protocol):
    name: str
    """As in the topology."""
    survey: Survey
    """What must be known of it before anything runs there."""

    def run(self, command: Command, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Runs to the end. Past `timeout_s` its whole process group is killed: HostError."""
        ...

    def spawn(self, command: Command, *, log: str) -> Mark:
        """Starts a process that outlives this one: a session of its own, no stdin, output
        appended to `log`. HostError when it can't be executed."""
        ...

    def alive(self, mark: Mark) -> bool:
        """Whether that very process still runs; a zombie does not."""
        ...

    def signal(self, mark: Mark, number: int) -> None:
        """Signals the process and its group; nothing when it has gone."""
        ...

    def marked(self, run: str) -> list[Mark]:
        """This user's processes that carry `PDCTL_RUN=<run>`: everything of one `up`."""
        ...

    def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """The last `max_bytes` of a file; None when there is none."""
        ...

    def slice(self, path: str, start: int, max_bytes: int) -> Slice:
        """At most `max_bytes` of a file from byte `start` on; an absent file is empty."""
        ...

    def write(self, path: str, content: bytes) -> None:
        """Replaces a file whole, mode 0600; its folder must exist."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, a socket, or a folder with all in it; nothing when absent."""
        ...

    def make_dir(self, path: str) -> None:
        """Makes a folder 0700, parents too. HostError when it exists and belongs to another
        user, is a link, or is open to others."""
        ...
