"""Fails when a process that pdctl started is still running. Called at the end of CI."""

from __future__ import annotations

import sys

import psutil

from pdctl.engines.channel import RUN_ENV


def main() -> int:
    """Exit status 1, and a line per process, when any is left."""
    left = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if RUN_ENV in process.environ():
                left.append(process)
        except psutil.Error:
            continue
    for process in left:
        print(f"left running: {process.info['pid']} {' '.join(process.info['cmdline'] or ())}")  # noqa: T201
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
