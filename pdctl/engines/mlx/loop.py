"""The engine's one loop: loads, computes, exports, imports and samples, all on one thread.

It replaces `ResponseGenerator._generate` of mlx_lm.server and keeps the rest of that class:
templates, segments, stop rules. Other threads hand it work through `post`; each piece of work
is a function that the loop calls between two steps of the batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx
import mlx_lm.server as library
from mlx_lm.models.cache import LRUPromptCache

from pdctl.engines.mlx import versions
from pdctl.engines.mlx.batch import Batch
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.importer import COMPUTE_DTYPES, ImportedCache
from pdctl.engines.mlx.kvcache import empty_caches
from pdctl.engines.mlx.legs import ImportSlots
from pdctl.errors import HandoffCancelled, ProtocolViolation
from pdctl.handoff.counters import CounterBoard
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype

log = logging.getLogger("pdctl.engines.mlx")

WARM_UP_TOKENS = 3
REMEMBERED_ABORTS = 1024


class EngineLoop(library.ResponseGenerator):  # type: ignore[misc]
    """Runs from its construction on; `loaded` is set once a first forward has run.

    `died` is called on the loop's thread with what ended it: the process must not live on.
    """

    def __init__(
        self,
        provider: Any,
        *,
        contract: Contract,
        compute: ComputeDtype,
        board: CounterBoard,
        died: Callable[[BaseException], None],
    ) -> None:
        self.contract = contract
        self.compute = compute
        self.board = board
        self.loaded = threading.Event()
        self.slots = ImportSlots(self, provider.cli_args.decode_concurrency)
        self._died = died
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: set[Call] = set()
        self._rooms: dict[int, Call] = {}
        self._aborted: dict[int, None] = {}
        self._lock = threading.Lock()
        super().__init__(provider, LRUPromptCache(provider.cli_args.prompt_cache_size))

    # any thread

    def post(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def enter(self, call: Call) -> None:
        """Registers a call before anything is reserved for it.

        Raises:
            HandoffCancelled: its room was aborted already (the abort overtook the request).
            ProtocolViolation: its room is in use.
        """
        with self._lock:
            if call.room is not None:
                if call.room in self._aborted:
                    raise HandoffCancelled(f"room {call.room} was aborted")
                if call.room in self._rooms:
                    raise ProtocolViolation(f"room {call.room} is in use")
                self._rooms[call.room] = call
            self._calls.add(call)
        self.board.add(requests_active=1)

    def insert(self, call: Call) -> None:
        """Puts a call into the batch: on what its leg imported, or from its first token."""
        self.post(lambda: self._insert(call))

    def end(self, call: Call, error: BaseException | None = None) -> None:
        """Ends a call once; whatever it holds, in the batch or in a handoff, is let go."""
        if not call.end(error):
            return
        with self._lock:
            self._calls.discard(call)
            if call.room is not None:
                self._rooms.pop(call.room, None)
        self.board.add(requests_active=-1)
        self.post(lambda: self._batch.remove(call))
        if call.leg is None:
            return
        try:
            call.leg.release(error)
        # the call has ended all the same, and so do those that end with it (R36)
        except Exception:
            log.exception("room=%s could not let go of its handoff", call.room)

    def abort(self, room: int) -> bool:
        """Ends the leg of a room at whatever stage it is; also one that has yet to arrive."""
        with self._lock:
            call = self._rooms.get(room)
            if call is None:
                self._aborted[room] = None
                if len(self._aborted) > REMEMBERED_ABORTS:
                    del self._aborted[next(iter(self._aborted))]
        if call is None:
            return False
        self.end(call, HandoffCancelled("aborted by the router"))
        return True

    def end_all(self, error: BaseException) -> None:
        with self._lock:
            calls = tuple(self._calls)
        for call in calls:
            self.end(call, error)

    def stop_and_join(self) -> None:
        self._stop = True
        self.post(lambda: None)
        self._generation_thread.join()

    @property
    def is_healthy(self) -> bool:
        return self.loaded.is_set()

    @property
    def model(self) -> Any:
        return self.model_provider.model

    @property
    def tokenizer(self) -> Any:
        return self.model_provider.tokenizer

    # the loop's thread

    def allocate(self, positions: int) -> ImportedCache:
        contract = self.contract
        return ImportedCache(contract.attention, positions, contract.dtype, self.compute)

    def kept_positions(self, call: Call) -> int:
        """How many of its prompt this replica keeps itself."""
        return self._batch.kept_prefix(call)[1]

    def _generate(self) -> None:
        try:
            self._load()
            self._batch = Batch(self.model_provider, self.prompt_cache, self.board, self.end)
            self.loaded.set()
            while not self._stop:
                self._do_work()
                if len(self._batch):
                    self._batch.step()
        # process boundary: a server without its loop must not stay up
        except BaseException as error:
            self._died(error)

    def _load(self) -> None:
        self.model_provider.load_default()
        dtype = COMPUTE_DTYPES[self.compute]
        stored = self.model.model.embed_tokens.weight.dtype
        if stored != dtype:
            log.warning("weights are %s, computing in %s: cast once", stored, dtype)
            self.model.set_dtype(dtype)
            mx.eval(self.model.parameters())
        warm_up(self.model, [1] * WARM_UP_TOKENS)
        # the tokenizer settles its padding and truncation in its first call, under no lock
        self.tokenizer.encode("warm up")

    def _insert(self, call: Call) -> None:
        if call.ended:
            return
        try:
            self._batch.insert(call)
        # one request's failure is its own (R34)
        except Exception as error:
            log.exception("room=%s could not enter the batch", call.room)
            self.end(call, error)

    def _do_work(self) -> None:
        """Everything that was posted; waits for something while there is nothing to compute."""
        if not len(self._batch) and self._work.empty():
            mx.clear_cache()
            self._work.get()()
        while True:
            try:
                work = self._work.get_nowait()
            except Empty:
                return
            work()


def warm_up(model: Any, tokens: list[int]) -> None:
    """A prompt's forward and a decode step: ready means that both have run."""
    caches = empty_caches(len(model.layers))
    logits = model(mx.array([tokens]), cache=caches)
    mx.eval(versions.greedy(model(versions.greedy(logits)[:, -1:], cache=caches)))
