"""How a prompt's handoff on the sender ends: once, by either end, the clock or the link."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdctl.errors import HandoffCancelled, HandoffError, HandoffExpired
from pdctl.handoff.lease import Deadline
from pdctl.handoff.state import SENDER_FINAL, Event, Sending, sending


class EndsOnce:
    """The state, the deadline and the one end of a room. Thread-safe; nothing here blocks.

    Args:
        post: runs a call soon, on another thread.
        settle: gives everything back and tells everybody; called once.
    """

    def __init__(
        self,
        room: int,
        deadline: Deadline,
        *,
        post: Callable[[Callable[[], None]], None],
        settle: Callable[[], None],
    ) -> None:
        self.room = room
        self.error: HandoffError | None = None
        """Why it failed; set before `settled`."""
        self.done = False
        """The receiver has committed everything."""
        self.settled = threading.Event()
        """Set at the end, after pages, budget and counters were given back."""
        self._deadline = deadline
        self._post = post
        self._settle = settle
        self._changed = threading.Condition()
        self._machine = sending()
        self._tell_peer = False
        self._settling = False

    @property
    def over(self) -> bool:
        return self._machine.state in SENDER_FINAL

    @property
    def served(self) -> bool:
        """A receiver's connection serves the room: it settles what has ended."""
        raise NotImplementedError

    def free(self) -> None:
        """Lets the pages go; called once, with the lock held."""
        raise NotImplementedError

    def fail(self, error: HandoffError) -> None:
        """Ends the handoff; the receiver is told. Does nothing once it is over."""
        self._end(error, tell_peer=True)

    def cancel(self) -> None:
        self.fail(HandoffCancelled(f"room {self.room} was cancelled on the sender"))

    def committed(self) -> None:
        """The receiver's Done; `settle` follows."""
        with self._changed:
            if self.over:
                return
            self._machine.on(Event.DONE)
            self.done = True
            self._changed.notify_all()

    def aborted(self, error: HandoffError) -> None:
        """The receiver's Abort; `settle` follows."""
        self._end(error, tell_peer=False, event=Event.ABORT)

    def lose(self, error: HandoffError) -> None:
        """Ends the handoff because of the peer, who need not be told; `settle` follows."""
        self._end(error, tell_peer=False)

    def moved(self, payload_at: float) -> None:
        """Bytes of a page left at that time: progress, however slow (R5)."""
        self._deadline.progressed(payload_at)

    def idle_s(self, now: float) -> float:
        """Seconds since its last progress."""
        return self._deadline.idle_s(now)

    def check(self, now: float) -> None:
        """Expires the handoff when its time is over."""
        if self._deadline.passed(now):
            self.fail(self._expired())

    def _expired(self) -> HandoffExpired:
        state, waited = self._machine.state, f"for {self._deadline.timeout_s:g} s"
        if state in (Sending.QUEUED, Sending.CLAIMED):
            return HandoffExpired(
                f"room {self.room} waited {waited} for pages: the buffer is full",
                hint="raise handoff.timeout_s, or handoff.buffer_bytes",
            )
        return HandoffExpired(
            f"room {self.room} made no progress {waited} while {state.value}",
            hint="raise handoff.timeout_s if prompts take longer than that",
        )

    def settle(self) -> None:
        """Gives everything back, then says so; the first call only. No send may be reading
        the pages."""
        with self._changed:
            if self._settling or not self.over:
                return
            self._settling = True
            self.free()
        self._settle()

    def _end(self, error: HandoffError, *, tell_peer: bool, event: Event = Event.FAIL) -> None:
        with self._changed:
            if self.over:
                return
            self._machine.on(event)
            self.error = error
            self._tell_peer = tell_peer
            unserved = not self.served
            self._changed.notify_all()
        if unserved:
            self._post(self.settle)
