"""Real MLX replicas of a tiny checkpoint under a router, with a stub for their agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import tiny
from runtime.router.cluster import contract, plan_of

from pdctl.engines.channel import (
    REPLICA_ENV,
    SOCKET_ENV,
    Assignment,
    Attach,
    Failed,
    HandoffSettings,
    Members,
    MemberState,
    PairStates,
    Poll,
    Ready,
    Refresh,
    Report,
    RouterAssignment,
    ToAgent,
    encode,
)
from pdctl.engines.registry import spec_for
from pdctl.handoff.counters import Counters
from pdctl.runtime.router.server import Router, attached
from pdctl.topology.contract import Positions
from pdctl.topology.model import ComputeDtype, Engine, Host, OnFailure
from pdctl.topology.plan import ReplicaPlan

START_S = 90.0
STOP_S = 10.0

CONTRACT = msgspec.structs.replace(
    contract(),
    positions=Positions(
        rope_theta=tiny.ROPE_THETA,
        max_positions=tiny.MAX_POSITIONS,
        context_length=contract().positions.context_length,
    ),
)


class StubAgent:
    """Assigns, polls, and tells the router; one host, no restarts."""

    def __init__(self, path: str, assignment: RouterAssignment) -> None:
        self.path = path
        self.assignment = assignment
        self.members: dict[str, MemberState] = {}
        self.failures: list[Failed] = []
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._reports: dict[str, asyncio.Event] = {}
        self._decoder = msgspec.msgpack.Decoder(ToAgent)
        self._version = 0
        self.states: PairStates | None = None
        self.announced = asyncio.Event()
        for replica in assignment.plan.replicas:
            self.members[replica.name] = MemberState(
                name=replica.name,
                engine=Engine.MLX,
                role=replica.role,
                host="local",
                state="starting",
                incarnation=1,
            )

    def change(self, name: str, **fields: Any) -> None:
        self.members[name] = msgspec.structs.replace(self.members[name], **fields)
        self.push()

    def push(self, seq: int = 0) -> None:
        self._version += 1
        writer = self._writers.get("router")
        if writer is not None:
            writer.write(
                encode(
                    Members(
                        version=self._version,
                        seq=seq,
                        members=tuple(self.members.values()),
                        failures=tuple(self.failures[-64:]),
                    )
                )
            )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                message = self._decoder.decode(await reader.readexactly(length))
                if isinstance(message, Attach):
                    name = message.name
                    self._writers[name] = writer
                    self._attached(message, writer)
                elif isinstance(message, Refresh):
                    await self._poll()
                    self.push(message.seq)
                else:
                    self._take(name, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._writers.pop(name, None)
        finally:
            writer.close()

    def _attached(self, message: Attach, writer: asyncio.StreamWriter) -> None:
        if message.kind == "router":
            writer.write(encode(self.assignment))
            self.push()
            return
        writer.write(
            encode(
                Assignment(
                    cluster="test",
                    replica=message.name,
                    role=self.members[message.name].role,
                    key=self.assignment.key,
                    contract=CONTRACT,
                    compute_dtype=ComputeDtype.FLOAT32,
                    data_host="127.0.0.1",
                    data_port=None,
                    handoff=HandoffSettings(
                        timeout_s=self.assignment.plan.timeout_s,
                        on_failure=OnFailure.ERROR,
                        buffer_bytes=64 << 20,
                        encrypt=False,
                    ),
                )
            )
        )
        self.change(message.name, pid=message.pid)

    def _take(self, name: str, message: Any) -> None:
        if isinstance(message, Ready):
            self.change(
                name, state="ready", http_port=message.http_port, data_port=message.data_port
            )
        elif isinstance(message, PairStates):
            self.states = message
            self.announced.set()
        elif isinstance(message, Failed):
            self.failures.append(message)
            self.push()
        elif isinstance(message, Report):
            self.members[name] = msgspec.structs.replace(
                self.members[name], counters=message.counters
            )
            self._reports.setdefault(name, asyncio.Event()).set()

    async def _poll(self) -> None:
        for name, writer in self._writers.items():
            if name != "router":
                self._reports[name] = asyncio.Event()
                writer.write(encode(Poll(seq=1)))
        with anyio.move_on_after(1.0):
            for name in list(self._writers):
                if name != "router":
                    await self._reports[name].wait()


class RealCluster:
    def __init__(
        self,
        agent: StubAgent,
        router: Router,
        http: aiohttp.ClientSession,
        processes: dict[str, asyncio.subprocess.Process],
        model: Path,
    ) -> None:
        self.agent = agent
        self.model = model
        self.router = router
        self.http = http
        self.processes = processes

    def url(self, path: str) -> str:
        return self.router.url + path

    def engine_url(self, name: str, path: str) -> str:
        member = self.agent.members[name]
        return f"http://{member.http_host}:{member.http_port}{path}"

    async def counters(self) -> dict[str, Counters]:
        assert await self.router.link.refresh()
        return {seat.name: seat.state.counters for seat in self.router.roster.seats()}

    async def ready(self, *paths: str, within_s: float = START_S) -> None:
        roster = self.router.roster
        with anyio.fail_after(within_s):
            while not set(paths) <= {path.text for path in roster.ready()}:
                failed = [roster.state(p) for p in roster.paths if roster.state(p)[0] == "failed"]
                assert not failed, failed
                with anyio.move_on_after(1.0):
                    await roster.changed()
                for name, process in self.processes.items():
                    assert process.returncode is None, f"{name} ended"


def assignment_of(
    names: str, timeout_s: float = 60.0, policy: str = "round_robin"
) -> RouterAssignment:
    return RouterAssignment(
        cluster="test",
        run="run1",
        key=os.urandom(32),
        plan=plan_of(names, timeout_s=timeout_s),
        contract=CONTRACT,
        api_key=None,
        policy=policy,
        on_failure=OnFailure.ERROR,
        model_dir="",
    )


@contextlib.asynccontextmanager
async def real_cluster(
    names: str, family: str = "llama", *, timeout_s: float = 60.0, policy: str = "round_robin"
) -> AsyncIterator[RealCluster]:
    """Replicas as processes (their logs go to this process's stderr), the router in this one;
    ready when every path's canary has passed."""
    assignment = assignment_of(names, timeout_s, policy)
    plan = assignment.plan
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = tiny.make_checkpoint(folder / "model", family)
        assignment = msgspec.structs.replace(assignment, model_dir=str(model))
        agent = StubAgent(str(folder / "agent.sock"), assignment)
        server = await asyncio.start_unix_server(agent.serve, agent.path)
        stack.callback(server.close)
        processes: dict[str, asyncio.subprocess.Process] = {}
        for replica in plan.replicas:
            process = await start_replica(replica, model, agent.path)
            stack.push_async_callback(stop_process, process)
            processes[replica.name] = process
        http = await stack.enter_async_context(aiohttp.ClientSession())
        router = Router(*await attached(agent.path))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        started = anyio.Event()
        tasks.start_soon(lambda: router.run(started=started))
        await started.wait()
        running = RealCluster(agent, router, http, processes, model)
        await running.ready(*(path.text for path in router.roster.paths))
        yield running


async def start_replica(
    replica: ReplicaPlan, model: Path, socket_path: str
) -> asyncio.subprocess.Process:
    planned = msgspec.structs.replace(replica, model=str(model), http_port=0)
    command = spec_for(Engine.MLX).command(planned, Host(name="local"), plan_of(replica.name))
    return await asyncio.create_subprocess_exec(
        *command.argv,
        env={**os.environ, **command.env, SOCKET_ENV: socket_path, REPLICA_ENV: replica.name},
        start_new_session=True,
    )


async def stop_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        with anyio.fail_after(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
