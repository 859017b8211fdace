"""A sender and a receiver whose data planes are processes of their own, with an engine at either
end that tests can steer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from handoff.ends import DIGEST, KEY, SMALL, WAIT_S, Ends, Prefill, Sink, kv, nothing_left

from pdctl.errors import HandoffError
from pdctl.handoff.apart.receiving import ApartInbound, ApartReceiver
from pdctl.handoff.apart.sending import ApartOutbound, ApartSender
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.opening import Opening
from pdctl.handoff.page import PageGeometry
from pdctl.topology.model import Transport

TIMEOUT_S = 60.0


class ApartEnds(Ends):
    """As `Ends`, over TCP between two more processes."""

    def __init__(
        self,
        geometry: PageGeometry = SMALL,
        *,
        budget_bytes: int = 1 << 24,
        lock: Callable[[Bytes], None] | None = None,
        transports: dict[str, Transport] | None = None,
    ) -> None:
        self.geometry = geometry
        ways = transports or {}
        self.sent, self.got = CounterBoard(), CounterBoard()
        self.failed: list[tuple[str, int, str]] = []
        self.lost: list[HandoffError] = []
        self.gone = threading.Event()
        self.sender = ApartSender(
            opening(geometry, sends=True, buffer_bytes=budget_bytes, transports=ways),
            lock=lock,
            board=self.sent,
            on_failed=lambda room, cause, detail: self.failed.append(("p0", room, cause)),
            on_lost=self._on_lost,
        )
        self.receiver = ApartReceiver(
            opening(geometry, sends=False, transports=ways),
            lock=lock,
            board=self.got,
            on_failed=lambda room, cause, detail: self.failed.append(("d0", room, cause)),
            on_lost=self._on_lost,
        )
        self.port = self.sender.start()
        self.receiver.start()
        self.host = "127.0.0.1"
        self._room = 0

    def _on_lost(self, error: HandoffError) -> None:
        self.lost.append(error)
        self.gone.set()

    def compute(self, outbound: ApartOutbound, *, chunk: int = 1000, first_token: int = 7) -> None:
        source, size = kv(outbound.tokens, self.geometry), self.geometry.page_tokens
        at = 0
        while at < outbound.tokens:
            stop = min(at + chunk, outbound.tokens)
            if stop == outbound.tokens and not outbound.begin_last():
                stop -= 1
            pages = outbound.pages()
            for page in range(at // size, -(-stop // size)):
                first, last = max(at - page * size, 0), min(stop - page * size, size)
                pages[page, :, :, first:last] = source[page, :, :, first:last]
            outbound.written(stop)
            at += chunk
        outbound.finish(first_token)

    def begin(self, tokens: int, sink: Sink) -> tuple[ApartOutbound, ApartInbound, Prefill]:
        """Both legs of one prompt, its pages reserved."""
        leg, prefill, ids = self.leg(), Prefill(), range(tokens)
        inbound = self.receiver.fetch(leg, ids, sink)
        outbound = self.sender.admit(
            leg, ids, on_reserved=prefill.on_reserved, on_settled=prefill.on_settled
        )
        return outbound, inbound, prefill

    def run(self, tokens: int, sink: Sink, *, chunk: int = 1000) -> HandoffError | None:
        """One whole handoff, both ends settled; how it ended on the sender."""
        outbound, inbound, prefill = self.begin(tokens, sink)
        assert prefill.reserved.wait(WAIT_S)
        # it may have failed by then
        with suppress(HandoffError):
            self.compute(outbound, chunk=chunk)
        settle(outbound, inbound)
        return outbound.error


def settle(*handoffs: ApartOutbound | ApartInbound) -> None:
    for each in handoffs:
        assert each.settled.wait(WAIT_S)


def opening(geometry: PageGeometry, *, sends: bool, **more: Any) -> Opening:
    identity = Identity("p0" if sends else "d0", KEY, DIGEST)
    return Opening(identity=identity, geometry=geometry, sends=sends, timeout_s=TIMEOUT_S, **more)


def at_rest(ends: ApartEnds) -> None:
    """Nothing is active, on any gauge."""
    for counters in (ends.sent.read(), ends.got.read()):
        assert (counters.handoffs_active, counters.buffer_bytes_used, counters.waiters) == (0, 0, 0)
        assert all(pair.handoffs_active == 0 for pair in counters.pairs.values())


@contextmanager
def apart(**options: object) -> Iterator[ApartEnds]:
    """Both ends, closed at the end: then nothing is left."""
    with nothing_left():
        ends = ApartEnds(**options)
        try:
            yield ends
        finally:
            ends.close()
    at_rest(ends)
