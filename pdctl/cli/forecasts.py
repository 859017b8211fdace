"""What `pdctl plan` shows of predicted times to the first token."""

from __future__ import annotations

from pdctl.cli import render
from pdctl.runtime.cluster.costs import stored_costs
from pdctl.runtime.cost.forecast import Cell, Forecast, PairForecast, forecast
from pdctl.runtime.cost.record import replicas_of
from pdctl.runtime.router.policy import pinnable_paths
from pdctl.topology.model import Role, Topology
from pdctl.topology.plan import Plan


def forecast_of(topology: Topology, plan: Plan, *, offline: bool) -> Forecast:
    """Of every pair, and of every replica that answers alone; of a prefill replica, which does so
    only where it is pinned, as soon as it was."""
    costs = stored_costs(topology, offline=offline)
    paths = [
        path.text
        for path in pinnable_paths(plan)
        if plan.replica(path.decode).role is not Role.PREFILL or path.text in costs.paths
    ]
    alone = [path for path in paths if ">" not in path]
    pairs = [path for path in paths if ">" in path]
    return forecast(plan, costs.paths, [*alone, *pairs])


def show_forecast(found: Forecast, cluster: str) -> None:
    """A table of milliseconds, then a sentence per pair; what is missing, and how to get it."""
    from rich.table import Table

    console = render.stdout()
    measured = [path for path in found.paths if path.cells]
    console.print()
    if measured:
        console.print("predicted time to the first token (ms), nothing else running:")
        table = Table("tokens", *(path.path for path in measured), box=None)
        for row, tokens in enumerate(found.lengths):
            table.add_row(str(tokens), *(_milliseconds(path.cells[row]) for path in measured))
        steps = [f"{p.step_ms:.3g} ({p.steps})" if p.step_ms else "" for p in measured]
        table.add_row("per token then", *steps)
        console.print(table)
        console.print("(n): by so many requests of about that length; ~ far beyond all of them")
    for pair in found.pairs:
        if _told_below(found, pair):
            continue
        console.print(pair.words, soft_wrap=True)
        costs = _handoff(pair)
        if costs:
            console.print(f"  {costs}", soft_wrap=True)
    if found.unmeasured:
        console.print(
            f"not measured yet: {', '.join(found.unmeasured)}. After `pdctl up`, run "
            f"`pdctl bench {cluster}`; every request counts",
            soft_wrap=True,
        )


def _told_below(found: Forecast, pair: PairForecast) -> bool:
    """All that could be said of it is that something was not measured."""
    decode = replicas_of(pair.path)[-1]
    return pair.path in found.unmeasured or (pair.alone is None and decode in found.unmeasured)


def _handoff(pair: PairForecast) -> str:
    """What a handoff adds, and the break-even of the link."""
    parts = []
    if pair.round_trip_ms is not None:
        parts.append(f"round trip {pair.round_trip_ms:.2g} ms")
    if pair.fixed_ms is not None:
        parts.append(f"a handoff costs {pair.fixed_ms:.3g} ms whatever its length")
    if pair.link_bytes_per_s is not None:
        parts.append(f"pages that computing does not hide travel at {_rate(pair.link_bytes_per_s)}")
    if pair.enough_bytes_per_s is not None:
        enough = f"{_rate(pair.enough_bytes_per_s)} at {pair.enough_at_tokens} tokens"
        parts.append(f"break-even link: {enough}")
    return "; ".join(parts)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def _milliseconds(cell: Cell) -> str:
    figure = f"{cell.ttft_ms:.0f}" if cell.ttft_ms >= 100 else f"{cell.ttft_ms:.3g}"
    return f"{'~' if cell.extrapolated else ''}{figure} ({cell.samples})"
