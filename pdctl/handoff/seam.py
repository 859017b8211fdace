"""What an engine sees of the data plane, wherever that runs: `sender.py` and `receiver.py` in the
engine's own process, `apart/` in a process beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from pdctl.errors import HandoffError
from pdctl.handoff.device import Pages
from pdctl.handoff.identity import Leg
from pdctl.handoff.sink import PageSink


class Outgoing(Protocol):
    """One prompt's handoff on the sender; `outbound.Outbound` says what each method does. Any
    thread, never blocks on the network, ignored once it is over but for `pages`."""

    room: int
    error: HandoffError | None
    done: bool
    settled: threading.Event

    def pages(self) -> Pages: ...

    def written(
        self, tokens: int, computed_at: float | None = None, *, layers: int | None = None
    ) -> None: ...

    def begin_last(self) -> bool: ...

    def finish(self, first_token: int) -> None: ...

    def fail(self, error: HandoffError) -> None: ...

    def cancel(self) -> None: ...


class SendingEnd(Protocol):
    """`sender.Sender` says what each method does, and what it raises."""

    def start(self) -> int: ...

    def admit(
        self,
        leg: Leg,
        token_ids: Sequence[int],
        *,
        on_reserved: Callable[[Outgoing], None],
        on_settled: Callable[[Outgoing], None],
    ) -> Outgoing: ...

    def release(self, room: int) -> None: ...

    def close(self) -> None: ...


class Incoming(Protocol):
    """One prompt's handoff on the receiver (`inbound.Inbound`)."""

    room: int
    error: HandoffError | None
    settled: threading.Event

    def cancel(self) -> None: ...


class ReceivingEnd(Protocol):
    """`receiver.Receiver` says what each method does, and what it raises."""

    def start(self) -> None: ...

    def fetch(self, leg: Leg, token_ids: Sequence[int], sink: PageSink) -> Incoming: ...

    def close(self) -> None: ...
