"""A sender and a receiver in one process, with an engine at either end that tests can steer."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
from handoff.devices import as_array

from pdctl.errors import HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import DeviceMaker
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.receiver import Inbound, Receiver, Want
from pdctl.handoff.sender import Outbound, Sender
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.tcp import TcpTransport

KEY = bytes(range(32))
DIGEST = "5d" * 32
SMALL = PageGeometry(2, 1, 4)
WAIT_S = 20.0
"""Far beyond anything that passes; only a failing test waits for it."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    room: int
    ticket: str
    prefill: str = "p0"
    decode: str = "d0"
    sender: str
    timeout_s: float = 60.0


def kv(tokens: int, geometry: PageGeometry = SMALL) -> Patterns:
    """Pages with a pattern of its own in every slot that a token has, zero elsewhere."""
    pages = geometry.empty(tokens)
    flat = pages.transpose(0, 3, 1, 2, 4, 5).reshape(-1, geometry.token_bytes // 2)
    count = flat[:tokens].size
    values = (np.arange(count, dtype=np.uint32) * 2654435761 >> 7).astype(np.uint16) | 1
    flat[:tokens] = values.reshape(tokens, -1)
    return np.ascontiguousarray(
        flat.reshape(
            len(pages), geometry.page_tokens, geometry.layers, 2, geometry.kv_heads, -1
        ).transpose(0, 2, 3, 1, 4, 5)
    )


class Sink:
    """A decode engine: remembers the calls; `hold` stops it inside a named call."""

    def __init__(
        self,
        geometry: PageGeometry = SMALL,
        *,
        spare: int = 1,
        held_tokens: int = 0,
        first_token: bool = False,
    ) -> None:
        self.geometry = geometry
        self.spare = spare
        self.held_tokens = held_tokens
        self.wants_first_token = first_token
        self.calls: list[str] = []
        self.error: HandoffError | None = None
        self.first_token: int | None = None
        self.pages: Patterns = geometry.empty(0)
        self.raises: dict[str, Exception] = {}
        self.inside = threading.Event()
        self.returned: dict[str, threading.Event] = defaultdict(threading.Event)
        self.proceed = threading.Event()
        self.over = threading.Event()
        self._held_call: str | None = None
        self._busy = threading.Lock()

    def hold(self, call: str) -> None:
        self._held_call = call

    def _enter(self, call: str) -> None:
        assert self._busy.acquire(blocking=False), f"{call} during {self.calls[-1]}"
        try:
            assert not self.over.is_set(), f"{call} after the end"
            self.calls.append(call)
            if self._held_call == call:
                self.inside.set()
                assert self.proceed.wait(WAIT_S)
            if call in self.raises:
                raise self.raises[call]
        finally:
            self._busy.release()
            self.returned[call].set()

    def offered(self, tokens: int, deadline: float) -> Want:
        self._enter("offered")
        want = Want(
            tokens=tokens - self.spare,
            held_tokens=self.held_tokens,
            first_token=self.wants_first_token,
        )
        self.pages = self.geometry.empty(want.tokens)
        return want

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        self._enter("write")
        self.pages[page, first_layer : first_layer + len(piece)] = piece

    def commit(self, first_token: int | None) -> None:
        self._enter("commit")
        self.first_token = first_token
        self.over.set()

    def abort(self, error: HandoffError) -> None:
        self._enter("abort")
        self.error = error
        self.over.set()

    @property
    def committed(self) -> bool:
        return "commit" in self.calls and "abort" not in self.calls


class Prefill:
    """The engine's view of one prompt on the sender."""

    def __init__(self) -> None:
        self.reserved = threading.Event()
        self.told = threading.Event()
        self.settled_calls = 0
        self.outbound: Outbound | None = None

    def on_reserved(self, outbound: Outbound) -> None:
        self.outbound = outbound
        self.reserved.set()

    def on_settled(self, outbound: Outbound) -> None:
        self.settled_calls += 1
        self.told.set()

    def told_once(self) -> bool:
        """Of the end: right after `settled`, on the thread that ended it."""
        return self.told.wait(WAIT_S) and self.settled_calls == 1


class Ends:
    """Both ends over one transport, and what they counted and reported."""

    def __init__(
        self,
        transport: Transport,
        geometry: PageGeometry = SMALL,
        *,
        budget_bytes: int = 1 << 30,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        host: str = "127.0.0.1",
        receiving: Transport | None = None,
        device: DeviceMaker | None = None,
    ) -> None:
        self.geometry = geometry
        self.transport = transport
        make_reach = getattr(transport, "make_reach", lambda replica: None)
        self.sent, self.got = CounterBoard(), CounterBoard()
        self.failed: list[tuple[str, int, str]] = []
        self.sender = Sender(
            Identity("p0", KEY, DIGEST),
            geometry,
            listen=(host, 0),
            budget_bytes=budget_bytes,
            timeout_s=timeout_s,
            board=self.sent,
            on_failed=lambda room, cause, detail: self.failed.append(("p0", room, cause)),
            clock=clock,
            transport=transport,
            reach=make_reach("p0"),
            device=device,
            reads=lambda decode: decode == "d0",
        )
        self.receiver = Receiver(
            Identity("d0", KEY, DIGEST),
            geometry,
            timeout_s=timeout_s,
            board=self.got,
            on_failed=lambda room, cause, detail: self.failed.append(("d0", room, cause)),
            clock=clock,
            transport=receiving or transport,
            reach=make_reach("d0"),
            device=device,
        )
        self.port = self.sender.start()
        self.host = f"[{host}]" if ":" in host else host
        self._room = 0

    def leg(self, **changes: object) -> Leg:
        self._room += 1
        ticket = mint(KEY, self._room, "p0", "d0", DIGEST, time.time() + 600)
        leg = Leg(room=self._room, ticket=ticket, sender=f"{self.host}:{self.port}")
        return msgspec.structs.replace(leg, **changes)

    def admit(self, leg: Leg, token_ids: list[int], prefill: Prefill) -> Outbound:
        return self.sender.admit(
            leg, token_ids, on_reserved=prefill.on_reserved, on_settled=prefill.on_settled
        )

    def compute(self, outbound: Outbound, *, chunk: int = 1000, first_token: int = 7) -> None:
        """What an engine does: n-1 positions in chunks, then the last one if it is wanted."""
        source = kv(outbound.tokens, self.geometry)
        place(outbound, source, outbound.tokens - 1, chunk)
        if outbound.begin_last():
            place(outbound, source, outbound.tokens, chunk)
        outbound.finish(first_token)

    def run(self, tokens: int, sink: Sink, *, chunk: int = 1000) -> tuple[Outbound, Inbound]:
        """One whole handoff, both ends settled."""
        leg, prefill = self.leg(), Prefill()
        ids = list(range(tokens))
        inbound = self.receiver.fetch(leg, ids, sink)
        outbound = self.admit(leg, ids, prefill)
        assert prefill.reserved.wait(WAIT_S)
        self.compute(outbound, chunk=chunk)
        assert outbound.settled.wait(WAIT_S)
        assert inbound.settled.wait(WAIT_S)
        return outbound, inbound

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def place(outbound: Outbound, source: Patterns, tokens: int, chunk: int) -> None:
    """Writes positions up to `tokens` as an engine would, a chunk at a time."""
    size = source.shape[3]
    at = outbound.positions
    while at < tokens:
        stop = min(at + chunk, tokens)
        pages = as_array(outbound.pages(), source.shape[1:])
        for page in range(at // size, -(-stop // size)):
            first, last = max(at - page * size, 0), min(stop - page * size, size)
            pages[page, :, :, first:last] = source[page, :, :, first:last]
        outbound.written(stop)
        at = stop


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Once:
    """Set when a method of one object has been called, from any thread."""

    def __init__(self, target: object, name: str) -> None:
        self._event = threading.Event()
        method = getattr(target, name)

        def call(*args: object, **kwargs: object) -> object:
            try:
                return method(*args, **kwargs)
            finally:
                self._event.set()

        setattr(target, name, call)

    def wait(self) -> None:
        assert self._event.wait(WAIT_S)


def until(reached: Callable[[], bool]) -> None:
    """Waits for what nothing signals."""
    until_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < until_s
        time.sleep(1e-3)


def open_files() -> set[str]:
    """Descriptors of this process with what they are."""
    found = set()
    for each in Path("/dev/fd").iterdir():
        with suppress(OSError):
            found.add(f"{each.name} {os.readlink(each)}")
    return {each for each in found if "/dev/fd" not in each and "/proc/" not in each}


@contextmanager
def nothing_left(*, descriptors: bool = True) -> Iterator[None]:
    """No thread of a handoff and no file descriptor is left that was not there before."""
    fds, threads = open_files(), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("pdctl-"):
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{thread.name} is left"
    left = open_files() - fds if descriptors else None
    if left:
        # an exception of a test's engine may hold a piece, and is held by its own traceback
        gc.collect()
        left = open_files() - fds
    assert not left, f"{left} are left, with {threading.enumerate()}"


@contextmanager
def both_ends(transport: Transport | None = None, **options: object) -> Iterator[Ends]:
    """Both ends, closed at the end: then every gauge is zero and nothing is left."""
    transport = transport or TcpTransport()
    with nothing_left(descriptors=not getattr(transport, "keeps_descriptors", False)):
        ends = Ends(transport, **options)
        try:
            yield ends
        finally:
            ends.close()
    for counters in (ends.sent.read(), ends.got.read()):
        assert (counters.handoffs_active, counters.buffer_bytes_used, counters.waiters) == (0, 0, 0)
        assert all(pair.handoffs_active == 0 for pair in counters.pairs.values())
