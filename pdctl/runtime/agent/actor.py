"""The agent's surface: a thin xoscar actor. Only JSON bytes and plain values cross it.

`StatelessActor`: calls run beside each other, so that a long poll holds up nothing.
"""

from __future__ import annotations

from pdctl.runtime.agent.core import Agent
from pdctl.runtime.agent.oscar import xoscar
from pdctl.runtime.agent.view import decode, encode
from pdctl.runtime.cluster.state import ClusterRecord

UID = "agent"
LONG_POLL_S = 25.0
"""The longest that `changes` waits; callers ask again."""


class AgentActor(xoscar.StatelessActor):  # type: ignore[misc]
    """See `core.Agent`; `KeyError` for a name that this host does not have."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def describe(self) -> tuple[str, str]:
        """(run, host): whether this is the agent that the caller means."""
        return self._agent.run_id, self._agent.host

    async def start(self, name: str) -> None:
        await self._agent.start(name)

    async def restart(self, name: str) -> None:
        await self._agent.restart(name)

    async def stop(self, name: str) -> None:
        """Answers when nothing of it is left, or it is known to be stuck; bounded."""
        await self._agent.stop(name)

    async def drain(self, name: str, undo: bool) -> bool:
        """Whether it was draining before; answers at once."""
        return await self._agent.drain(name, undo=undo)

    async def change(self, record: bytes) -> None:
        """A `ClusterRecord`: the same cluster with other replicas, settings or pairs. What
        goes must have been stopped, what comes is not started. Raises as `changes.change`."""
        await self._agent.change(decode(record, ClusterRecord))

    async def snapshot(self, fresh: bool) -> bytes:
        """A `Snapshot`; `fresh` asks every process for its counters first, about 1 s."""
        return encode(await self._agent.snapshot(fresh=fresh))

    async def changes(self, after: int, timeout_s: float) -> bytes:
        """A `Snapshot` above that version, or the present one at the end of `timeout_s`."""
        return encode(await self._agent.changes(after, min(timeout_s, LONG_POLL_S)))

    async def shutdown(self, leave: bool = False) -> None:
        """Answers at once; then everything is stopped (unless `leave`), then the agent ends."""
        self._agent.leave = leave
        self._agent.stopping.set()
