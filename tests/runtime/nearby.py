"""A second host without SSH: this machine under another name, with a state home of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdctl.errors import HostError
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.ssh import Forward
from pdctl.runtime.hosts.survey import HostFacts


class NearbySurvey:
    """The local one, but for where state lies."""

    def __init__(self, host: NearbyHost) -> None:
        self._host = host

    def facts(self) -> HostFacts:
        self._host.check()
        facts = LocalHost().survey.facts()
        return msgspec.structs.replace(facts, state_home=str(self._host.state_home))

    def __getattr__(self, name: str) -> Any:
        return getattr(LocalHost().survey, name)


class NearbyHost(LocalHost):
    """As `RemoteHost`; `cut` stands for a connection that is away."""

    round_trip_s = 0.001
    clock_offset_s = 1.5
    boot = "one"

    def __init__(self, name: str, state_home: Path) -> None:
        super().__init__(name)
        self.state_home = state_home
        self.cut = False
        self.lost = threading.Event()
        self._severed = asyncio.Event()
        self.survey: Any = NearbySurvey(self)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def sever(self) -> None:
        """Cuts the connection, calls in flight included."""
        self.cut = True
        self.lost.set()
        self._loop.call_soon_threadsafe(self._severed.set)

    def mend(self) -> None:
        self.cut = False
        self.lost = threading.Event()
        self._loop.call_soon_threadsafe(self._severed.clear)

    def check(self) -> None:
        if self.cut:
            raise HostError(f'host "{self.name}": the connection is cut')

    def forward(self, wanted: tuple[Forward, ...]) -> None:
        """Nothing to do: both hosts have one loopback, and replicas no route of their own."""
        self.check()

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.check()
        return super().run(*arguments, **options)

    def spawn(self, *arguments: Any, **options: Any) -> Any:
        self.check()
        return super().spawn(*arguments, **options)

    def relay(
        self, state_dir: str, method: str, arguments: Sequence[object], timeout_s: float
    ) -> concurrent.futures.Future[Any]:
        async def call() -> Any:
            self.check()
            folder = Path(state_dir)
            try:
                record = json.loads((folder / "cluster.json").read_text())
                key = (folder / "key").read_text()
            except FileNotFoundError as error:
                raise HostError(f"nothing was launched from {error.filename}") from None
            port = record["plan"]["agent_ports"][self.name]
            client = AgentClient(self.name, port, record["run"], key)
            severed = asyncio.ensure_future(self._severed.wait())
            asked = asyncio.ensure_future(client._call(method, *arguments, timeout_s=timeout_s))
            await asyncio.wait({severed, asked}, return_when=asyncio.FIRST_COMPLETED)
            severed.cancel()
            if not asked.done():
                asked.cancel()
            self.check()
            return await asked

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def close(self) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
