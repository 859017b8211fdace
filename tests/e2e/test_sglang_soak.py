"""Load on one cluster of all three engines, one of its replicas killed and back meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.crowd import Crowd, counted
from e2e.mixed import Mixed
from e2e.test_soak import CLIENTS, clear_answers
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_sglang, needs_vllm]

SOAK_S = float(os.environ.get("PDCTL_TEST_THREE_S", "24"))
"""Two minutes by `make test-soak-engines`."""
KILLED = os.environ.get("PDCTL_TEST_THREE_KILLED", "md")
"""MLX is back in seconds, SGLang in half a minute and more."""
BACK_S = 150.0
PATHS = ("vp>sd", "vp>md", "sp>sd", "sp>md")


def test_sixteen_clients_of_three_engines_and_one_replica_is_killed(
    three: Mixed, checkpoints: dict[str, Path]
) -> None:
    """U3, U7, U10, U17, R61: the router chooses among four pairs; every answer is right. Only
    requests that were on the killed replica hear of it, by its name; it is back and takes its
    share; memory and descriptors of the others stay flat."""
    answers = clear_answers(three, checkpoints["llama"], "md")
    three.settle(BACK_S)
    clients, enough = Crowd(three, answers, [None]), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(clients.run, SOAK_S, lambda: not enough.is_set())
        try:
            threading.Event().wait(SOAK_S / 4)
            warm = three.footprint()
            back_s = killed_and_back(three)
        finally:
            enough.set()
        load.result(SOAK_S + 240)
    assert clients.wrong == []
    assert [told for told in clients.refused if f'replica "{KILLED}"' not in told] == []
    three.wait("nothing in flight", three.idle, 15)
    end = three.footprint()
    print(  # noqa: T201
        f"\n{sum(clients.served.values())} answers in {SOAK_S:g} s, {dict(clients.served)}; "
        f"{len(clients.refused)} refused while {KILLED} was away, back in {back_s:.1f} s; "
        f"MiB and descriptors warm {warm}, at the end {end}"
    )
    assert set(clients.served) == set(PATHS)
    for name, (mib, descriptors) in end.items():
        if name != KILLED:
            assert descriptors <= warm[name][1] + 2 * CLIENTS, name
            assert mib <= warm[name][0] * 1.1 + 64, name


def killed_and_back(three: Mixed) -> float:
    """Seconds from its end until every pair is ready again; then each of its pairs serves."""
    pid, killed_s = three.kill(KILLED), time.monotonic()
    three.wait("a new process", lambda: three.replica(KILLED)["pid"] not in (None, pid), 60)
    three.wait("every pair ready again", three.ready, BACK_S)
    back_s = time.monotonic() - killed_s
    paths = [path for path in PATHS if KILLED in path]
    before = counted(three, paths)
    three.wait("its share of requests", lambda: all_more(counted(three, paths), before), 30)
    return back_s


def all_more(now: dict[str, Counter[str]], before: dict[str, Counter[str]]) -> bool:
    return all(now[path]["handoffs_completed"] > before[path]["handoffs_completed"] for path in now)
