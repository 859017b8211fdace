"""A sweep over a broken engine: what is wrong is marked, and not averaged away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.mixed import Mixed
from engines.vllm_replicas import needs_vllm

pytestmark = [pytest.mark.engine, needs_vllm]

QUICK = ("--input-lens", "66", "--output-len", "6", "--num-prompts", "1", "--num-warmups", "0")
BROKEN = {"vp>vd", "mp>vd"}
"""Where vLLM writes the pages that it was sent."""


def test_a_page_that_arrives_wrong_is_marked_in_every_form_of_the_report(
    mixed: Mixed, tmp_path: Path
) -> None:
    """KV that decode spoils after its checksum: each of its pairs parts from decode's own text at
    the first token, and the others do not."""
    with mixed.faults.of("write zeroes"):
        done = mixed.pdctl(
            *("bench", mixed.topology, *QUICK, "--json"),
            *("--save-result", "--result-dir", tmp_path),
        )
    points = {p["pd_path"]: p for p in json.loads(done.stdout)["points"]}
    texts = {
        path: [mark["detail"] for mark in p["pd_marks"] if mark["kind"] == "text"]
        for path, p in points.items()
    }
    wrong = {path for path, said in texts.items() if any("first at token 0 " in s for s in said)}
    assert wrong == BROKEN, texts
    assert len(points) == 6
    for kind in ("html", "md"):
        (report,) = tmp_path.glob(f"*.{kind}")
        shown = report.read_text().replace("&gt;", ">").replace("&#x27;", "'")
        for path in BROKEN:
            assert f"{path} at 66 tokens: text differs from vd's in 1 of 1 requests" in shown
    assert all(p["median_ttft_ms"] > 0 for p in points.values())
