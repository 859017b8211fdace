"""The watchdog, with shell scripts in the agent's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.runtime.agent import watchdog
from pdctl.runtime.agent.watchdog import Watchdog

SERVES = f'printf 1 >&"${watchdog.SERVING_FD_ENV}"; '


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(watchdog, "LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)


def run(script: str) -> int:
    return Watchdog(("bash", "-c", script)).run()


def test_an_agent_that_was_told_to_end_is_not_started_again(tmp_path: Path) -> None:
    """Exit 0 is its own decision."""
    assert run(f"{SERVES} echo x >>{tmp_path}/starts; exit 0") == 0
    assert (tmp_path / "starts").read_text() == "x\n"


def test_an_agent_that_never_served_is_not_tried_again(tmp_path: Path) -> None:
    """The launch that waits for it sees its exit status at once."""
    assert run(f"echo x >>{tmp_path}/starts; exit 4") == 4
    assert (tmp_path / "starts").read_text() == "x\n"


def test_an_agent_that_dies_is_started_again(tmp_path: Path) -> None:
    """U35: killed twice, it serves a third time, and then ends by itself."""
    starts = tmp_path / "starts"
    script = f"{SERVES} echo x >>{starts}; [ $(wc -l <{starts}) -ge 3 ] || kill -9 $$"
    assert run(script) == 0
    assert starts.read_text() == "x\n" * 3


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    """After ten ends in a row it gives up, with exit 1."""
    starts = tmp_path / "starts"
    assert run(f"{SERVES} echo x >>{starts}; kill -9 $$") == 1
    assert starts.read_text() == "x\n" * watchdog.CRASHES


def test_sigterm_reaches_the_agent() -> None:
    """The watchdog passes it on, waits for the agent's own clean-up, and ends with it."""
    script = f"trap 'echo cleaned; exit 0' TERM; {SERVES} echo up; while :; do sleep 0.01; done"
    code = (
        "import sys; from pdctl.runtime.agent.watchdog import Watchdog;"
        f"sys.exit(Watchdog(('bash', '-c', {script!r})).run())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "cleaned\n")
