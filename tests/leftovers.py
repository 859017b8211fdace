"""Fails when a process that pdctl started out of this checkout is still running. Called at the
end of CI. Clusters of another checkout are none of its business."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from pdctl.engines.channel import RUN_ENV

ROOT = f"{Path(__file__).resolve().parent.parent}/"


def main() -> int:
    """Exit status 1, and a line per process, when any is left."""
    left = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if RUN_ENV in process.environ() and _from_here(process):
                left.append(process)
        except psutil.Error:
            continue
    for process in left:
        print(f"left running: {process.info['pid']} {' '.join(process.info['cmdline'] or ())}")  # noqa: T201
    return 1 if left else 0


def _from_here(process: psutil.Process) -> bool:
    """Whether it runs a program of this checkout's environments. An engine's own processes
    rename themselves; what they have loaded still tells."""
    if any(word.startswith(ROOT) for word in process.cmdline()):
        return True
    return any(mapped.path.startswith(ROOT) for mapped in process.memory_maps())


if __name__ == "__main__":
    sys.exit(main())
