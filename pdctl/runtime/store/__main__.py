"""`python -m pdctl.runtime.store`: one host's page store, until a signal.

Everything but its agent's socket and its own name comes in the assignment.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from pdctl.engines.attachment import ATTACH_TIMEOUT_S, StoreAttachment
from pdctl.engines.channel import StoreAssignment, StoreReady
from pdctl.engines.ends import close_each
from pdctl.errors import LaunchError, PdctlError
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.store.local import LocalServer
from pdctl.handoff.store.others import Others
from pdctl.handoff.store.remote import RemoteServer
from pdctl.handoff.store.shelves import Shelves, StoreCounts
from pdctl.handoff.transport.choice import chosen_transport

log = logging.getLogger("pdctl.store")


class Store:
    """Shelves, both servers, and the agent's socket."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._shelves: Shelves | None = None
        self._closing: list[Callable[[], None]] = []
        self._attachment = StoreAttachment.from_environment(
            os.environ, counters=self._counts, superseded=self.end
        )

    def run(self) -> None:
        """Until `end`. Raises LaunchError, PeerLost or OSError where it can't serve."""
        assigned = self._attachment.open_store(ATTACH_TIMEOUT_S)
        try:
            self._serve(assigned)
            self._ended.wait()
        finally:
            close_each([*self._closing, self._attachment.close])

    def end(self) -> None:
        """Any thread, and a signal's handler."""
        self._ended.set()

    def _serve(self, assigned: StoreAssignment) -> None:
        geometry = PageGeometry.of(assigned.contract)
        shelves = self._shelves = Shelves(assigned.buffer_bytes, geometry)
        others: Others | None = None
        if assigned.data_port is not None:
            transport = chosen_transport(assigned.certificate, os.environ)
            remote = RemoteServer(assigned.key, shelves, transport)
            remote.start((assigned.data_host, assigned.data_port))
            others = Others(assigned.key, shelves, addresses=assigned.others, transport=transport)
            self._closing += [remote.close, others.close]
        local = LocalServer(assigned.seat.socket, shelves, assigned.contract.digest, others)
        local.start()
        self._closing.append(local.close)
        self._attachment.ready(StoreReady(slots=shelves.slots))
        log.info("host=%s serving %d pages", assigned.host, shelves.slots)

    def _counts(self) -> StoreCounts:
        return self._shelves.counts() if self._shelves is not None else StoreCounts()


def main() -> int:
    """Exit code: 0 after a signal, the error's own otherwise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        store = Store()

        def stop(number: int, frame: FrameType | None) -> None:
            store.end()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        store.run()
    except PdctlError as error:
        log.error("%s", error.message)
        return error.exit_code
    except OSError as error:
        log.error("the page store can't serve: %s", error)
        return LaunchError.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # threads that serve replicas may be inside a request
    os._exit(code)
