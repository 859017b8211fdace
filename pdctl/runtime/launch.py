"""`up`: agents, then replicas, then the router, then a canary through every path.

Whatever ends it early (a failure, a deadline, Ctrl-C, SIGTERM, SIGHUP) ends everything that
was started, and proves it, before anybody is told.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.errors import AgentLost, ClusterError, InterruptedLaunch, LaunchError, UsageError
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.view import Snapshot
from pdctl.runtime.events import Emit, LaunchEvent, Stage
from pdctl.runtime.hosts.interface import Mark, RuntimeHost
from pdctl.runtime.progress import Progress
from pdctl.runtime.state import AgentRecord, ClusterRecord, StateDir
from pdctl.runtime.teardown import Reach, local, take_down
from pdctl.runtime.validation import Validation
from pdctl.topology.model import Role
from pdctl.trace import monotonic_s

AGENT_S = 30.0
"""From an agent's start to its first answer."""
ANSWER_EVERY_S = 0.1
LOG_LINES = 20


def refuse_running(state: StateDir) -> None:
    """Raises UsageError where the cluster was launched and not taken down."""
    record = state.read()
    if record is None:
        return
    hint = f"`pdctl down {record.cluster}` first"
    what = "is running" if record.phase == "running" else "was left half launched or half stopped"
    raise UsageError(f'cluster "{record.cluster}" {what} (from {record.topology_path})', hint=hint)


def prepare(
    state: StateDir, path: Path, checked: Validation, environ: Mapping[str, str]
) -> ClusterRecord:
    """Writes the state that agents read: record and keys. Starts nothing.

    Args:
        checked: a validation without errors.
    """
    topology, plan, contract = checked.topology, checked.plan, checked.contract
    if topology is None or plan is None or contract is None:
        raise LaunchError(f"{path} was not validated")
    state.make()
    state.clear_logs()
    record = ClusterRecord(
        run=secrets.token_hex(16),
        phase="starting",
        created_at=time.time(),
        topology_path=str(path.resolve()),
        topology=topology,
        plan=plan,
        contract=contract,
    )
    try:
        state.create_key()
        if topology.router.api_key_env is not None:
            state.write_api_key(environ[topology.router.api_key_env])
        state.write(record)
    except BaseException:  # a key must not stay behind
        state.clear()
        raise
    return record


async def launch(
    state: StateDir,
    record: ClusterRecord,
    emit: Emit,
    *,
    wait_timeout_s: float,
    interrupted: Callable[[], str | None] = lambda: None,
    reach: Reach = local,
) -> ClusterRecord:
    """Launches what `prepare` wrote. The caller holds the lock, and cancels to interrupt.

    Args:
        interrupted: after a cancellation, the name of the signal that caused it.

    Raises:
        LaunchError: failed or late; everything was rolled back.
        InterruptedLaunch: cancelled; everything was rolled back.
    """
    work = _Launch(state, record, emit, wait_timeout_s, reach)
    try:
        return await work.run()
    except BaseException as error:  # whatever it was, nothing may stay behind
        emit(LaunchEvent(stage=Stage.ROLLBACK, subject=record.cluster, state="started"))
        left = await take_down(state, work.record, emit, reach=reach)
        if isinstance(error, anyio.get_cancelled_exc_class()):
            raise _after(InterruptedLaunch, _interruption(interrupted()), None, left) from None
        if isinstance(error, (LaunchError, ClusterError, AgentLost)):
            raise _after(LaunchError, error.message, error.hint, left) from error
        raise


def _interruption(signal_name: str | None) -> str:
    return f"interrupted by {signal_name}" if signal_name else "interrupted"


def _after(
    kind: type[LaunchError] | type[InterruptedLaunch],
    message: str,
    hint: str | None,
    left: tuple[str, ...],
) -> LaunchError | InterruptedLaunch:
    if left:
        return kind(f"{message}; left behind: {'; '.join(left)}", hint="try `pdctl down` again")
    return kind(message, hint=hint)


class _Launch:
    """One launch in progress; `record` is what has been written so far."""

    def __init__(
        self,
        state: StateDir,
        record: ClusterRecord,
        emit: Emit,
        wait_timeout_s: float,
        reach: Reach,
    ) -> None:
        self.state = state
        self.record = record
        self.emit = emit
        self.until_s = monotonic_s() + wait_timeout_s
        self.wait_timeout_s = wait_timeout_s
        plan = record.plan
        self.hosts = {n: reach(record.topology.hosts[n]) for n in plan.agent_ports}
        self.agents: dict[str, AgentClient] = {}
        self.progress = Progress(emit)

    async def run(self) -> ClusterRecord:
        for host in self.hosts.values():
            await self._start_agent(host)
        for replica in sorted(self.record.plan.replicas, key=lambda r: r.role is Role.PREFILL):
            await self.agents[replica.host].start(replica.name)
        for name in self.hosts:
            await self._follow(name, _replicas_ready)
        keeper = self.record.plan.router_host
        await self.agents[keeper].start(ROUTER)
        snapshot = await self._follow(keeper, self._paths_ready)
        await anyio.lowlevel.checkpoint()  # the last moment at which Ctrl-C still rolls back
        url = snapshot.router.url if snapshot.router else None
        self._write(phase="running", url=url)
        return self.record

    async def _start_agent(self, host: RuntimeHost) -> None:
        declared = self.record.topology.hosts[host.name]
        port = self.record.plan.agent_ports[host.name]
        command = Command(
            argv=(
                declared.agent_python or sys.executable,
                *("-m", "pdctl.runtime.agent"),
                *("--state", str(self.state.path)),
                *("--host", host.name),
            ),
            env={RUN_ENV: self.record.run},
        )
        log = self.state.log(f"agent-{host.name}")
        mark = host.spawn(command, log=str(log))
        agents = {**self.record.agents, host.name: AgentRecord(port=port, mark=mark)}
        self._write(agents=agents)
        self._tell(Stage.AGENT, host.name, "starting", pid=mark.pid)
        key = self.state.read_key()
        self.agents[host.name] = AgentClient(host.name, port, self.record.run, key)
        await self._answering(host, mark, log)
        self._tell(Stage.AGENT, host.name, "ready", pid=mark.pid)

    async def _answering(self, host: RuntimeHost, mark: Mark, log: Path) -> None:
        until_s = min(self.until_s, monotonic_s() + AGENT_S)
        while True:
            try:
                await self.agents[host.name].check(timeout_s=2.0)
                return
            except AgentLost as error:
                lost = error
            if not host.alive(mark):
                raise self._failed(f'the agent of host "{host.name}" ended at once', log)
            if monotonic_s() >= until_s:
                raise self._failed(lost.message, log)
            await anyio.sleep(ANSWER_EVERY_S)

    async def _follow(self, host: str, done: Callable[[Snapshot], bool]) -> Snapshot:
        """Waits, from picture to picture, until `done`; fails at the first sign of trouble."""
        version = 0
        while True:
            left_s = self.until_s - monotonic_s()
            try:
                snapshot = await self.agents[host].changes(version, max(0.0, left_s))
            except AgentLost as error:
                raise self._failed(error.message, self.state.log(f"agent-{host}")) from error
            version = snapshot.version
            self.progress.show(snapshot)
            trouble = self.progress.trouble(snapshot)
            if trouble is not None:
                subject, sentence = trouble
                raise self._failed(sentence, self.state.log(subject))
            if done(snapshot):
                return snapshot
            if left_s <= 0:
                waiting = self.progress.waiting(snapshot)
                raise LaunchError(
                    f"not ready within {self.wait_timeout_s:g} s: {waiting}",
                    hint=f"raise --wait-timeout, or look at the logs in {self.state.logs}",
                )

    def _paths_ready(self, snapshot: Snapshot) -> bool:
        plan = self.record.plan
        alone = sum(r.role is Role.BOTH for r in plan.replicas)
        paths = (*snapshot.pairs, *snapshot.replicas)
        enough = len(snapshot.pairs) >= len(plan.pairs) and len(snapshot.replicas) >= alone
        return enough and all(path.state == "ready" for path in paths)

    def _failed(self, sentence: str, log: Path) -> LaunchError:
        for line in last_lines(log, LOG_LINES):
            self._tell(Stage.LOG, log.stem, line)
        return LaunchError(sentence, hint=f"its log is {log}")

    def _write(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self.state.write(self.record)

    def _tell(self, stage: Stage, subject: str, state: str, *, pid: int | None = None) -> None:
        self.emit(LaunchEvent(stage=stage, subject=subject, state=state, pid=pid))


def _replicas_ready(snapshot: Snapshot) -> bool:
    return all(member.state == "ready" for member in snapshot.members)


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log; empty where there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        return file.read().decode("utf-8", "replace").splitlines()[-count:]
    return []
