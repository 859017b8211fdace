"""The machine that a sweep runs on, and what disturbed it meanwhile."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

import pdctl


class Disturbance:
    """CPU steal and load over one turn: made before it, asked after it.

    Sees the machine that the sweep runs on; engines on other hosts are not watched.
    """

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def steal(self) -> float:
        """Share of CPU time, 0 to 1, that the hypervisor gave to others; 0.0 where unknown."""
        before, after = self._before, psutil.cpu_times()
        total = sum(after) - sum(before)
        stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
        return stolen / total if total > 0 else 0.0

    @staticmethod
    def load() -> float:
        """Runnable processes, averaged over the last minute."""
        return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    return {"pdctl": pdctl.__version__, "python": platform.python_version()}


def _processor() -> str:
    """The model's name on Linux; elsewhere what the platform says."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
