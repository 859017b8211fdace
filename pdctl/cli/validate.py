"""`pdctl validate`: everything that can be known before launch."""

from __future__ import annotations

from typing import Annotated

import typer

from pdctl.cli.arguments import TopologyFile


def validate(
    topology: TopologyFile,
    offline: Annotated[
        bool, typer.Option("--offline", help="Check the file alone and touch no host.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check everything that can be known before launch; report every problem.

    The file, hosts, Python and package versions, model files, fingerprints, the contract of every
    prefill/decode pair, ports, and whether the hosts of a pair reach each other. All problems are
    reported, each with a hint; `pdctl up` does the same and starts nothing where there is one."""
    from pdctl.cli import render
    from pdctl.runtime.checks.validation import validate as run
    from pdctl.runtime.cluster.state import own_plan

    with render.steps() as watcher:
        outcome = run(
            topology,
            offline=offline,
            watcher=watcher,
            kept=own_plan(topology),
        )
    report = outcome.report
    if as_json:
        render.print_json(report)
    else:
        render.show_diagnostics(report)
        if report.valid and outcome.plan is not None:
            plan = outcome.plan
            parts = [
                f"{topology} is valid",
                render.counted(len(plan.replicas), "replica"),
                render.counted(len(plan.pairs), "pair"),
            ]
            if plan.contract_digest:
                parts.append(f"contract {plan.contract_digest[:12]}")
            render.stdout().print(": ".join([parts[0], ", ".join(parts[1:])]), soft_wrap=True)
    raise typer.Exit(report.exit_code)
