"""A remote host over the pipes of a local far end: no sshd is needed for any of this."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ports import free_port
from runtime.clusters import start_agent, sweep, written
from tiny import make_checkpoint

from pdctl import __version__
from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.errors import AgentLost, HostError
from pdctl.runtime.agent.client import RelayedAgent
from pdctl.runtime.hosts.connection import Connection
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.operations import OPERATIONS
from pdctl.runtime.hosts.remote import RemoteHost
from pdctl.runtime.hosts.ssh import Forward
from pdctl.runtime.hosts.survey import Binding, Survey
from pdctl.runtime.hosts.ways import Ways
from pdctl.runtime.machine.boot import boot_id
from pdctl.topology.fingerprint import FingerprintError
from pdctl.topology.model import Host

WITHIN_S = 30.0
DECLARED = Host(name="gpu1", ssh="gpu1")
FAR_END = (sys.executable, "-m", "pdctl.runtime.hosts.far_end", "gpu1")


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script, *FAR_END)


def remote(argv: tuple[str, ...] = FAR_END, **times: float) -> RemoteHost:
    return RemoteHost("gpu1", Ways(lambda _: Connection(DECLARED, argv, **times)))


@pytest.fixture(scope="module")
def far() -> Iterator[RemoteHost]:
    """Connected by whoever comes first; each test leaves it usable."""
    host = remote()
    yield host
    host.close()


def pid_of(host: RemoteHost) -> int:
    return host.connect().pid


def gone(pid: int) -> bool:
    until_s = time.monotonic() + WITHIN_S
    while psutil.pid_exists(pid):
        if time.monotonic() > until_s:
            return False
    return True


def children_of(pid: int) -> list[psutil.Process]:
    """Once there are any."""
    until_s = time.monotonic() + WITHIN_S
    while not (found := psutil.Process(pid).children()):
        assert time.monotonic() < until_s
    return found


def test_every_method_of_a_host_and_its_survey_has_an_operation() -> None:
    """The table is the seam: nothing of it is missing far away."""
    methods = {n for n, v in vars(RuntimeHost).items() if callable(v) and n[0] != "_"}
    questions = {f"survey.{n}" for n, v in vars(Survey).items() if callable(v) and n[0] != "_"}
    assert methods | questions | {"relay", "route"} == set(OPERATIONS)
    assert all(hasattr(RemoteHost, name) for name in methods)


def test_a_connection_is_made_at_first_use_and_measured() -> None:
    """Nothing runs before; then the way, the difference of clocks and the boot are known."""
    far = remote()
    assert not far.connected
    assert far.boot is None
    assert far.round_trip_s is None
    assert far.read("/no-such-file") is None
    assert far.connected
    assert far.round_trip_s is not None
    assert 0 < far.round_trip_s < 5
    assert far.clock_offset_s is not None
    assert abs(far.clock_offset_s) < 5
    assert far.boot == boot_id()
    far.close()


def test_processes_there(far: RemoteHost, tmp_path: Path) -> None:
    """run, spawn, marked, alive, signal: as on this machine."""
    done = far.run(Command(argv=("sh", "-c", "cat; exit 3")), stdin=b"given", timeout_s=10)
    assert (done.returncode, done.stdout) == (3, b"given")
    run = uuid.uuid4().hex
    command = Command(argv=("sleep", "600"), env={RUN_ENV: run})
    mark = far.spawn(command, log=str(tmp_path / "log"))
    assert far.marked(run) == [mark]
    assert far.alive(mark)
    far.signal(mark, signal.SIGKILL)
    assert gone(mark.pid)
    assert not far.alive(mark)


def test_files_there(far: RemoteHost, tmp_path: Path) -> None:
    """make_dir, write, read, remove: as on this machine, and 5 MB are no matter."""
    folder = tmp_path / "folder"
    far.make_dir(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    content = os.urandom(5 << 20)
    far.write(str(folder / "file"), content)
    assert far.read(str(folder / "file"), max_bytes=len(content)) == content
    assert far.read(str(folder / "file"), max_bytes=3) == content[-3:]
    far.remove(str(folder))
    assert far.read(str(folder / "file")) is None


def test_errors_keep_their_class_message_and_hint(far: RemoteHost, tmp_path: Path) -> None:
    """A HostError there is a HostError here, by the name that the topology has."""
    with pytest.raises(HostError, match=r'host "gpu1": can\'t run /no-such') as caught:
        far.run(Command(argv=("/no-such",)), timeout_s=1)
    assert "names the interpreter" in (caught.value.hint or "")
    with pytest.raises(HostError, match=r"did not end within 0\.2 s"):
        far.run(Command(argv=("sleep", "600")), timeout_s=0.2)


@pytest.mark.parametrize("encrypt", [False, True])
def test_the_survey_travels(encrypt: bool, far: RemoteHost, tmp_path: Path) -> None:
    """Facts, a checkpoint's problems, bindings, a listener and a dial through it."""
    facts = far.survey.facts()
    assert (facts.pdctl_version, facts.uid) == (__version__, os.getuid())
    read = far.survey.checkpoint(str(tmp_path / "absent"))
    assert read.checkpoint is None
    assert read.problems
    port = free_port()
    bindings = (Binding(subject='replica "p0" data_port', address=("127.0.0.1", port), field=None),)
    assert far.survey.bindings(bindings) == []
    with socket.create_server(("127.0.0.1", port)):
        assert far.survey.bindings(bindings) != []
    address = ("127.0.0.1", port)
    far.survey.answer(address, "token", for_s=10, encrypt=encrypt)
    dialled = LocalHost().survey.dial(address, "token", timeout_s=5, encrypt=encrypt)
    assert dialled.error is None


def test_hashing_there_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress arrives while it hashes, and what is wrong with the files is a FingerprintError."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    far = remote()
    made = make_checkpoint(tmp_path / "m", "llama")
    read = far.survey.checkpoint(str(made))
    assert read.checkpoint is not None
    told: list[tuple[int, int]] = []
    found = far.survey.fingerprint(str(made), read.checkpoint, lambda a, b: told.append((a, b)))
    assert told[-1] == (found.total_bytes, found.total_bytes)
    (made / "model.safetensors").write_bytes(b"short")
    with pytest.raises(FingerprintError, match=r"model\.safetensors"):
        far.survey.fingerprint(str(made), read.checkpoint, lambda a, b: None)
    far.close()


def test_a_reporter_that_fails_ends_the_call_not_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is passed in may raise: whoever waits hears of it, and the next call connects anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    far = remote()
    made = make_checkpoint(tmp_path / "m", "llama")
    read = far.survey.checkpoint(str(made))
    assert read.checkpoint is not None

    def fail(done: int, whole: int) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(HostError, match="unexpected RuntimeError"):
        far.survey.fingerprint(str(made), read.checkpoint, fail)
    assert "no terminal" in caplog.text
    assert far.read("/no-such-file") is None
    far.close()


def test_twenty_calls_at_once_use_one_connection(far: RemoteHost) -> None:
    """They share one attempt to connect, and none waits for another."""
    command = Command(argv=("sh", "-c", "echo $PPID"))
    gate = threading.Barrier(20)

    def call(_: int) -> bytes:
        gate.wait(WITHIN_S)
        return far.run(command, timeout_s=10).stdout

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = set(pool.map(call, range(20)))
    assert answers == {b"%d\n" % pid_of(far)}


def test_a_connection_killed_in_mid_call_fails_it_and_the_next_call_connects(
    far: RemoteHost,
) -> None:
    """R6: who waits hears of it at once; the owner is told once; the next use connects anew."""
    told: list[HostError] = []
    far.on_lost = told.append
    far.connect()
    lost = far.connect().lost
    before = pid_of(far)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(far.run, Command(argv=("sleep", "600")), timeout_s=600)
        sleeping = children_of(before)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(HostError, match=r'host "gpu1": the connection was lost'):
            waiting.result(WITHIN_S)
    assert lost.wait(WITHIN_S)
    assert not far.connected
    assert gone(before)
    assert far.run(Command(argv=("true",)), timeout_s=10).returncode == 0
    assert pid_of(far) != before
    assert len(told) == 1
    for child in sleeping:
        child.kill()


def test_a_far_end_that_fell_silent_is_given_up() -> None:
    """R6: nothing was closed, nothing comes: the call fails within the silence that is allowed."""
    far = remote(silence_s=0.6)
    pid = pid_of(far)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(HostError, match=r"nothing was heard for 0.6 s"):
        far.survey.listeners()
    assert gone(pid)
    far.close()


def test_patience_ends_before_the_connection(far: RemoteHost) -> None:
    """A call that takes too long is one error; the connection stays."""
    connection = far.connect()
    command = Command(argv=("sleep", "600"))
    with pytest.raises(HostError, match=r"no answer to run within 0\.2 s"):
        connection.call("run", command, b"", 600.0, patience_s=0.2)
    assert far.survey.listeners() is not None
    assert far.connect() is connection


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (shell("echo oops >&2; exit 255"), "ssh gpu1 failed: oops"),
        (shell("exit 127"), "can't run python3 there"),
        (shell("echo No module named pdctl >&2; exit 1"), "exit code 1: No module named pdctl"),
        (shell("echo This account is not available."), "This account is not available."),
        (shell("yes"), "more than 64 KiB of something else"),
        (("/no-such-ssh",), "can't run ssh on this machine"),
    ],
)
def test_no_far_end_is_one_clear_error(argv: tuple[str, ...], words: str) -> None:
    """Whatever comes instead of a far end: one HostError, at once, and no process is left."""
    far = remote(argv)
    with pytest.raises(HostError, match=r'host "gpu1": ') as caught:
        far.survey.listeners()
    assert words in caught.value.message
    assert caught.value.hint
    assert not far.connected
    far.close()


def test_nothing_in_time_is_an_error() -> None:
    """R6: who never says anything is given up, and ended."""
    started: list[Connection] = []

    def connect(_: tuple[Forward, ...]) -> Connection:
        started.append(Connection(DECLARED, ("sleep", "600"), hello_s=0.3))
        return started[0]

    with pytest.raises(HostError, match="nothing answered in time"):
        RemoteHost("gpu1", Ways(connect)).survey.listeners()
    assert gone(started[0].pid)


def test_a_greeting_before_the_far_end_is_skipped() -> None:
    """A noisy ~/.bashrc does no harm."""
    far = remote(shell('echo "Welcome to gpu1"; echo; exec "$0" "$@"'))
    assert far.run(Command(argv=("echo", "x")), timeout_s=10).stdout == b"x\n"
    far.close()


def test_another_version_there_is_refused(tmp_path: Path) -> None:
    """Both ends are of one version, or nothing is asked."""
    script = "import pdctl, runpy; pdctl.__version__ = '9.9.9'; " + (
        "runpy.run_module('pdctl.runtime.hosts.far_end', run_name='__main__')"
    )
    far = remote((sys.executable, "-c", script))
    with pytest.raises(HostError, match=rf"has pdctl 9\.9\.9, this is {__version__}") as caught:
        far.survey.listeners()
    assert "to gpu1, and there: python3 -m pip install ./" in (caught.value.hint or "")
    far.close()


@pytest.mark.parametrize("argv", [FAR_END, shell("sleep 600")])
def test_closing_ends_everything_whoever_is_at_it(argv: tuple[str, ...]) -> None:
    """Eight closers while calls wait, connected or connecting: all end, nothing is left, and
    later use is refused."""
    started: list[Connection] = []
    ready = threading.Event()

    def connect(_: tuple[Forward, ...]) -> Connection:
        started.append(Connection(DECLARED, argv))
        ready.set()
        return started[-1]

    far = RemoteHost("gpu1", Ways(connect))
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        calls = [
            pool.submit(far.run, Command(argv=("sleep", "600")), timeout_s=600) for _ in range(2)
        ]
        assert ready.wait(WITHIN_S)
        closers = [pool.submit(far.close) for _ in range(8)]
        for closer in closers:
            closer.result(WITHIN_S)
        for call in calls:
            with pytest.raises(HostError, match="closed"):
                call.result(WITHIN_S)
    assert len(started) == 1
    assert gone(started[0].pid)
    with pytest.raises(HostError, match="closed"):
        far.survey.listeners()


def test_the_agent_there_is_asked_by_relay(tmp_path: Path) -> None:
    """A real agent, its port known only to its own host: answers, a KeyError, and who is lost."""
    with written(tmp_path) as (state, record):
        started = start_agent(state, record)
        declared = Host(name="local", ssh="x")
        far = RemoteHost("local", Ways(lambda _: Connection(declared, (*FAR_END[:-1], "local"))))
        try:
            agent = RelayedAgent("local", record.run, far, str(state.path))
            asyncio.run(_converse(agent))
            LocalHost().signal(started.agents["local"].mark, signal.SIGKILL)
            with pytest.raises(AgentLost, match='the agent of host "local"'):
                asyncio.run(agent.check(2.0))
            absent = RelayedAgent("local", record.run, far, str(tmp_path / "absent"))
            with pytest.raises(AgentLost, match="no agent was launched"):
                asyncio.run(absent.check())
        finally:
            far.close()
            sweep(record)


async def _converse(agent: RelayedAgent) -> None:
    until_s = time.monotonic() + WITHIN_S
    while True:
        try:
            await agent.check()
            break
        except AgentLost:
            assert time.monotonic() < until_s
    snapshot = await agent.snapshot()
    assert {member.name for member in snapshot.members} == {"p0", "d0"}
    later = await asyncio.gather(*(agent.changes(0) for _ in range(8)))
    assert all(one.run == snapshot.run for one in later)
    with pytest.raises(KeyError):
        await agent.stop("nobody", 1.0)


def test_a_relay_never_waits_in_the_callers_thread() -> None:
    """Connecting takes as long as it takes, beside; a failure is in the future."""
    far = remote(shell("read x; exit 255"))
    answer = far.relay("/state", "describe", [], 1.0)
    assert not answer.done()
    far.close()
    with pytest.raises(HostError):
        answer.result(WITHIN_S)


def test_a_cancelled_relay_does_no_harm(far: RemoteHost) -> None:
    """Its answer comes to nobody; the connection goes on."""
    far.connect()
    answer = far.relay("/no-such", "describe", [], 1.0)
    answer.cancel()
    assert far.survey.listeners() is not None
    assert far.connected
