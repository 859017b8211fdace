"""A stream of copies beside the model's own, and the one thread that waits for them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

log = logging.getLogger("pdctl.engines.cuda")

CLOSE_S = 5.0


class Mark(Protocol):
    """A moment in a stream's work."""

    def synchronize(self) -> None:
        """Returns once everything before it is done."""
        ...

    def query(self) -> bool:
        """Whether it is, without waiting."""
        ...


class SideStream:
    """Work beside the model's. No call waits for the GPU but `Mark.synchronize`.

    `after_model`, `hold_model` and `hold_side` are the engine's thread's; `run` is any thread's.

    Args:
        streams: those that the model may run on, beside the one that is current where the
            engine's thread calls.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Callable[[], Sequence[torch.cuda.Stream]] = lambda: (),
    ) -> None:
        self._side = torch.cuda.Stream(device)
        self._streams = streams
        while self._side in streams():
            # torch gives out the same few in turn
            self._side = torch.cuda.Stream(device)

    def after_model(self, work: Callable[[], None]) -> Mark:
        """Does `work` once everything that the model has enqueued so far is done."""
        self.hold_side()
        return self.run(work)

    def run(self, work: Callable[[], None]) -> Mark:
        """Does `work` after what was given before; the mark lies behind it."""
        with torch.cuda.stream(self._side):
            work()
            event = torch.cuda.Event(blocking=True)
            event.record(self._side)
        mark: Mark = event
        return mark

    def hold_side(self) -> None:
        """What is given from now on waits for what the model has enqueued so far."""
        for stream in self._model():
            self._side.wait_stream(stream)

    def hold_model(self, mark: Mark) -> None:
        """What the model enqueues from now on waits for the mark."""
        for stream in self._model():
            stream.wait_event(mark)

    def _model(self) -> Sequence[torch.cuda.Stream]:
        current = torch.cuda.current_stream(self._side.device)
        return [current, *(stream for stream in self._streams() if stream != current)]


class Landing(NamedTuple):
    mark: Mark
    call: Callable[[], None]
    kept: object
    """What the GPU uses until the mark."""


class Landings:
    """Calls back once marks have been reached, in the order in which they were given."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Landing | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdctl-landings", daemon=True)
        self._thread.start()

    def add(self, mark: Mark, call: Callable[[], None], kept: object) -> None:
        self._given.put(Landing(mark, call, kept))

    def close(self) -> None:
        """Everything that was added is called first; bounded."""
        self._given.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            try:
                given.mark.synchronize()
                given.call()
            # this thread's boundary: a broken device ends the engine, a callback its handoff
            except Exception:
                log.exception("copies out of the engine's memory have not landed")
            del given
