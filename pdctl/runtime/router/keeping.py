"""The file in which the router keeps what it measured: read at its start, written now and then."""

from __future__ import annotations

import logging

import anyio
import anyio.to_thread

from pdctl.errors import HostError
from pdctl.runtime.cost.record import Costs, decode, encode
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.router.judge import Judge

log = logging.getLogger("pdctl.router")

EVERY_S = 2.0
MAX_BYTES = 4 << 20


class Keeping:
    """Args:
    path: of the file, whose folder exists; "" keeps nothing.
    """

    def __init__(self, path: str, judge: Judge) -> None:
        self._path = path
        self._judge = judge
        self._host = LocalHost("router")
        self._written = Costs()

    async def load(self) -> None:
        """What can't be read is measured again."""
        if not self._path:
            return
        try:
            raw = await anyio.to_thread.run_sync(self._read)
        except HostError as error:
            log.warning("%s", error.message)
            return
        self._judge.load(decode(raw))
        self._written = self._judge.costs()

    async def run(self) -> None:
        """Writes what has changed; ends by cancellation, after a last time."""
        try:
            while True:
                await anyio.sleep(EVERY_S)
                await self.store()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(EVERY_S):
                await self.store()

    async def store(self) -> None:
        costs = self._judge.costs()
        if not self._path or costs == self._written:
            return
        self._written = costs
        try:
            await anyio.to_thread.run_sync(self._host.write, self._path, encode(costs))
        except HostError as error:
            log.warning("%s", error.message)

    def _read(self) -> bytes | None:
        return self._host.read(self._path, max_bytes=MAX_BYTES)
