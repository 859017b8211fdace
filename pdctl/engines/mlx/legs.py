"""The two ends of a handoff inside the engine: what a call's leg does, thread by thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdctl.engines.ahead import take_ahead
from pdctl.engines.interface import Leg
from pdctl.engines.mlx import versions
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.exporter import Export
from pdctl.engines.mlx.importer import ImportedCache
from pdctl.errors import HandoffCancelled, HandoffError, HandoffExpired
from pdctl.handoff.seam import Incoming, Outgoing, ReceivingEnd, SendingEnd
from pdctl.handoff.sink import Want
from pdctl.handoff.store.interface import PageStore
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

if TYPE_CHECKING:
    from pdctl.engines.mlx.loop import EngineLoop
    from pdctl.engines.mlx.shared import SharedPrefix

log = logging.getLogger("pdctl.engines.mlx")


class PrefillLeg:
    """Sends the prompt's positions while they are computed.

    The HTTP answer needs both the first token (loop's thread) and the handoff's end (any
    thread); whichever comes second gives it.

    Args:
        shared: the prompt's pages in the host's page store; None: it is computed whole.
    """

    def __init__(
        self, engine: EngineLoop, call: Call, leg: Leg, shared: SharedPrefix | None = None
    ) -> None:
        self._engine = engine
        self._call = call
        self._leg = leg
        self.shared = shared
        self._lock = threading.Lock()
        self._outbound: Outgoing | None = None
        self._export: Export | None = None
        self._reserved_at = 0.0
        self._answer: Any = None
        self._done = False

    def start(self, sender: SendingEnd) -> None:
        """HTTP thread. Raises what `Sender.admit` raises: nothing was reserved then."""
        outbound = sender.admit(
            self._leg,
            self._call.prompt.tokens,
            on_reserved=self._reserved,
            on_settled=self._settled,
        )
        with self._lock:
            self._outbound = outbound
        if self._call.ended:
            outbound.cancel()

    def _reserved(self, outbound: Outgoing) -> None:
        with self._lock:
            self._outbound = outbound
            self._export = Export(outbound, self._engine.contract.dtype)
        self._reserved_at = monotonic_s()
        if self.shared is None:
            self._engine.insert(self._call)
        else:
            # it waits for the store, and for memory
            threading.Thread(target=self.shared.start, name="pdctl-import", daemon=True).start()

    def computed(self, caches: list[Any], row: int, positions: int) -> None:
        """Loop's thread, after a step: `positions` of the prompt stand in the caches."""
        if self._export is None:
            return
        if self._export.held < positions == len(self._call.prompt.tokens) - 1:
            took_s = monotonic_s() - self._reserved_at
            self._engine.board.observe("prefill", took_s, self._leg.decode)
        self._export.take(caches, row, positions)

    def sampled(self, token: int, caches: list[Any], row: int) -> None:
        """Loop's thread, once: the prompt's last forward has ended."""
        assert self._outbound is not None
        count = len(self._call.prompt.tokens)
        # where all but the last position came from a store, no step before this one had any
        self.computed(caches, row, count if self._outbound.begin_last() else count - 1)
        self._outbound.finish(token)
        with self._lock:
            self._answer = versions.response("", token, 0.0, "length", (), None)
            complete = self._done
        if complete:
            self._complete()

    def _settled(self, outbound: Outgoing) -> None:
        if outbound.error is not None:
            self._engine.end(self._call, outbound.error)
            return
        with self._lock:
            self._done = True
            complete = self._answer is not None
        if complete:
            self._complete()

    def _complete(self) -> None:
        self._call.answer(self._answer)
        self._engine.end(self._call)

    def release(self, error: BaseException | None) -> None:
        if self.shared is not None:
            self.shared.release(error)
        with self._lock:
            outbound = self._outbound
        if outbound is None or error is None:
            return
        if isinstance(error, HandoffError) and not isinstance(error, HandoffCancelled):
            outbound.fail(error)
        elif isinstance(error, HandoffCancelled):
            outbound.cancel()
        else:
            outbound.fail(HandoffError(f"the prefill engine failed: {error}"))


class DecodeLeg:
    """A `PageSink`: receives the prompt's first n-1 positions, from the host's page store as far
    as that has them, then joins the batch.

    Args:
        store: None: nothing is taken from one.
    """

    def __init__(
        self,
        engine: EngineLoop,
        call: Call,
        leg: Leg,
        *,
        recomputes: bool,
        store: PageStore | None = None,
    ) -> None:
        self._engine = engine
        self._call = call
        self._leg = leg
        self._recomputes = recomputes
        self._store = store
        self._granted = threading.Event()
        self._inbound: Incoming | None = None
        self._refusal: Exception | None = None
        self.peer = leg.prefill
        self.memory: ImportedCache | None = None
        self.committed_at = 0.0
        self.started_at = 0.0
        """When the loop began the first forward on what was imported; 0: not yet."""
        self._over = False

    @property
    def positions(self) -> int:
        return len(self._call.prompt.tokens) - 1

    def start(self, receiver: ReceivingEnd) -> None:
        """HTTP thread."""
        self._inbound = receiver.fetch(self._leg, self._call.prompt.tokens, self)
        if self._call.ended:
            self._inbound.cancel()

    def wants_memory(self) -> bool:
        return True

    def grant(self, memory: ImportedCache | None, refusal: Exception | None = None) -> None:
        """Loop's thread: memory for the positions, or why there is none."""
        self.memory, self._refusal = memory, refusal
        self._granted.set()

    def offered(self, tokens: int, deadline: float) -> Want:
        self._engine.slots.ask(self)
        if not self._granted.wait(max(0.0, deadline - monotonic_s())):
            raise HandoffExpired("no room in the decode batch before the deadline")
        if self._call.ended:
            raise HandoffCancelled("the request has ended")
        if self._refusal is not None:
            raise HandoffError(f"no memory for {self.positions} positions: {self._refusal}")
        return Want(tokens=self.positions, held_tokens=self._taken_ahead())

    def _taken_ahead(self) -> int:
        tokens, salt = self._call.prompt.tokens, self._call.salt
        if self._store is None:
            return 0
        return take_ahead(self._store, tokens, salt, held=0, stop=self.positions, fill=self._fill)

    def _fill(self, pages: Sequence[NDArray[np.uint16]], start: int, stop: int) -> None:
        for place in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            self.write(place, 0, pages[place])

    def write(self, page: int, first_layer: int, piece: NDArray[np.uint16]) -> None:
        assert self.memory is not None
        self.memory.write(page, first_layer, piece)

    def commit(self, first_token: int | None) -> None:
        self.committed_at = monotonic_s()
        self._over = True
        if self._call.ended:
            self._engine.slots.give_back(self)
        self._engine.insert(self._call)

    def abort(self, error: HandoffError) -> None:
        self._over = True
        self._engine.slots.give_back(self)
        if self._recomputes and not isinstance(error, HandoffCancelled):
            log.warning("room=%s computing the prompt here: %s", self._leg.room, error)
            self._engine.insert(self._call)
        else:
            self._engine.end(self._call, error)

    def release(self, error: BaseException | None) -> None:
        # until commit or abort the handoff may still write: it gives the memory back itself
        if self._over:
            self._engine.slots.give_back(self)
        elif self._inbound is not None:
            self._inbound.cancel()
            self._granted.set()


class Importing(Protocol):
    """A call that takes a prompt's KV over instead of computing it."""

    memory: ImportedCache | None

    @property
    def positions(self) -> int: ...

    def wants_memory(self) -> bool:
        """Loop's thread, when its turn has come."""
        ...

    def grant(self, memory: ImportedCache | None, refusal: Exception | None = None) -> None:
        """Loop's thread: memory for the positions; or None where it wants none any more, or
        for the reason that is given."""
        ...


class ImportSlots:
    """Bounds how many imported prompts hold memory at once, in order of asking.

    `ask` and `give_back` from any thread; memory is made on the loop's thread.
    """

    def __init__(self, engine: EngineLoop, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._held: set[Importing] = set()
        self._waiting: list[Importing] = []

    def ask(self, leg: Importing) -> None:
        self._engine.post(lambda: self._ask(leg))

    def give_back(self, leg: Importing) -> None:
        self._engine.post(lambda: self._give_back(leg))

    def _ask(self, leg: Importing) -> None:
        self._waiting.append(leg)
        self._grant()

    def _give_back(self, leg: Importing) -> None:
        leg.memory = None
        self._held.discard(leg)
        if leg in self._waiting:
            self._waiting.remove(leg)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and len(self._held) < self._limit:
            leg = self._waiting.pop(0)
            self._held.add(leg)
            try:
                wanted = leg.wants_memory()
                leg.grant(self._engine.allocate(leg.positions) if wanted else None)
            # whatever mlx raises when memory is short: that request fails (R34)
            except Exception as error:
                leg.grant(None, error)
