"""Which boot of this machine this is: with another one, no process of before is alive."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from pathlib import Path

import psutil

SYSCTL_S = 5.0


@functools.cache
def boot_id() -> str:
    """The kernel's own id of this boot; on macOS its session's, else the boot's second."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            ("sysctl", "-n", "kern.bootsessionuuid"),
            capture_output=True,
            text=True,
            timeout=SYSCTL_S,
            check=True,
        )
        if asked.stdout.strip():
            return asked.stdout.strip()
    return f"{psutil.boot_time():.0f}"
