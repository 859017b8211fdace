"""The sweep against real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from e2e.cluster import PDCTL, Cluster

from pdctl.runtime.bench.measure import MAX_REPEATS

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


def test_a_pair_s_link_is_measured_beside_the_running_cluster(llama: Cluster) -> None:
    """So that its floor is prefill's time or the link's, whichever is longer."""
    done = llama.pdctl("bench", llama.topology, "--input-lens", "66", *QUICK, "--json")
    points = {p["pd_path"]: p for p in json.loads(done.stdout)["points"]}
    pair, alone = points["p0>d0"], points["d0"]
    assert pair["pd_link_bytes_per_s"] > 1e7
    assert pair["pd_link_round_trip_ms"] > 0
    assert pair["pd_floor_ms"] == max(
        alone["median_ttft_ms"], 2 * PAGE_BYTES / pair["pd_link_bytes_per_s"] * 1000
    )
    assert pair["pd_over_local_ms"] == pair["median_ttft_ms"] - alone["median_ttft_ms"]


def test_a_process_that_comes_to_the_gpu_is_marked_after_bounded_repeats(
    llama: Cluster, tmp_path: Path
) -> None:
    """As a driver tells it: first the cluster's own alone, then another's beside it."""
    own, asked = llama.replica("d0")["pid"], tmp_path / "asked"
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        f"#!/bin/sh\necho {own}, python\n[ -e {asked} ] && echo 4194000, miner\ntouch {asked}\n"
    )
    driver.chmod(0o755)
    llama.env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    try:
        saved = ("--save-result", "--result-dir", tmp_path, "--json")
        done = llama.pdctl("bench", llama.topology, "--input-lens", "66", *QUICK, *saved)
    finally:
        llama.env["PATH"] = os.environ["PATH"]
    assert "round 1/2 again: miner (pid 4194000) was on the GPU meanwhile" in done.stderr
    for p in json.loads(done.stdout)["points"]:
        found = [mark["detail"] for mark in p["pd_marks"] if mark["kind"] == "gpu"]
        assert found == ["miner (pid 4194000) on the GPU in 2 of 2 rounds"]
        assert p["pd_repeated_rounds"] == 2 * MAX_REPEATS
        assert p["completed"] == 2
    (report,) = tmp_path.glob("*.html")
    assert "miner (pid 4194000) on the GPU in 2 of 2 rounds" in report.read_text()


def test_a_sweep_that_was_killed_goes_on_where_it_was(llama: Cluster, tmp_path: Path) -> None:
    """SIGKILL after the first length: it is not measured again, and the report has both."""
    asked = ("bench", llama.name, "--input-lens", "51,700", *QUICK, "--result-dir", tmp_path)
    words = [str(word) for word in (PDCTL, *asked, "--save-result")]
    with subprocess.Popen(words, env=llama.env, stderr=subprocess.DEVNULL) as sweep:
        llama.wait("a length is on disk", lambda: len(list(tmp_path.glob("*-in51-*.json"))) == 3)
        sweep.kill()
    kept = {file: file.read_bytes() for file in tmp_path.glob("*-in51-*.json")}
    assert not list(tmp_path.glob("*.html"))
    done = llama.pdctl(*asked, "--resume", "--json")
    assert "1 place of 2 had been measured before" in done.stderr
    points = json.loads(done.stdout)["points"]
    assert [p["pd_input_len"] for p in points] == [51] * 3 + [700] * 3
    assert kept == {file: file.read_bytes() for file in kept}
    assert len(list(tmp_path.glob("*.html"))) == 1
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
