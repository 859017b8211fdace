"""What NIXL's progress thread does while nothing moves.

It waits in poll(2), out of which UCX wakes it; NIXL's configuration says for how long at most
(`pthrDelay`, in microseconds), against a wake-up that UCX may lose. NIXL's Python layer sets that
to 0 and has no field for it (1.5.1, `nixl_agent.__init__`): then the thread turns without a rest
and takes a whole core.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

REST_US = 10_000
"""A hundred looks a second: 0.5 % of a core."""

_lock = threading.Lock()


@contextlib.contextmanager
def resting(library: ModuleType) -> Iterator[None]:
    """The progress threads of agents that are made inside rest while nothing moves. Any thread.

    Args:
        library: NIXL, as it was imported.
    """
    bindings: Any = import_module(f"{library.__name__}._bindings")
    with _lock:
        before = bindings.nixlAgentConfig
        bindings.nixlAgentConfig = _with_a_rest(before)
        try:
            yield
        finally:
            bindings.nixlAgentConfig = before


def _with_a_rest(config: Any) -> type:
    class Resting(config):  # type: ignore[misc]
        @property
        def pthrDelay(self) -> int:
            return int(config.pthrDelay.fget(self))

        @pthrDelay.setter
        def pthrDelay(self, wanted_us: int) -> None:
            config.pthrDelay.fset(self, max(wanted_us, REST_US))

    return Resting
