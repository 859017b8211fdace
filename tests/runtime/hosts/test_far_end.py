"""The far end itself, over two pipes: what it says, and when it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdctl import __version__
from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.runtime.hosts import wire
from pdctl.runtime.hosts.operations import pack
from pdctl.runtime.machine import process

WITHIN_S = 30.0


class Pipe:
    """A far end, spoken to in frames."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdctl.runtime.hosts.far_end", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.noise = b""
        self._incoming = wire.Incoming()
        self._found: list[Any] = []
        opening = wire.Opening()
        after = None
        while after is None:
            after = opening.feed(os.read(self.stdout.fileno(), 1 << 16))
        self.noise = opening.noise
        self._found += self._incoming.feed(after)

    def send(self, *messages: wire.Message) -> None:
        self.stdin.write(b"".join(wire.encode(message) for message in messages))
        self.stdin.flush()

    def next(self) -> Any:
        while not self._found:
            assert select.select([self.stdout], [], [], WITHIN_S)[0], "nothing comes"
            chunk = os.read(self.stdout.fileno(), 1 << 16)
            assert chunk, "it ended"
            self._found += self._incoming.feed(chunk)
        return self._found.pop(0)

    def end(self) -> int:
        self.stdin.close()
        return self.process.wait(WITHIN_S)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    far = Pipe("gpu1")
    with far.process:
        yield far
        far.process.kill()


@pytest.fixture(scope="module")
def shared() -> Iterator[Pipe]:
    """One that has said Hello, for what leaves it as it was."""
    far = Pipe("gpu1")
    assert isinstance(far.next(), wire.Hello)
    with far.process:
        yield far
        far.process.kill()


def ask(operation: str, *arguments: object, request: int = 1) -> wire.Request:
    return wire.Request(id=request, operation=operation, body=pack(arguments))


def children_with(run: str) -> list[int]:
    return [mark.pid for mark in process.marked(run)]


def wait_for(run: str, count: int) -> list[int]:
    until_s = time.monotonic() + WITHIN_S
    while len(found := children_with(run)) != count:
        assert time.monotonic() < until_s, f"{len(found)} processes, not {count}"
    return found


def test_it_introduces_itself_and_ends_with_its_input(pipe: Pipe) -> None:
    """Hello comes unasked; the end of stdin is the end of it, with code 0."""
    hello = pipe.next()
    assert isinstance(hello, wire.Hello)
    assert (hello.pdctl_version, hello.uid) == (__version__, os.getuid())
    assert pipe.noise == b""
    assert pipe.end() == 0


def test_it_answers_many_requests_at_once(pipe: Pipe) -> None:
    """A slow one does not hold up a quick one, nor a ping."""
    pipe.next()
    sleeping = Command(argv=("sleep", "600"))
    pipe.send(
        ask("run", sleeping, b"", 600.0, request=1),
        ask("survey.listeners", request=2),
        wire.Ping(seq=9),
    )
    assert {type(message).__name__ for message in (pipe.next(), pipe.next())} == {"Answer", "Pong"}


def test_what_it_runs_ends_with_it_and_what_it_spawned_does_not(pipe: Pipe, tmp_path: Path) -> None:
    """U26: a command under way dies with the connection; a detached process lives on."""
    pipe.next()
    run, spawned = uuid.uuid4().hex, uuid.uuid4().hex
    pipe.send(
        ask("run", Command(argv=("sleep", "600"), env={RUN_ENV: run}), b"", 600.0, request=1),
        ask(
            *("spawn", Command(argv=("sleep", "600"), env={RUN_ENV: spawned})),
            str(tmp_path / "log"),
            request=2,
        ),
    )
    assert pipe.next().id == 2
    wait_for(run, 1)
    assert pipe.end() == 0
    wait_for(run, 0)
    (left,) = wait_for(spawned, 1)
    assert os.getsid(left) == left
    os.kill(left, signal.SIGKILL)


def test_an_ended_child_is_no_zombie(shared: Pipe, tmp_path: Path) -> None:
    """What it spawned is reaped while it lives."""
    shared.send(ask("spawn", Command(argv=("true",)), str(tmp_path / "log")))
    shared.next()
    far = psutil.Process(shared.process.pid)
    until_s = time.monotonic() + WITHIN_S
    while far.children():
        assert time.monotonic() < until_s


def test_it_ends_when_nothing_comes_though_the_pipe_stays() -> None:
    """R6: its lease ends it where the link died and nobody closed anything."""
    far = Pipe("gpu1", "0.5")
    with far.process:
        assert far.process.wait(WITHIN_S) == 0
        far.stdin.close()


def test_sigterm_ends_it_and_what_it_runs(pipe: Pipe) -> None:
    """A killed session leaves no command behind."""
    pipe.next()
    run = uuid.uuid4().hex
    pipe.send(ask("run", Command(argv=("sleep", "600"), env={RUN_ENV: run}), b"", 600.0))
    wait_for(run, 1)
    pipe.process.terminate()
    assert pipe.process.wait(WITHIN_S) == 128 + signal.SIGTERM
    wait_for(run, 0)


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
def test_garbage_ends_it(pipe: Pipe, raw: bytes) -> None:
    """Bytes that are no request: it says so on stderr, and ends with code 1."""
    pipe.next()
    pipe.stdin.write(raw)
    pipe.stdin.flush()
    assert pipe.process.wait(WITHIN_S) == 1
    assert pipe.process.stderr is not None
    assert b"a frame" in pipe.process.stderr.read()


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (ask("run", Command(argv=("/no-such",)), b"", 1.0), "HostError", 'host "gpu1": can\'t run'),
        (ask("make_dir", "/dev/null/x"), "HostError", 'host "gpu1": /dev/null/x'),
        (ask("relay", "/no-such", "describe", [], 1.0), "AgentLost", "no agent was launched"),
        (ask("alive", "no mark"), "ValidationError", "unexpected ValidationError"),
        (ask("no_such"), "KeyError", "no_such"),
    ],
)
def test_a_failure_travels_and_ends_nothing(
    shared: Pipe, request_: wire.Request, kind: str, words: str
) -> None:
    """Each is an answer to its request; the next one is served all the same."""
    shared.send(request_)
    failure = shared.next()
    assert isinstance(failure, wire.Failure)
    assert failure.kind == kind
    assert words in failure.message
    shared.send(wire.Ping(seq=1))
    assert isinstance(shared.next(), wire.Pong)


def test_what_prints_there_does_not_reach_the_frames(shared: Pipe) -> None:
    """Its stdin and stdout are nobody else's: a command there reads nothing, and descriptor 1
    is stderr."""
    far = psutil.Process(shared.process.pid)
    if sys.platform == "linux":
        assert os.readlink(f"/proc/{far.pid}/fd/0") == os.devnull
        assert os.readlink(f"/proc/{far.pid}/fd/1") == os.readlink(f"/proc/{far.pid}/fd/2")
    shared.send(ask("run", Command(argv=("cat",)), b"", 5.0))
    assert isinstance(shared.next(), wire.Answer)
