from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import anyio
import pytest

from pdctl.runtime.bench.status import Status
from pdctl.runtime.bench.strangers import (
    GpuWatch,
    Stranger,
    parse_processes,
    with_descendants,
)

STATUS = Status(
    cluster="studio",
    replicas={"p0": {"host": "local", "pid": 10}, "d0": {"host": "far", "pid": 20}},
    pairs={},
)


def family(pids: Iterable[int]) -> frozenset[int]:
    """Every process here has one child: its pid plus one."""
    return frozenset(n for pid in pids for n in (pid, pid + 1))


def seen(*pids: int) -> frozenset[Stranger]:
    watch = GpuWatch({"local"}, query=lambda: dict.fromkeys(pids, "python"), family=family)
    return anyio.run(watch.strangers, STATUS)


def test_a_process_that_is_not_the_clusters_is_a_stranger() -> None:
    assert seen(11, 99) == {Stranger(99, "python")}
    assert str(Stranger(99, "python")) == "python (pid 99)"


def test_the_engines_own_processes_are_none() -> None:
    assert seen(10, 11) == frozenset()


def test_a_pid_of_another_host_says_nothing_of_this_one() -> None:
    assert seen(10, 20) == {Stranger(20, "python")}


def test_where_no_process_of_the_cluster_is_listed_nothing_is_judged() -> None:
    """CPU engines, or pids of another namespace."""
    assert seen(98, 99) == frozenset()


@pytest.mark.parametrize(
    "failure", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 5)]
)
def test_a_driver_that_does_not_answer_is_asked_once(failure: Exception) -> None:
    asked: list[int] = []

    def query() -> dict[int, str]:
        asked.append(1)
        raise failure

    watch = GpuWatch({"local"}, query=query)

    async def twice() -> list[frozenset[Stranger]]:
        return [await watch.strangers(STATUS) for _ in range(2)]

    assert anyio.run(twice) == [frozenset()] * 2
    assert len(asked) == 1


def test_the_drivers_list_is_read_and_other_lines_are_left_out() -> None:
    text = "42, /usr/bin/python3\n7,\nNo running processes found\n[N/A], x\n"
    assert parse_processes(text) == {42: "/usr/bin/python3", 7: "a process"}


def test_children_belong_to_the_process_that_was_launched() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in with_descendants([os.getpid()])
        child.communicate(b"\n")
    assert with_descendants([child.pid]) >= {child.pid}
