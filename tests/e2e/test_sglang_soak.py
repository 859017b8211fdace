"""Load on one cluster of all three engines, one of its replicas killed and back meanwhile."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.crowd import Crowd, counted
from e2e.mixed import Mixed
from e2e.test_soak import clear_answers
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm

pytestmark = [pytest.mark.engine, needs_sglang, needs_vllm]

SOAK_S = float(os.environ.get("PDCTL_TEST_THREE_S", "24"))
"""Two minutes by `make test-soak-engines`."""
KILLED = os.environ.get("PDCTL_TEST_THREE_KILLED", "md")
"""MLX is back in seconds, SGLang in half a minute and more."""
PATHS = ("vp>sd", "vp>md", "sp>sd", "sp>md")


def test_sixteen_clients_of_three_engines_and_one_replica_is_killed(
    three: Mixed, checkpoints: dict[str, Path]
) -> None:
    """U3, U7, U10, U17, R61: the router chooses among four pairs; every answer is right. Only
    requests that were on the killed replica hear of it, by its name; it is back and takes its
    share; memory and descriptors of the others stay flat."""
    answers = clear_answers(three, checkpoints["llama"], "md")
    three.wait("every pair ready", three.ready)
    pid = three.replica(KILLED)["pid"]
    clients = Crowd(three, answers, [None])
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(clients.run, SOAK_S)
        threading.Event().wait(SOAK_S / 4)
        warm, killed_s = three.footprint(), time.monotonic()
        three.kill(KILLED)
        three.wait("a new process", lambda: three.replica(KILLED)["pid"] not in (None, pid), 60)
        three.wait("every pair ready again", three.ready, max(60.0, SOAK_S * 0.7))
        back_s = time.monotonic() - killed_s
        back = counted(three, PATHS)
        load.result(SOAK_S + 180)
    assert clients.wrong == []
    assert [told for told in clients.refused if f'replica "{KILLED}"' not in told] == []
    three.wait("nothing in flight", three.idle, 15)
    after, end = counted(three, PATHS), three.footprint()
    print(  # noqa: T201
        f"\n{sum(clients.served.values())} answers in {SOAK_S:g} s, {dict(clients.served)}; "
        f"{len(clients.refused)} refused while {KILLED} was away, back in {back_s:.1f} s; "
        f"MiB and descriptors warm {warm}, at the end {end}"
    )
    for path in PATHS:
        assert clients.served[path] > 0
        if KILLED in path:
            assert after[path]["handoffs_completed"] > back[path]["handoffs_completed"]
    for name, (mib, descriptors) in end.items():
        if name != KILLED:
            assert descriptors <= warm[name][1] + 8, name
            assert mib <= warm[name][0] * 1.1 + 64, name
