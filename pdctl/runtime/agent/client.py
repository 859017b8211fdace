"""Calls to one agent, bounded, with foreign failures translated.

Two ways lead to an agent: straight to its port, from its own host; or by relay, through the
connection to its host, whose far end asks it there. An agent's port never crosses hosts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, cast

from pdctl.errors import AgentLost, HostError
from pdctl.runtime.agent.view import Snapshot, decode, encode
from pdctl.runtime.cluster.state import ClusterRecord, actor_key
from pdctl.runtime.machine.process import ACTOR_KEY_ENV

UID = "agent"
CALL_S = 5.0
LONG_POLL_S = 25.0
CHANGE_S = 60.0
"""For the ways to new engines on other hosts, too."""
RELAY_S = 5.0
"""On top of a call's own time, for the way there and back."""


class AgentCalls(ABC):
    """What an agent can be asked (`actor.AgentActor`). Use within one event loop.

    Every method raises AgentLost when it does not answer in time, speaks with another key, or
    is the agent of another run; KeyError for a name that it does not know.
    """

    def __init__(self, host: str, run: str) -> None:
        self.host = host
        self._run = run

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

    async def change(self, record: ClusterRecord) -> None:
        """See `actor.AgentActor.change`."""
        await self._call("change", encode(record), timeout_s=CHANGE_S)

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

    @abstractmethod
    async def _call(self, method: str, *arguments: object, timeout_s: float = CALL_S) -> Any: ...

    def _lost(self, why: str) -> AgentLost:
        return AgentLost(f'the agent of host "{self.host}" does not answer ({why})')


class AgentClient(AgentCalls):
    """Straight to an agent of this machine, by its port on loopback."""

    def __init__(self, host: str, port: int, run: str, key: str) -> None:
        super().__init__(host, run)
        self._address = f"127.0.0.1:{port}"
        self._key = actor_key(key)
        self._reference: Any = None

    async def _call(self, method: str, *arguments: object, timeout_s: float = CALL_S) -> Any:
        os.environ[ACTOR_KEY_ENV] = self._key
        _quieten(asyncio.get_running_loop())
        from pdctl.runtime.agent.oscar import xoscar

        try:
            if self._reference is None:
                self._reference = await xoscar.wait_for(
                    xoscar.actor_ref(address=self._address, uid=UID), min(timeout_s, CALL_S)
                )
            return await xoscar.wait_for(getattr(self._reference, method)(*arguments), timeout_s)
        except TimeoutError:
            raise self._lost(f"no answer within {timeout_s:g} s") from None
        except ConnectionRefusedError as error:
            raise self._lost(f"nothing listens at {self._address}") from error
        except (OSError, EOFError, xoscar.errors.XoscarError) as error:
            raise self._lost(str(error) or type(error).__name__) from error


class Relaying(Protocol):
    """A host whose far end asks its agent there."""

    def relay(
        self, state_dir: str, method: str, arguments: Sequence[object], timeout_s: float
    ) -> concurrent.futures.Future[Any]:
        """The agent's answer; AgentLost or HostError in it where there is none."""
        ...


class RelayedAgent(AgentCalls):
    """By relay to the agent whose state lies in `state_dir` on another host."""

    def __init__(self, host: str, run: str, relaying: Relaying, state_dir: str) -> None:
        super().__init__(host, run)
        self._relaying = relaying
        self._state_dir = state_dir

    async def _call(self, method: str, *arguments: object, timeout_s: float = CALL_S) -> Any:
        answer = self._relaying.relay(self._state_dir, method, arguments, timeout_s)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s + RELAY_S)
        except TimeoutError:
            raise self._lost(f"no answer within {timeout_s + RELAY_S:g} s") from None
        except HostError as error:
            raise AgentLost(error.message, hint=error.hint) from error


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
