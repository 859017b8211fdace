"""Errands: what a client gives away is run in order, and ended with it."""

from __future__ import annotations

import threading
from functools import partial

from pdctl.handoff.store.errands import Errands

WAIT_S = 30.0


def test_they_run_in_the_order_in_which_they_came() -> None:
    """On one thread, which the first of them starts; `close` lets those that wait be run."""
    errands, found = Errands("errands"), list[int]()
    for number in range(50):
        errands.run(partial(found.append, number))
    errands.close(WAIT_S)
    assert found == list(range(50))


def test_one_that_fails_ends_no_other() -> None:
    """R34: the thread goes on."""
    errands, found = Errands("errands"), list[str]()
    errands.run(lambda: found.append(str(1 / 0)))
    errands.run(lambda: found.append("next"))
    errands.close(WAIT_S)
    assert found == ["next"]


def test_closing_while_others_give_errands_leaves_no_thread() -> None:
    """Whoever comes too late starts nothing, and closing never meets a thread that is half
    started."""
    for _ in range(200):
        errands, ready = Errands("errands-raced", 2), threading.Barrier(2)

        def give(errands: Errands = errands, ready: threading.Barrier = ready) -> None:
            ready.wait(WAIT_S)
            errands.run(lambda: None)

        giving = threading.Thread(target=give)
        giving.start()
        ready.wait(WAIT_S)
        errands.close(WAIT_S)
        giving.join(WAIT_S)
        errands.run(lambda: None)
        assert not [t for t in threading.enumerate() if t.name == "errands-raced"]
