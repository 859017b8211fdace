"""One request inside the engine, from admission to its one end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, Protocol

from pdctl.engines.mlx.failure import failure_of
from pdctl.engines.mlx.versions import Prompt


class LegEnd(Protocol):
    """A call's part in a handoff, as far as its end is concerned."""

    def release(self, error: BaseException | None) -> None:
        """The call has ended: lets go of the handoff, which fails with `error` if it is not
        over. Idempotent, any thread, does not wait."""
        ...


class Call:
    """Threads: the HTTP thread makes it and reads `answers`; the loop's thread owns `uid` and
    `detokenizer`; anyone may ask for its end through the engine."""

    def __init__(
        self, prompt: Prompt, args: Any, *, room: int | None, keeps_prefix: bool, salt: str = ""
    ) -> None:
        self.prompt = prompt
        self.args = args
        self.room = room
        self.keeps_prefix = keeps_prefix
        """Whether the library's prompt cache is read and written for it."""
        self.salt = salt
        """Prefixes are kept and shared among requests of the same salt alone."""
        self.kept: Any = None
        """(caches, positions) of the nearest prefix that this replica keeps, once looked up."""
        self.leg: LegEnd | None = None
        self.context: Any = None
        self.stops: Any = None
        self.sampler: Any = None
        self.processors: list[Any] = []
        self.uid: int | None = None
        self.detokenizer: Any = None
        self.tokens_sampled = 0
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def answer(self, response: Any) -> None:
        """Hands one token to the HTTP thread; the first is preceded by the context."""
        if self.tokens_sampled == 0:
            self._answers.put(self.context)
        self.tokens_sampled += 1
        self._answers.put(response)

    def end(self, error: BaseException | None) -> bool:
        """True the first time only: whoever gets it cleans up."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
        self._answers.put(error)
        return True

    def first(self) -> Any:
        """Waits for the context; raises the RequestFailure that came instead.

        The engine's loop ends every call, and a loop that died ends the process, so this
        needs no deadline of its own.
        """
        found = self._answers.get()
        if found is None or isinstance(found, BaseException):
            raise failure_of(found or RuntimeError("ended without an answer"))
        return found

    def responses(self) -> Iterator[Any]:
        while (found := self._answers.get()) is not None:
            if isinstance(found, BaseException):
                raise failure_of(found)
            yield found
