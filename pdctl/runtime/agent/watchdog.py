"""`python -m pdctl.runtime.agent.watchdog --state DIR --host NAME`: keeps one agent running.

An agent that dies is started again and takes its processes over from its journal; one that
ends by itself, because it was told to, takes its watchdog with it. An agent that never served
is not tried again: the launch that waits for it wants to know at once.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

SERVING_FD_ENV = "PDCTL_SERVING_FD"
"""Where the agent writes a byte once it serves."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STABLE_S = 30.0
"""Having served for this long, what came before is forgotten."""
CRASHES = 10
"""In a row; then the watchdog gives up, and `ps` says that the agent is lost."""

log = logging.getLogger("pdctl.watchdog")


class Watchdog:
    """One agent, through all its incarnations. `run` blocks in the main thread."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._told: int | None = None

    def run(self) -> int:
        """The exit code: the agent's own where it was told to end or never served, 1 after a
        crash loop."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._tell)
        crashes, served_before = 0, False
        while True:
            status, served_s = self._once()
            if status == 0 or self._told is not None:
                return max(0, status)
            if served_s is None and not served_before:
                return status if status > 0 else 1
            served_before = True
            crashes = 1 if (served_s or 0.0) >= STABLE_S else crashes + 1
            if crashes >= CRASHES:
                log.error("the agent ended %d times in a row; giving up", crashes)
                return 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (crashes - 1))
            log.warning("the agent ended (status %d); next start in %.1f s", status, pause_s)
            self._pause(pause_s)
            if self._told is not None:
                return 0

    def _once(self) -> tuple[int, float | None]:
        """(exit status, seconds for which it served; None: it never did)."""
        reading, writing = os.pipe()
        try:
            self._child = subprocess.Popen(
                self._command,
                env={**os.environ, SERVING_FD_ENV: str(writing)},
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(writing)
        if self._told is not None:
            self._child.send_signal(self._told)
        try:
            served = os.read(reading, 1) == b"1"
        finally:
            os.close(reading)
        began_s = time.monotonic()
        status = self._child.wait()
        return status, time.monotonic() - began_s if served else None

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _pause(self, pause_s: float) -> None:
        """Ends early by a signal."""
        until_s = time.monotonic() + pause_s
        while self._told is None and (left_s := until_s - time.monotonic()) > 0:
            select.select([], [], [], min(left_s, 0.2))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return Watchdog((sys.executable, "-m", "pdctl.runtime.agent", *sys.argv[1:])).run()


if __name__ == "__main__":
    sys.exit(main())
