"""What one host is, and which interpreter would run its agent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdctl.errors import HostError
from pdctl.runtime.checks.machines import see
from pdctl.runtime.hosts.local import LocalHost
from pdctl.topology.model import Host

ROOT = Path(__file__).parents[3]


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_this_machine_is_seen_without_a_connection() -> None:
    """Its clock is ours, and nothing was connected."""
    seen = see(LocalHost(), Host(name="local"))
    assert seen.facts.python == sys.executable
    assert (seen.clock_offset_s, seen.reached_s, seen.round_trip_s) == (0.0, None, None)


def test_the_agents_own_interpreter_is_asked(tmp_path: Path) -> None:
    """`agent_python` runs the agent: its versions count, not the command line's."""
    other = script(tmp_path, f'FROM_WRAPPER=1 exec "{sys.executable}" "$@"')
    seen = see(LocalHost(), Host(name="local", agent_python=other))
    assert seen.facts.xoscar_version is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo \"No module named 'pdctl'\" >&2; exit 1", "No module named 'pdctl'"),
        ("echo hello", "exit status 0"),
        ("exit 3", "exit status 3"),
    ],
)
def test_an_interpreter_that_runs_no_agent_is_named(text: str, words: str, tmp_path: Path) -> None:
    """Exit code 4, with the command that installs what is missing."""
    python = script(tmp_path, text)
    with pytest.raises(HostError, match="can't run an agent") as caught:
        see(LocalHost("box"), Host(name="box", agent_python=python))
    assert words in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint == f"{python} -m pip install {ROOT}"


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(HostError, match="/absent/python"):
        see(LocalHost("box"), Host(name="box", agent_python="/absent/python"))
