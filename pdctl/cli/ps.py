"""`pdctl ps`: what runs, and its counters of this moment."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
import typer

from pdctl.cli import render
from pdctl.cli.arguments import Cluster
from pdctl.errors import ClusterError
from pdctl.runtime.cluster.state import running
from pdctl.runtime.cluster.status import Status, status
from pdctl.topology.sizes import approximate_size

COLUMNS = {
    "name": "replica",
    "engine": "engine",
    "role": "role",
    "host": "host",
    "state": "state",
    "pid": "pid",
    "uptime_s": "up",
    "restarts": "restarts",
    "compute_dtype": "compute",
    "requests_active": "active",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
}
"""Key in `Status` → heading."""


def ps(
    topology: Cluster,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show replicas, router and pairs: state, pid, uptime, restarts, handoffs, tokens.

    Counters are of this moment. "draining" takes no new request, and "active" says how many still
    run there; "backoff" and "failed" come with their cause. Where the cluster's agent does not
    answer, what its journal knows is shown instead, and the exit code is 1. Each host but the
    router's has a row, as the router's host sees it: "clock" is that host's minus its own. So has
    each page store, where prefix KV is shared: its pages, memory, and pages that are lent now."""
    state, record = running(topology)
    found = anyio.run(partial(status, state, record))
    if as_json:
        render.print_json(msgspec.to_builtins(found))
    else:
        _show(found)
    if found.problem is not None:
        far = record.topology.hosts[record.plan.router_host].ssh is not None
        what = "what runs is not known" if far else "this is what its journal says"
        raise ClusterError(f"{found.problem}; {what}", hint=found.hint)


def _show(found: Status) -> None:
    from rich.table import Table

    console = render.stdout()
    console.print(f"{found.cluster}: {found.phase}, {found.url or 'no router yet'}")
    table = Table(*COLUMNS.values(), box=None, pad_edge=False)
    for r in [*map(_busiest, found.replicas), {"name": "router", **found.router}]:
        table.add_row(*(_span(r.get(k)) if k == "uptime_s" else _text(r.get(k)) for k in COLUMNS))
    console.print(table)
    if found.pairs:
        console.print()
        console.print(_pairs(found.pairs))
    if found.stores:
        console.print()
        console.print(_stores(found.stores))
    if found.hosts:
        console.print()
        console.print(_hosts(found.hosts))
    rows = [*found.replicas, {"name": "router", **found.router}, *found.pairs, *found.stores]
    for r in [*rows, *found.hosts]:
        if r.get("cause") not in (None, found.problem):
            console.print(f"{_name(r)}: {r['cause']}", soft_wrap=True)
    for reason in dict.fromkeys(pair.get("transport_reason") for pair in found.pairs):
        if reason:
            console.print(f"transport {reason}", soft_wrap=True)


def _pairs(pairs: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(
        *("pair", "transport", "state", "active", "completed", "failed", "imported", "bytes"),
        box=None,
        pad_edge=False,
    )
    for pair in pairs:
        moved = [pair[k] for k in ("host_bytes", "gpu_bytes") if pair.get(k) is not None]
        table.add_row(
            _name(pair),
            *(_text(pair.get(key)) for key in ("transport", "state", "handoffs_active")),
            *(_text(pair.get(key)) for key in ("handoffs_completed", "handoffs_failed")),
            _text(pair.get("imported_tokens")),
            approximate_size(sum(moved)) if moved else "",
        )
    return table


def _stores(stores: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    names = ("page store", "state", "pid", "up", "restarts", "pages", "memory", "lent", "evicted")
    table = Table(*names, box=None, pad_edge=False)
    for store in stores:
        memory = [store[k] for k in ("used_bytes", "budget_bytes") if store.get(k) is not None]
        table.add_row(
            store["name"],
            *(_text(store.get(key)) for key in ("state", "pid")),
            _span(store.get("uptime_s")),
            *(_text(store.get(key)) for key in ("restarts", "pages")),
            " of ".join(map(approximate_size, memory)),
            *(_text(store.get(key)) for key in ("loans", "evicted_pages")),
        )
    return table


def _hosts(hosts: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    headings = ("host", "state", "round trip", "clock", "agent restarts")
    table = Table(*headings, box=None, pad_edge=False)
    for host in hosts:
        trip_s, offset_s = host["round_trip_s"], host["clock_offset_s"]
        table.add_row(
            host["name"],
            host["state"],
            "" if trip_s is None else f"{trip_s * 1000:.1f} ms",
            "" if offset_s is None else f"{offset_s:+.3f} s",
            _text(host["agent_restarts"]),
        )
    return table


def _busiest(row: dict[str, Any]) -> dict[str, Any]:
    """As active counts what either the engine or the router still has there: what `drain`
    waits for."""
    counts = [row[k] for k in ("requests_active", "routed_active") if row.get(k) is not None]
    return {**row, "requests_active": max(counts, default=None)}


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name") or f"{row['prefill']}>{row['decode']}")


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _span(seconds: float | None) -> str:
    """`42s`, `3m10s`, `2h05m`, `3d4h`."""
    if seconds is None:
        return ""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole}s"
    if not hours:
        return f"{minutes}m{whole % 60:02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24}h"
