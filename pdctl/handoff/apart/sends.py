"""The data plane's side of a prefill replica: a `Sender` that obeys the engine's process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from pdctl.errors import HandoffError
from pdctl.handoff.apart.calls import (
    Admit,
    Call,
    Dropped,
    Fail,
    Finish,
    Granted,
    Order,
    Release,
    Reserved,
    Settled,
    SkipLast,
    Trouble,
    Written,
)
from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import Run
from pdctl.handoff.ending import OnFailed
from pdctl.handoff.opening import Opening, open_sender
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.page import Patterns

log = logging.getLogger("pdctl.handoff")


class Sends:
    """`obey` is called by one thread, in the engine's order, and never blocks."""

    def __init__(
        self,
        opening: Opening,
        memory: SharedMemory,
        tell: Callable[[Call], None],
        board: CounterBoard,
        on_failed: OnFailed,
    ) -> None:
        self._memory = memory
        self._tell = tell
        self._open: dict[int, Outbound] = {}
        self._held: dict[int, Patterns] = {}
        """Pages that the engine's process may still write into."""
        self._sender = open_sender(
            opening, os.environ, board, on_failed, memory=lambda size: memory.bytes[:size]
        )

    def start(self) -> int:
        """The bound port. Raises PeerLost where it can't listen there."""
        return self._sender.start()

    def close(self) -> None:
        self._sender.close()

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def lose(self, error: HandoffError) -> None:
        for outbound in list(self._open.values()):
            outbound.fail(error)

    def obey(self, order: Order) -> None:
        if isinstance(order, Admit):
            self._admit(order)
        elif isinstance(order, Dropped):
            self._held.pop(order.number, None)
            self._sender.look_again()
        elif isinstance(order, Release):
            self._sender.release(order.room)
        elif isinstance(order, Written | SkipLast | Finish | Fail):
            outbound = self._open.get(order.number)
            if outbound is not None:
                _steer(outbound, order)

    def _admit(self, order: Admit) -> None:
        number = order.number
        try:
            self._open[number] = self._sender.admit(
                order.leg,
                order.tokens,
                on_reserved=lambda outbound: self._reserved(number, outbound),
                on_settled=lambda outbound: self._settled(number, outbound),
            )
        except HandoffError as error:
            self._tell(Settled(number, done=False, trouble=Trouble.of(error), refused=True))
            return
        # it may have ended before it was kept
        if self._open[number].settled.is_set():
            self._open.pop(number, None)

    def _reserved(self, number: int, outbound: Outbound) -> None:
        outbound.on_granted = lambda grant: self._tell(Granted(number, grant.tokens))
        # the engine's process writes without asking: what it may be writing does not leave
        if not outbound.begin_last():
            self._tell(Granted(number, outbound.tokens - 1))
        try:
            pages = outbound.pages()
        except HandoffError as error:
            log.debug("room=%s is over already: %s", outbound.room, error)
            return
        assert not isinstance(pages, Run), "a data plane of its own has host memory alone"
        self._held[number] = pages
        self._tell(Reserved(number, self._memory.offset_of(pages)))

    def _settled(self, number: int, outbound: Outbound) -> None:
        self._open.pop(number, None)
        trouble = None if outbound.error is None else Trouble.of(outbound.error)
        self._tell(Settled(number, done=outbound.done, trouble=trouble))


def _steer(outbound: Outbound, order: Written | SkipLast | Finish | Fail) -> None:
    if isinstance(order, Written):
        outbound.written(order.tokens, order.computed_at, layers=order.layers)
    elif isinstance(order, SkipLast):
        outbound.skip_last()
    elif isinstance(order, Finish):
        outbound.finish(order.first_token)
    elif order.trouble is None:
        outbound.cancel()
    else:
        outbound.fail(order.trouble.error())
