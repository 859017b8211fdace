"""The thread of whoever listens: one connection after the other, until the listener is closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdctl.errors import PeerLost
from pdctl.handoff.transport.interface import Connection, Listener

log = logging.getLogger("pdctl.handoff")

PAUSE_S = 1.0
"""After a connection that could not be accepted, or until it closes."""


def accept_each(
    listener: Listener, closing: threading.Event, welcome: Callable[[Connection], None]
) -> None:
    """Returns after the listener's `close`; `welcome` owns each connection."""
    while True:
        try:
            connection = listener.accept()
        except PeerLost as error:
            log.warning("%s", error)
            closing.wait(PAUSE_S)
            continue
        if connection is None:
            return
        welcome(connection)
