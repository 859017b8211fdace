"""Calls to one agent, bounded, with foreign failures translated."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

from pdctl.errors import AgentLost
from pdctl.runtime.agent.view import Snapshot, decode
from pdctl.runtime.process import ACTOR_KEY_ENV
from pdctl.runtime.state import actor_key

UID = "agent"
CALL_S = 5.0
LONG_POLL_S = 25.0


class AgentClient:
    """One agent, by its port on loopback. Use within one event loop.

    Every method raises AgentLost when it does not answer in time, speaks with another key, or
    is the agent of another run.
    """

    def __init__(self, host: str, port: int, run: str, key: str) -> None:
        self.host = host
        self._address = f"127.0.0.1:{port}"
        self._run = run
        self._key = actor_key(key)
        self._reference: Any = None

    async def check(self, timeout_s: float = CALL_S) -> None:
        """Whether this run's agent answers."""
        run, host = await self._call("describe", timeout_s=timeout_s)
        if (run, host) != (self._run, self.host):
            raise self._lost(f"the agent there belongs to another run ({run})")

    async def start(self, name: str) -> None:
        await self._call("start", name)

    async def restart(self, name: str) -> None:
        await self._call("restart", name)

    async def stop(self, name: str, timeout_s: float) -> None:
        await self._call("stop", name, timeout_s=timeout_s)

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        """No new request for a replica, or for "router"; `undo` opens it again.

        Returns:
            Whether it was draining before.
        """
        return bool(await self._call("drain", name, undo))

    async def snapshot(self, *, fresh: bool = False) -> Snapshot:
        raw = await self._call("snapshot", fresh)
        return cast(Snapshot, decode(raw, Snapshot))

    async def changes(self, after: int, timeout_s: float = LONG_POLL_S) -> Snapshot:
        """Waits for a picture newer than `after`, at most `timeout_s`."""
        wait_s = max(0.0, min(timeout_s, LONG_POLL_S))
        raw = await self._call("changes", after, wait_s, timeout_s=wait_s + CALL_S)
        return cast(Snapshot, decode(raw, Snapshot))

    async def shutdown(self, *, leave: bool = False) -> None:
        await self._call("shutdown", leave)

    async def _call(self, method: str, *arguments: object, timeout_s: float = CALL_S) -> Any:
        os.environ[ACTOR_KEY_ENV] = self._key
        _quieten(asyncio.get_running_loop())
        import xoscar
        from xoscar.errors import XoscarError

        try:
            if self._reference is None:
                self._reference = await xoscar.wait_for(
                    xoscar.actor_ref(address=self._address, uid=UID), min(timeout_s, CALL_S)
                )
            return await xoscar.wait_for(getattr(self._reference, method)(*arguments), timeout_s)
        except TimeoutError:
            raise self._lost(f"no answer within {timeout_s:g} s") from None
        except (OSError, EOFError, XoscarError) as error:
            raise self._lost(str(error) or type(error).__name__) from error

    def _lost(self, why: str) -> AgentLost:
        return AgentLost(f'the agent of host "{self.host}" does not answer ({why})')


def _quieten(loop: asyncio.AbstractEventLoop) -> None:
    """A call on a connection that broke fails twice in xoscar 0.12: once for its caller, once
    in a future that nobody holds. The second one is not news."""
    before = loop.get_exception_handler()
    if isinstance(before, _Quiet):
        return
    loop.set_exception_handler(_Quiet(before))


class _Quiet:
    """An exception handler that keeps abandoned futures of lost connections to itself."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        from xoscar.errors import ServerClosed

        if isinstance(context.get("exception"), (ServerClosed, ConnectionError)):
            return
        if self._before is not None:
            self._before(loop, context)
        else:
            loop.default_exception_handler(context)
