"""A whole sweep against one running cluster, from its plan to results."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import aiohttp
import anyio
from rich.console import Console

from pdctl.errors import PdctlError
from pdctl.runtime.bench.client import Client
from pdctl.runtime.bench.columns import Column, columns
from pdctl.runtime.bench.links import Link
from pdctl.runtime.bench.machine import machine, versions
from pdctl.runtime.bench.measure import Results, Sweep
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.resume import setting_of
from pdctl.runtime.bench.settings import Settings, check
from pdctl.runtime.bench.strangers import GpuWatch
from pdctl.runtime.bench.summary import Run
from pdctl.runtime.bench.target import Target
from pdctl.runtime.bench.watch import watching

METHOD = (
    "Streaming /v1/completions through the router, every path pinned by x-pdctl-path; greedy; "
    "prompts of exactly the asked number of tokens, sent once per path, kept out of prefix "
    "caches. The paths take turns within each round; a round of a path sends `max_concurrency` "
    "requests at once and waits for all. TTFT is the time to the first chunk with text. "
    "A pair's floor is its prefill engine alone, or its bytes over the link as measured before the "
    "sweep, whichever is longer. Imported tokens and bytes are deltas of the router's /status "
    "around each turn. Rounds with more than 5 % CPU steal, or with a newcomer on the GPU, are run "
    "again, twice at most."
)


async def sweep(
    target: Target, settings: Settings, prompts: PromptSource, results: Results, console: Console
) -> tuple[Column, ...]:
    """Measures into `results` until done or interrupted; returns the columns.

    SIGINT and SIGTERM end it: requests in flight are closed, `results.interrupted` is set, and
    what was measured stays. Runs in the main thread.

    Raises:
        UsageError: a length that this cluster cannot serve; nothing was sent.
        PdctlError: the router is gone, something is not ready, or a path refuses requests.
    """
    check(settings, target.plan.context_length)
    paths = columns(target.plan)
    if not paths:
        raise PdctlError("this cluster has no path to measure")
    failure: PdctlError | None = None
    with watching(console, settings, len(paths), len(results.done)) as observer:
        async with (
            anyio.create_task_group() as group,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            await group.start(_stop_on_signal, group.cancel_scope, results)
            run = Sweep(
                Client(
                    session,
                    target.url,
                    timeout_s=target.plan.timeout_s,
                    headers=target.headers,
                ),
                paths,
                settings,
                prompts,
                model=target.plan.model,
                page_bytes=target.plan.page_bytes,
                observer=observer,
                strangers=GpuWatch(target.local_hosts).strangers,
            )
            try:
                await run.run(results)
            except PdctlError as error:
                failure = error
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return paths


def run_of(
    target: Target, settings: Settings, results: Results, date: str, links: Mapping[str, Link]
) -> Run:
    """What every point of one sweep says of the cluster, the machine and the method."""
    plan = target.plan
    engines = {} if results.status is None else results.status.versions
    return Run(
        date=date,
        cluster=plan.cluster,
        model=plan.model,
        tokenizer=plan.model,
        output_len=settings.output_len,
        rounds=settings.num_prompts,
        page_bytes=plan.page_bytes,
        versions={**versions(), **engines},
        compute_dtypes={r.name: r.compute_dtype.value for r in plan.replicas},
        machine=machine(),
        method=METHOD,
        setting=setting_of(plan, settings),
        goodput=settings.goodput,
        links=dict(links),
    )


async def _stop_on_signal(
    scope: anyio.CancelScope,
    results: Results,
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            results.interrupted = True
            scope.cancel()
            return
