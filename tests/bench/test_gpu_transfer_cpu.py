"""What threads take of a core, as the bench of the transfer counts it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

from gpu_transfer_cpu import Used, used

WORK_S = 0.04
ROUNDING_S = 0.03
"""Where the kernel counts in ticks."""


def work() -> None:
    while time.thread_time() < WORK_S:
        sum(range(1000))


def test_a_thread_that_ended_is_counted_as_one_that_passed() -> None:
    """Its time is in the whole, though /proc has it no more."""
    before = used()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    spent = used().since(before)
    assert spent.passing_s >= WORK_S - ROUNDING_S
    assert spent.whole_s >= spent.passing_s


def test_another_process_is_seen_too() -> None:
    """Its first thread is told apart from its busiest other one."""
    program = (
        "import threading, time\n"
        "asked = threading.Event()\n"
        "def work():\n"
        "    asked.wait()\n"
        f"    while time.thread_time() < {WORK_S}: sum(range(1000))\n"
        "    print('worked', flush=True)\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "asked.set()\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = used(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "worked\n"
        spent = used(child.pid).since(before)
        child.stdin.write("\n")
        child.stdin.close()
    assert spent.busiest_s >= WORK_S - ROUNDING_S
    assert spent.main_s < spent.busiest_s


def test_what_is_left_of_the_whole_passed() -> None:
    """Threads that lasted are taken off; the first is no busiest one."""
    before = Used(1, 2.0, {1: 1.0, 2: 0.5, 3: 0.25})
    after = Used(1, 3.0, {1: 1.5, 2: 0.625, 4: 0.125})
    assert after.since(before) == (1.0, 0.5, 0.125, 0.375)


def test_a_look_at_itself_is_not_counted() -> None:
    """It reads a file for each thread, as long as a small handoff takes."""
    before = Used(1, 2.0, {1: 1.0, 2: 0.5}, 0.25)
    after = Used(1, 3.0, {1: 1.5, 2: 0.75}, 0.125)
    assert after.since(before) == (0.875, 0.375, 0.25, 0.25)
