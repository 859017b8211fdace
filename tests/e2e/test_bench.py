"""The sweep against real engines."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from e2e.cluster import PDCTL, Cluster

pytestmark = pytest.mark.engine

PAGE_BYTES = 4 * 2 * 64 * 2 * 64 * 2
QUICK = ("--output-len", 8, "--num-prompts", 2, "--num-warmups", 1)


def test_a_sweep_over_a_real_pair_moves_exactly_what_it_must(
    llama: Cluster, tmp_path: Path
) -> None:
    arguments = ("--input-lens", "51,65,66", "--concurrency", "1,2", *QUICK)
    saved = ("--save-result", "--result-dir", tmp_path, "--json")
    done = llama.pdctl("bench", llama.topology, *arguments, *saved)
    points = json.loads(done.stdout)["points"]
    assert [p["pd_path"] for p in points] == ["d0", "o0", "p0>d0"] * 6
    for p in points:
        tokens, pair = p["pd_input_len"], p["pd_path"] == "p0>d0"
        assert (p["completed"], p["failed"]) == (2 * p["pd_concurrency"], 0), p["errors"]
        assert p["pd_imported_tokens"] == (tokens - 1 if pair else 0)
        assert p["pd_host_bytes"] == (-(-(tokens - 1) // 64) * PAGE_BYTES if pair else 0)
        kinds = {mark["kind"] for mark in p["pd_marks"]} - {"steal"}
        # Two requests in one batch may turn a near-tie; one alone may not.
        assert kinds <= ({"text"} if p["pd_concurrency"] > 1 else set()), p["pd_marks"]
    assert len(list(tmp_path.glob("*.json"))) == 18
    assert len(list(tmp_path.glob("*.md"))) == 1
    llama.wait("every request is over", llama.idle)


def test_an_interrupted_sweep_leaves_nothing_running_in_the_engines(llama: Cluster) -> None:
    words = [PDCTL, "bench", llama.name, "--input-lens", "700", "--num-prompts", "500"]
    with subprocess.Popen(
        words, env=llama.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as sweep:
        assert sweep.stderr is not None
        assert "700 tokens" in sweep.stderr.readline()
        sweep.send_signal(signal.SIGINT)
        sweep.communicate(timeout=30)
    assert sweep.returncode == 130
    llama.wait("every request is over", llama.idle)
    assert llama.completion("1 2 3", "p0>d0", max_tokens=2).status_code == 200
