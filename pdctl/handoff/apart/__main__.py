"""The data plane's process: `python -m pdctl.handoff.apart SOCKET MEMORY SIZE`, descriptors and
bytes. Started by `plane.py`, and ends with the process that started it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from pdctl.errors import HandoffError, PdctlError
from pdctl.handoff.apart.board import DistantBoard
from pdctl.handoff.apart.calls import Close, Failed, Open, Opened, Order, Trouble
from pdctl.handoff.apart.life import EngineLife
from pdctl.handoff.apart.pipe import Gone, Outbox, Pipe
from pdctl.handoff.apart.receives import Receives
from pdctl.handoff.apart.sends import Sends
from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.opening import Opening

log = logging.getLogger("pdctl.handoff")

ORPHAN_S = 1.0
CLOSE_S = 2.0


def serve(pipe: Pipe[Any], memory: SharedMemory) -> None:
    """Obeys until Close. Raises Gone where the engine's process ends before."""
    outbox = Outbox(pipe)
    board = DistantBoard(outbox.put)
    first = pipe.hear()
    asked = first[0]
    assert isinstance(asked, Open)
    try:
        end, port = _opened(asked.opening, memory, outbox, board)
    except PdctlError as error:
        trouble = Trouble(getattr(error, "cause", HandoffError.cause), error.message, error.hint)
        outbox.put(Opened(None, trouble))
        outbox.close(CLOSE_S)
        return
    outbox.put(Opened(port))
    life = EngineLife(asked.opening.identity.replica, end, outbox.put)
    orders: list[Order] = first[1:]
    while not any(isinstance(order, Close) for order in orders):
        for order in orders:
            _obey(end, order)
        orders = pipe.hear()
        life.heard()
    end.close()
    life.close()
    board.close()
    outbox.close(CLOSE_S)


def _opened(
    opening: Opening, memory: SharedMemory, outbox: Outbox, board: DistantBoard
) -> tuple[Sends | Receives, int | None]:
    def on_failed(room: int, cause: str, detail: str) -> None:
        outbox.put(Failed(room, cause, detail))

    if not opening.sends:
        return Receives(opening, memory, outbox.put, board, on_failed), None
    sends = Sends(opening, memory, outbox.put, board, on_failed)
    return sends, sends.start()


def _obey(end: Sends | Receives, order: Order) -> None:
    try:
        end.obey(order)
    # one request's order must not end the process that all share (R34)
    except Exception:
        log.exception("an order could not be obeyed: %r", type(order))


def _leave_with(parent: int) -> None:
    """The pipe's end tells it too, unless a third process has inherited the other socket."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_S)
    os._exit(1)


def main(arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # the engine's process decides; what ends its whole group must not take its answers away
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    connected, descriptor, size = (int(each) for each in arguments)
    pipe: Pipe[Any] = Pipe(socket.socket(fileno=connected), Order)
    try:
        serve(pipe, SharedMemory(descriptor, size))
    except Gone:
        # nobody is left to be told, and every connection ends with the process
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
