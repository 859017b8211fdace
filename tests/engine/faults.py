"""Switches what `tests/inside` breaks inside the processes of the engine tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).parents[1] / "inside"


class Faults:
    """One file that every process started with `environment` looks at."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fault"

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(INSIDE), "PDCTL_TEST_FAULT": str(self._file)}

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

    def started_with(self, pid: int) -> str:
        """Environment and arguments of a process, by its own account: vLLM's processes write
        over what /proc shows."""
        return (self._file.parent / "started" / f"{pid}.json").read_text()
