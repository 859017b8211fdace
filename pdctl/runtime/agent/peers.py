"""Whether a process that attaches is the one that was started under its name."""

from __future__ import annotations

import os

from pdctl.engines.channel import Attach
from pdctl.runtime.hosts.interface import Mark


def stranger(attach: Attach, mark: Mark | None, *, uid: int | None, pid: int | None) -> str | None:
    """Why this peer is not what it says: another user's, or not of the process group that was
    started under that name (an earlier one that is still dying, say). None where it is.

    Args:
        mark: of what runs under the name now; it leads its session.
        uid, pid: the peer's, as the kernel tells them; None where it does not.
    """
    if uid is not None and uid != os.getuid():
        return "another user's process"
    try:
        session = os.getsid(pid or attach.pid)
    except (ProcessLookupError, PermissionError):
        return "its process can't be seen"
    if mark is None or session != mark.pid:
        return f"process {attach.pid} is not the one that runs as {attach.name}"
    return None
