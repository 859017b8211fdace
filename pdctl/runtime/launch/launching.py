"""`up`: the keeper, its other hosts' agents, replicas, the router, a canary through every path.

Whatever ends it early (a failure, a deadline, Ctrl-C, SIGTERM, SIGHUP) ends everything that
was started, and proves it, before anybody is told.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from pdctl.errors import (
    AgentLost,
    ClusterError,
    HostError,
    InterruptedLaunch,
    LaunchError,
    PdctlError,
)
from pdctl.runtime.agent.client import AgentCalls
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.view import Snapshot
from pdctl.runtime.checks.validation import Validation
from pdctl.runtime.cluster.keeper import agent_of, in_thread, this_machine
from pdctl.runtime.cluster.placement import deposit, placement, start_agent
from pdctl.runtime.cluster.state import AgentRecord, ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import Mark, RuntimeHost
from pdctl.runtime.launch.events import Emit, LaunchEvent, Stage
from pdctl.runtime.launch.progress import Progress
from pdctl.runtime.launch.teardown import take_down
from pdctl.topology.model import Role
from pdctl.trace import monotonic_s

AGENT_S = 30.0
"""From an agent's start to its first answer."""
ANSWER_EVERY_S = 0.1
LOG_LINES = 20


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
    hosts: Mapping[str, RuntimeHost] | None = None,
) -> ClusterRecord:
    """Launches what `prepare` wrote. The caller holds the lock, and cancels to interrupt.

    Args:
        interrupted: after a cancellation, the name of the signal that caused it.
        hosts: the way to every host of the plan; None: all of them are this machine.

    Raises:
        LaunchError: failed or late; everything was rolled back.
        InterruptedLaunch: cancelled; everything was rolled back.
    """
    hosts = hosts or this_machine(record)
    work = _Launch(state, record, emit, wait_timeout_s, hosts)
    try:
        return await work.run()
    except BaseException as error:  # whatever it was, nothing may stay behind
        emit(LaunchEvent(stage=Stage.ROLLBACK, subject=record.cluster, state="started"))
        left = await take_down(state, work.record, emit, hosts=hosts)
        if isinstance(error, anyio.get_cancelled_exc_class()):
            raise _after(InterruptedLaunch, _interruption(interrupted()), None, left) from None
        if isinstance(error, (LaunchError, ClusterError, HostError)):
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
        hosts: Mapping[str, RuntimeHost],
    ) -> None:
        self.state = state
        self.record = record
        self.emit = emit
        self.until_s = monotonic_s() + wait_timeout_s
        self.wait_timeout_s = wait_timeout_s
        self.hosts = hosts
        self.progress = Progress(emit)

    async def run(self) -> ClusterRecord:
        keeper = await self._start_keeper()
        await self._follow(keeper, _hosts_ready)
        for replica in sorted(self.record.plan.replicas, key=lambda r: r.role is Role.PREFILL):
            await keeper.start(replica.name)
        await self._follow(keeper, _replicas_ready)
        await keeper.start(ROUTER)
        snapshot = await self._follow(keeper, self._paths_ready)
        await anyio.lowlevel.checkpoint()  # the last moment at which Ctrl-C still rolls back
        url = snapshot.router.url if snapshot.router else None
        self._write(phase="running", url=url)
        return self.record

    async def _start_keeper(self) -> AgentCalls:
        """The agent of the router's host; it starts the others itself."""
        host = self.hosts[self.record.plan.router_host]
        declared = self.record.topology.hosts[host.name]
        place = await in_thread(placement, host, self.record, self.state)
        key = self.state.read_key()
        if declared.ssh is not None:
            api_key = self.state.read_api_key()
            await in_thread(partial(deposit, host, place, self.record, key=key, api_key=api_key))
        log = place.log(f"agent-{host.name}")
        start = partial(start_agent, host, declared, self.record, state=place.state, log=log)
        mark = await in_thread(start)
        port = self.record.plan.agent_ports[host.name]
        self._write(agents={host.name: AgentRecord(port=port, mark=mark)})
        self._tell(Stage.AGENT, host.name, "starting", pid=mark.pid)
        keeper = await agent_of(host.name, self.state, self.record, self.hosts)
        await self._answering(keeper, host, mark)
        self._tell(Stage.AGENT, host.name, "ready", pid=mark.pid)
        return keeper

    async def _answering(self, keeper: AgentCalls, host: RuntimeHost, mark: Mark) -> None:
        until_s = min(self.until_s, monotonic_s() + AGENT_S)
        log = f"agent-{host.name}"
        while True:
            try:
                await keeper.check(timeout_s=2.0)
                return
            except AgentLost as error:
                lost = error
            if not await in_thread(host.alive, mark):
                raise await self._failed(
                    f'the agent of host "{host.name}" ended at once', host.name, log
                )
            if monotonic_s() >= self.until_s:
                raise self._late(lost.message)
            if monotonic_s() >= until_s:
                raise await self._failed(lost.message, host.name, log)
            await anyio.sleep(ANSWER_EVERY_S)

    async def _follow(self, keeper: AgentCalls, done: Callable[[Snapshot], bool]) -> Snapshot:
        """Waits, from picture to picture, until `done`; fails at the first sign of trouble."""
        version = 0
        while True:
            left_s = self.until_s - monotonic_s()
            try:
                snapshot = await keeper.changes(version, max(0.0, left_s))
            except AgentLost as error:
                raise await self._failed(
                    error.message, keeper.host, f"agent-{keeper.host}"
                ) from error
            version = snapshot.version
            self.progress.show(snapshot)
            trouble = self.progress.trouble(snapshot)
            if trouble is not None:
                raise await self._failed(trouble.sentence, trouble.host, trouble.log)
            if done(snapshot):
                return snapshot
            if left_s <= 0:
                raise self._late(self.progress.waiting(snapshot))

    def _late(self, waiting: str) -> LaunchError:
        return LaunchError(
            f"not ready within {self.wait_timeout_s:g} s: {waiting}",
            hint=f"raise --wait-timeout, or look at the logs in {self.state.logs}",
        )

    def _paths_ready(self, snapshot: Snapshot) -> bool:
        plan = self.record.plan
        alone = sum(r.role is Role.BOTH for r in plan.replicas)
        paths = (*snapshot.pairs, *snapshot.replicas)
        enough = len(snapshot.pairs) >= len(plan.pairs) and len(snapshot.replicas) >= alone
        return enough and all(path.state == "ready" for path in paths)

    async def _failed(self, sentence: str, host: str, name: str) -> LaunchError:
        """Shows the end of the log that tells why, wherever it lies."""
        far = self.hosts[host or self.record.plan.router_host]
        try:
            place = await in_thread(placement, far, self.record, self.state)
            raw = await in_thread(far.read, place.log(name)) or b""
        except PdctlError as error:
            return LaunchError(f"{sentence}; its log can't be read: {error.message}")
        for line in raw.decode("utf-8", "replace").splitlines()[-LOG_LINES:]:
            self._tell(Stage.LOG, name, line)
        where = "" if self.record.topology.hosts[far.name].ssh is None else f" on {far.name}"
        return LaunchError(sentence, hint=f"its log is {place.log(name)}{where}")

    def _write(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self.state.write(self.record)

    def _tell(self, stage: Stage, subject: str, state: str, *, pid: int | None = None) -> None:
        self.emit(LaunchEvent(stage=stage, subject=subject, state=state, pid=pid))


def _hosts_ready(snapshot: Snapshot) -> bool:
    return all(host.state == "ready" for host in snapshot.hosts)


def _replicas_ready(snapshot: Snapshot) -> bool:
    """Page stores, too."""
    states = [each.state for each in snapshot.members] + [each.state for each in snapshot.stores]
    return all(state == "ready" for state in states)
