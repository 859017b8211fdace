"""Switches what `tests/inside` breaks inside the processes of the engine tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).parents[1] / "inside"
AHEAD = struct.Struct("d")


class Faults:
    """One file that every process started with `environment` looks at."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fault"
        self._ahead = folder / "ahead"

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(INSIDE), "PDCTL_TEST_FAULT": str(self._file)}

    @property
    def clock(self) -> dict[str, str]:
        """Environment of those that also look at `set_ahead`."""
        if not self._ahead.exists():
            self._ahead.write_bytes(AHEAD.pack(0.0))
        return {"PDCTL_TEST_AHEAD": str(self._ahead)}

    def set_ahead(self, seconds: float) -> None:
        """From now on their monotonic clocks are ahead by so much."""
        with self._ahead.open("r+b") as file:
            file.write(AHEAD.pack(seconds))

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """That fault, for the duration."""
        self._file.write_text(name)
        try:
            yield
        finally:
            self._file.unlink()

    def audited(self) -> dict[str, Any]:
        """What the latest handoff into a decode replica under the fault "audit" changed."""
        found: dict[str, Any] = json.loads(self._file.with_suffix(".audit").read_text())
        return found

    def forget(self) -> None:
        """What the latest audit found."""
        self._file.with_suffix(".audit").unlink(missing_ok=True)

    def started_with(self, pid: int) -> str:
        """Environment and arguments of a process, by its own account: vLLM's processes write
        over what /proc shows."""
        return self._started(pid).read_text()

    def has_started(self, pid: int) -> bool:
        """Whether it is one of them."""
        return self._started(pid).exists()

    def _started(self, pid: int) -> Path:
        return self._file.parent / "started" / f"{pid}.json"
