"""An agent as its own process, with doubles of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from runtime.clusters import answering, start_agent, sweep, written

from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.machine import process


@asynccontextmanager
async def agent(
    folder: Path, **options: Any
) -> AsyncIterator[tuple[StateDir, ClusterRecord, AgentClient]]:
    """A running agent; at the end it shuts down by itself, and nothing of its run is left."""
    with written(folder, **options) as (state, record):
        try:
            record = start_agent(state, record)
            client = await answering(state, record)
            yield state, record, client
            with anyio.fail_after(60):
                if process.is_alive(record.agents["local"].mark):
                    await client.shutdown()
                    await process.wait_exit(record.agents["local"].mark)
                    assert process.marked(record.run) == []
        finally:
            sweep(record)
