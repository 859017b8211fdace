"""The Grafana dashboard asks for what `/metrics` has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runtime.router.cluster import CHAT, cluster
from runtime.router.fakes import fails

from pdctl.handoff.counters import Counters, Histogram, PairCounters

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
METRIC = re.compile(r"\bpdctl_\w+")


async def shown() -> dict[str, set[str]]:
    """Metric → its labels, of a cluster in which each has been observed once."""
    async with cluster("p0 d0") as c:
        phases = {"transfer": Histogram().observed(0.1)}
        pairs = {"d0": PairCounters(phases=phases)}
        c["p0"].counters = Counters(failures={"expired": 1}, phases=phases, pairs=pairs)
        c["d0"].counters = Counters(pairs={"p0": PairCounters(round_trip_s=0.001)})
        assert (await c.ask(CHAT)).status == 200
        c["d0"].on["decode"] = fails(502, "gone", "peer_lost")
        assert (await c.ask(CHAT)).status == 502
        c.router.meter.decided("p0>d0", "faster")
        text = await (await c.http.get(c.url("/metrics"))).text()
    samples = re.findall(r"^(pdctl_\w+)(?:\{(.*)\})? ", text, re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in samples}


@pytest.mark.anyio
async def test_every_metric_and_label_of_the_dashboard_exists() -> None:
    """In `/metrics` by that name; what is grouped by is a label of it, what a legend names is
    grouped by."""
    metrics = await shown()
    for target in TARGETS:
        expression = target["expr"]
        asked = METRIC.findall(expression)
        assert asked, expression
        for name in asked:
            assert name in metrics, name
        grouped = {
            one.strip() for by in re.findall(r"by \((.*?)\)", expression) for one in by.split(",")
        }
        chosen = set(re.findall(r"(\w+)[!=~]+\"", expression))
        assert grouped | chosen <= set.union(*(metrics[name] for name in asked)), expression
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped


@pytest.mark.anyio
async def test_the_dashboard_leaves_nothing_out() -> None:
    """Every metric is in it, but those per replica that it shows per pair."""
    asked = {name for target in TARGETS for name in METRIC.findall(target["expr"])}
    per_pair = {name.replace("pdctl_pair_", "pdctl_") for name in asked if "_pair_" in name}
    ending = re.compile(r"_(total|bucket|sum|count|created)$")
    missing = {ending.sub("", name) for name in set(await shown()) - asked - per_pair}
    assert missing - {ending.sub("", name) for name in asked} == set()


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """It names no data source of its own, and its panels do not overlap."""
    assert {json.dumps(panel["datasource"]) for panel in DASHBOARD["panels"]} == {
        '{"type": "prometheus", "uid": "${datasource}"}'
    }
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
