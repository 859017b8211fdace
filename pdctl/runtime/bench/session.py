"""A whole sweep against one running cluster, from its plan to results."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import anyio
import msgspec
from rich.console import Console

from pdctl.errors import PdctlError, UsageError
from pdctl.runtime.bench.client import Client
from pdctl.runtime.bench.columns import Column, columns
from pdctl.runtime.bench.measure import Results, Sweep
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.settings import Settings, check
from pdctl.runtime.bench.watch import watching
from pdctl.topology.plan import Plan

METHOD = (
    "Streaming /v1/completions through the router, every path pinned by x-pdctl-path; greedy; "
    "prompts of exactly the asked number of tokens, sent once per path, kept out of prefix "
    "caches. The paths take turns within each round; a round of a path sends `max_concurrency` "
    "requests at once and waits for all. TTFT is the time to the first chunk with text. "
    "Imported tokens and bytes are deltas of the router's /status around each turn. Rounds with "
    "more than 5 % CPU steal are run again, twice at most."
)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster, as a sweep needs to know it."""

    plan: Plan
    url: str
    """The router's, without a slash at the end."""
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def router_url(bind: str) -> str:
    """Where a router that listens on `bind` ("host:port") is reached from its own host."""
    host, _, port = bind.rpartition(":")
    bare = host.strip("[]")
    reached = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def tokenizer_directory(plan: Plan, local_hosts: Mapping[str, bool]) -> Path:
    """A checkpoint of the plan on this machine; UsageError where no replica's is here.

    `local_hosts` says of each host's name whether it is this machine.
    """
    for replica in plan.replicas:
        directory = Path(replica.model).expanduser()
        if local_hosts.get(replica.host, False) and (directory / "tokenizer.json").is_file():
            return directory
    raise UsageError(
        "no replica's checkpoint is on this machine, so prompts cannot be counted",
        hint="name a copy of it with --tokenizer DIR",
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
    with watching(console, settings, len(paths)) as observer:
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
            )
            await run.run(results)
            group.cancel_scope.cancel()
    return paths


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
