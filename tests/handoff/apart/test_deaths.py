"""A data plane that dies, and one whose engine dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from handoff.apart.planes import ApartEnds, apart, settle
from handoff.ends import WAIT_S, Prefill, Sink, kv

from pdctl.errors import HandoffCancelled, HandoffError

ENGINE = """
import sys, time
from handoff.apart.planes import opening
from handoff.ends import SMALL
from pdctl.handoff.apart.sending import ApartSender
from pdctl.handoff.counters import CounterBoard
sender = ApartSender(
    opening(SMALL, sends=True, buffer_bytes=1 << 16), lock=None, board=CounterBoard(),
    on_failed=lambda *_: None, on_lost=lambda _: None,
)
sender.start()
print(sender.pid, flush=True)
time.sleep(600)
"""


def ended(pid: int) -> threading.Event:
    """Set once that process, which is no child of this one, is gone."""
    gone, watch = threading.Event(), os.pidfd_open(pid)

    def wait() -> None:
        select.select([watch], [], [])
        os.close(watch)
        gone.set()

    threading.Thread(target=wait, daemon=True).start()
    return gone


@pytest.mark.parametrize(("side", "when"), [("sender", "writing"), ("receiver", "allocating")])
def test_a_dead_data_plane_fails_what_is_open_by_name(
    side: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """U14, R21: both legs fail and are reported, the engine is told of each end once and then of
    the loss; what comes later is refused."""
    with apart() as ends:
        sink = Sink()
        sink.hold("offered" if when == "allocating" else "write")
        outbound, inbound, prefill = ends.begin(200, sink)
        assert prefill.reserved.wait(WAIT_S)
        outbound.pages()[:] = kv(200)
        outbound.written(150)
        assert sink.inside.wait(WAIT_S)
        dead = ends.sender if side == "sender" else ends.receiver
        os.kill(dead.pid, signal.SIGKILL)
        assert ends.gone.wait(WAIT_S)
        sink.proceed.set()
        settle(outbound, inbound)
        assert "signal 9" in ends.lost[0].message
        own = outbound if side == "sender" else inbound
        assert own.error is not None
        assert "signal 9" in own.error.message
        assert sink.calls.count("abort") == 1
        assert prefill.told_once()
        assert {leg for leg, _, _ in ends.failed} == {"p0", "d0"}
        check_refused(ends, side)


def check_refused(ends: ApartEnds, side: str) -> None:
    leg, prefill = ends.leg(), Prefill()
    if side == "sender":
        told = {"on_reserved": prefill.on_reserved, "on_settled": prefill.on_settled}
        with pytest.raises(HandoffError, match="signal 9"):
            ends.sender.admit(leg, range(9), **told)
    else:
        with pytest.raises(HandoffCancelled):
            ends.receiver.fetch(leg, range(9), Sink())


def test_a_data_plane_ends_with_its_engine() -> None:
    """U1: also where nobody could close it: nothing listens for an engine that is gone."""
    tests = Path(__file__).parent.parent.parent
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])},
    )
    assert engine.stdout is not None
    gone = ended(int(engine.stdout.readline()))
    engine.kill()
    engine.wait()
    engine.stdout.close()
    assert gone.wait(WAIT_S)


def test_what_ends_the_whole_group_leaves_the_data_plane_to_its_engine() -> None:
    """A Ctrl-C or a SIGTERM to all: the engine still answers, and closes it."""
    with apart() as ends:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(ends.sender.pid, number)
            os.kill(ends.receiver.pid, number)
        assert ends.run(100, Sink()) is None
        assert ends.lost == []
