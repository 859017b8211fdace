"""`pdctl plan`: what `up` would run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from pdctl.cli import render
from pdctl.cli.arguments import TopologyFile
from pdctl.cli.forecasts import forecast_of, show_forecast
from pdctl.engines.interface import Command
from pdctl.engines.registry import spec_for
from pdctl.runtime.agent.outpost import forwards_to
from pdctl.runtime.checks.outcome import Validation
from pdctl.runtime.checks.validation import validate as run
from pdctl.runtime.cluster.placement import agent_command
from pdctl.runtime.cluster.state import StateDir, own_plan
from pdctl.runtime.hosts.ssh import far_end_argv
from pdctl.topology.model import Topology
from pdctl.topology.plan import Plan
from pdctl.topology.sizes import approximate_size

UNASKED = "~/.local/state/pdctl"
"""Of another host that was not asked; there XDG_STATE_HOME counts."""


def plan(
    topology: TopologyFile,
    offline: Annotated[
        bool, typer.Option("--offline", help="Plan from the file alone and touch no host.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what `up` would run: commands, environments, ports, pairs and budgets; and how long
    each pair and each replica alone should take to the first token, as far as it was measured.

    Ports that the file leaves open are assigned as `up` would assign them; a cluster that runs
    keeps those that it has."""
    with render.steps() as watcher:
        outcome = run(
            topology,
            offline=offline,
            watcher=watcher,
            kept=own_plan(topology),
        )
    if not as_json or not outcome.report.valid:
        render.show_diagnostics(outcome.report)
    if outcome.plan is None or outcome.topology is None:
        raise typer.Exit(outcome.report.exit_code)
    commands = replica_commands(outcome.topology, outcome.plan)
    around = surroundings(outcome.topology, outcome.plan, outcome.homes)
    found = forecast_of(outcome.topology, outcome.plan, offline=offline)
    if as_json:
        told = {"surroundings": around, "forecast": msgspec.to_builtins(found)}
        render.print_json({**document(outcome, commands), **told})
    else:
        _show(outcome.topology, outcome.plan, commands, around)
        show_forecast(found, outcome.plan.cluster)


def replica_commands(topology: Topology, plan: Plan) -> dict[str, Command]:
    """Replica → the process that its agent would start."""
    return {
        r.name: spec_for(r.engine).command(r, topology.hosts[r.host], plan) for r in plan.replicas
    }


def surroundings(topology: Topology, plan: Plan, homes: Mapping[str, str]) -> dict[str, list[str]]:
    """What runs beside the replicas, as argv: agents, the router, and the keeper's way to each
    other host.

    Args:
        homes: host → where clusters' folders lie there, as far as it was asked.
    """
    found: dict[str, list[str]] = {}
    for name in plan.agent_ports:
        host = topology.hosts[name]
        there = f"{homes.get(name, UNASKED)}/{plan.cluster}/hosts/{name}"
        state = str(StateDir.of(plan.cluster).path) if host.ssh is None else there
        found[f"agent of {name}"] = list(agent_command(host, state, "").argv)
        if name != plan.router_host and host.ssh is not None:
            argv = far_end_argv(host, forwards=forwards_to(name, plan))
            found[f"{plan.router_host} to {name}"] = list(argv)
    for store in plan.stores:
        argv = agent_command(topology.hosts[store.host], "", "").argv
        found[f"page store of {store.host}"] = [*argv[:1], "-m", "pdctl.runtime.store"]
    router = topology.hosts[plan.router_host]
    found["router"] = [*agent_command(router, "", "").argv[:1], "-m", "pdctl.runtime.router"]
    return found


def document(outcome: Validation, commands: dict[str, Command]) -> dict[str, Any]:
    """The plan as `--json` prints it."""
    return {
        "format_version": "1.0",
        "plan": msgspec.to_builtins(outcome.plan),
        "contract": msgspec.to_builtins(outcome.contract),
        "commands": msgspec.to_builtins(commands),
        "diagnostics": msgspec.to_builtins(outcome.report.diagnostics),
    }


def _show(
    topology: Topology, plan: Plan, commands: dict[str, Command], around: dict[str, list[str]]
) -> None:
    from rich.table import Table

    console = render.stdout()
    console.print(
        f"cluster {plan.cluster}: {plan.model}, {plan.dtype}, {plan.context_length} tokens"
    )
    console.print(f"router http://{plan.router_bind} on {plan.router_host}")
    for host, port in plan.agent_ports.items():
        ssh = topology.hosts[host].ssh
        way = "" if ssh is None else f", by ssh {ssh}"
        console.print(f"agent 127.0.0.1:{port} on {host}{way}", soft_wrap=True)
    console.print(_dependence(topology, plan), soft_wrap=True)
    table = Table("replica", "host", "engine", "role", "compute", "http", "data", box=None)
    for r in plan.replicas:
        data = "" if r.data_port is None else f"{r.data_host}:{r.data_port}"
        if r.side_port is not None:
            data = f"{r.data_host}:{r.side_port} (its engine's own)"
        http = f"{r.http_host}:{r.http_port}"
        if r.route_port is not None:
            http += f" (from {plan.router_host}: {r.route_port})"
        table.add_row(r.name, r.host, r.engine, r.role, r.compute_dtype, http, data)
    console.print(table)
    for pair in plan.pairs:
        console.print(f"pair {pair.path}  {pair.transport}  ({pair.reason})")
    for store in plan.stores:
        names = [r.name for r in plan.replicas if plan.store_of(r) == store]
        size = approximate_size(store.buffer_bytes)
        line = f"page store of {store.host}: {size} of memory, for {', '.join(names)}"
        if store.data_port is not None:
            line += f", other hosts' dial {store.data_host}:{store.data_port}"
        console.print(line, soft_wrap=True)
    for line in _budget(plan):
        console.print(line)
    for name, command in commands.items():
        console.print(f"\n{name}:")
        for key, value in command.env.items():
            console.print(f"  {key}={shlex.quote(value)}", soft_wrap=True)
        console.print(f"  {_typed(command.argv)}", soft_wrap=True)
    for name, argv in around.items():
        console.print(f"\n{name}:\n  {_typed(argv)}", soft_wrap=True)


def _typed(argv: Sequence[str]) -> str:
    """As a shell takes it: a home stays one."""
    homes = (("~/", word[2:]) if word.startswith("~/") else ("", word) for word in argv)
    return " ".join(f"{home}{shlex.quote(rest)}" for home, rest in homes)


def _dependence(topology: Topology, plan: Plan) -> str:
    """What is lost with the machine that launches."""
    if topology.hosts[plan.router_host].ssh is not None:
        return f"once it is up, nothing depends on this machine: {plan.router_host} keeps it"
    if all(topology.hosts[host].ssh is None for host in plan.agent_ports):
        return "everything runs on this machine, and outlives the terminal"
    return "router and keeper run on this machine: while it is off, nothing is served"


def _budget(plan: Plan) -> list[str]:
    if plan.token_kv_bytes is None or plan.page_bytes is None:
        return ["KV per token: not known offline"]
    lines = [f"KV per token: {plan.token_kv_bytes} bytes; per page of 64: {plan.page_bytes} bytes"]
    if plan.buffer_bytes is not None and any(r.data_port for r in plan.replicas):
        prompt = min(plan.context_length, plan.buffer_bytes // plan.page_bytes * 64)
        lines.append(
            f"page budget per prefill replica: {approximate_size(plan.buffer_bytes)}, "
            f"for prompts up to {prompt} tokens"
        )
    return lines
