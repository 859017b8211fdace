"""One thread per end that looks at every handoff's lease, and makes calls that others must not
make on their own thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("pdctl.handoff")

BUSY_S = 0.25
"""Between beats while handoffs are under way: the error of every limit in `lease.py`."""
IDLE_S = 5.0


class Pulse:
    """Calls `beat` regularly and whatever was posted, in order, without any lock held.

    Args:
        beat: returns whether handoffs are under way.
    """

    def __init__(self, name: str, beat: Callable[[], bool]) -> None:
        self._beat = beat
        self._wake = threading.Condition()
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False
        self._resting = False
        self._stopped = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Runs `call` soon, on the pulse's thread, or here once that has ended; it must not
        block."""
        with self._wake:
            if not self._ended:
                self._posted.append(call)
                self._wake.notify()
                return
        guarded(call)

    def wake(self) -> None:
        """A handoff began: beats now, or within `BUSY_S` where others are under way."""
        with self._wake:
            self._woken = True
            if self._resting:
                self._wake.notify()

    def stop(self, timeout_s: float) -> None:
        """Runs what was posted, then ends the thread."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        busy = False
        while True:
            with self._wake:
                if not (self._posted or self._woken or self._stopped):
                    self._resting = not busy
                    self._wake.wait(BUSY_S if busy else IDLE_S)
                    self._resting = False
                calls, stopped = list(self._posted), self._stopped
                self._posted.clear()
                self._woken = False
                self._ended = stopped and not calls
            for call in calls:
                guarded(call)
            if self._ended:
                return
            busy = bool(guarded(self._beat))


def guarded(call: Callable[[], object]) -> object:
    """The call's result; None where it failed, which is logged: the next step still runs."""
    try:
        return call()
    # an engine's callback may raise anything; clean-up goes on (R17, R18)
    except Exception:
        log.exception("a handoff's callback failed")
        return None
