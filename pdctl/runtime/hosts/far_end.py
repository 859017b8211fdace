"""`python -m pdctl.runtime.hosts.far_end NAME`: does on its machine what comes in at stdin.

A thread per request; the agent is asked in one event loop. It ends with its connection: at the
end of stdin, on SIGTERM or SIGHUP, or when nothing has come for LEASE_S. What it runs ends with
it; what it spawned does not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import platform
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pdctl import __version__
from pdctl.engines.interface import Command
from pdctl.errors import AgentLost, PdctlError
from pdctl.runtime.hosts import wire
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.operations import OPERATIONS, failure, pack, unpack
from pdctl.runtime.hosts.survey import HostFacts
from pdctl.runtime.machine.boot import boot_id
from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.fingerprint import Fingerprint
from pdctl.topology.model import Host
from pdctl.trace import monotonic_s

PROGRESS_EVERY_S = 0.1
_TICK_S = 1.0
_END_S = 1.0


class FarEnd:
    """Reads requests in the calling thread until the end.

    Args:
        incoming, outgoing: descriptors; the second is closed by its writer.
    """

    def __init__(self, name: str, incoming: int, outgoing: int, *, lease_s: float) -> None:
        self._name = name
        self._host = LocalHost(name)
        self._incoming = incoming
        self._lease_s = lease_s
        hello = wire.Hello(
            pdctl_version=__version__,
            python_version=platform.python_version(),
            uid=os.getuid(),
            boot=boot_id(),
        )
        self._out = wire.Outgoing(outgoing, first=wire.MAGIC + wire.encode(hello))
        self._spawned: set[int] = set()
        self._agents = _Agents(name)

    def serve(self) -> None:
        """Returns at the end; then `end` what is still under way."""
        frames = wire.Incoming()
        heard_s = monotonic_s()
        with selectors.DefaultSelector() as selector:
            selector.register(self._incoming, selectors.EVENT_READ)
            while monotonic_s() - heard_s < self._lease_s:
                if not selector.select(min(_TICK_S, self._lease_s / 4)):
                    continue
                chunk = os.read(self._incoming, 1 << 16)
                if not chunk:
                    return
                heard_s = monotonic_s()
                for message in frames.feed(chunk):
                    self._take(message)

    def end(self) -> None:
        """Kills what `run` and the survey have under way; bounded."""
        with contextlib.suppress(psutil.Error):
            children = [c for c in psutil.Process().children() if c.pid not in self._spawned]
            for child in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    leads = os.getpgid(child.pid) == child.pid
                    (os.killpg if leads else os.kill)(child.pid, signal.SIGKILL)
            psutil.wait_procs(children, timeout=_END_S)

    def _take(self, message: wire.Any) -> None:
        if isinstance(message, wire.Ping):
            self._out.send(wire.Pong(seq=message.seq, clock_s=time.time()), wait=False)
        elif isinstance(message, wire.Request):
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        else:
            raise wire.Garbled(f"a {type(message).__name__} from the near end")

    def _answer(self, request: wire.Request) -> None:
        reply: wire.Message
        try:
            answer = self._perform(request)
            reply = wire.Answer(id=request.id, body=pack(answer))
        except Exception as error:  # the process boundary: it travels, whatever it is
            reply = failure(request.id, error)
        with contextlib.suppress(BrokenPipeError):
            self._out.send(reply)

    def _perform(self, request: wire.Request) -> object:
        kind = OPERATIONS[request.operation].arguments
        arguments = unpack(request.body, kind)
        match request.operation:
            case "run":
                command, stdin, timeout_s = arguments
                return self._host.run(command, stdin=stdin, timeout_s=timeout_s)
            case "spawn":
                return self._spawn(*arguments)
            case "read":
                return self._host.read(arguments[0], max_bytes=arguments[1])
            case "relay":
                return self._agents.ask(*arguments)
            case "route":
                return _route(*arguments)
            case name if name.startswith("survey."):
                return self._survey(request.id, name.removeprefix("survey."), arguments)
            case name:
                return getattr(self._host, name)(*arguments)

    def _spawn(self, command: Command, log: str) -> Mark:
        mark = self._host.spawn(command, log=log)
        self._spawned.add(mark.pid)
        return mark

    def _survey(self, request: int, name: str, arguments: tuple[Any, ...]) -> object:
        survey = self._host.survey
        match name:
            case "fingerprint":
                return self._fingerprint(request, *arguments)
            case "answer":
                address, token, for_s, encrypt = arguments
                survey.answer(address, token, for_s=for_s, encrypt=encrypt)
                return None
            case "dial":
                address, token, timeout_s, size, encrypt = arguments
                return survey.dial(
                    *(address, token), timeout_s=timeout_s, measure_bytes=size, encrypt=encrypt
                )
            case _:
                return getattr(survey, name)(*arguments)

    def _fingerprint(self, request: int, model_dir: str, checkpoint: Checkpoint) -> Fingerprint:
        told_s = 0.0

        def tell(done: int, whole: int) -> None:
            nonlocal told_s
            now_s = monotonic_s()
            if now_s - told_s >= PROGRESS_EVERY_S or done == whole:
                told_s = now_s
                with contextlib.suppress(BrokenPipeError):
                    self._out.send(wire.Progress(id=request, done=done, whole=whole))

        return self._host.survey.fingerprint(model_dir, checkpoint, tell)


class _Agents:
    """Asks the agent of this host, in one event loop of its own."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: dict[tuple[int, str, str], Any] = {}

    def ask(self, state_dir: str, method: str, arguments: list[Any], timeout_s: float) -> object:
        """Raises AgentLost where nothing was launched from there, or nobody answers."""
        from pdctl.runtime.agent.client import RELAY_S
        from pdctl.runtime.cluster.state import StateDir

        try:
            state = StateDir(Path(state_dir))
            record = state.read()
            key = state.read_key() if record is not None else ""
        except PdctlError as error:
            raise AgentLost(f'host "{self._host}": {error.message}', hint=error.hint) from error
        if record is None:
            raise AgentLost(f'host "{self._host}": no agent was launched from {state_dir}')
        client = self._client(record.plan.agent_ports[self._host], record.run, key)
        asked = asyncio.run_coroutine_threadsafe(
            client._call(method, *arguments, timeout_s=timeout_s), self._running()
        )
        try:
            return asked.result(timeout_s + 2 * RELAY_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            raise AgentLost(
                f'the agent of host "{self._host}" does not answer (no answer in time)'
            ) from None

    def _client(self, port: int, run: str, key: str) -> Any:
        from pdctl.runtime.agent.client import AgentClient

        with self._lock:
            known = (port, run, key)
            if known not in self._clients:
                self._clients[known] = AgentClient(self._host, port, run, key)
            return self._clients[known]

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
            return self._loop


def _route(declared: Host) -> HostFacts:
    from pdctl.runtime.hosts.reach import Hosts

    with Hosts({declared.name: declared}) as hosts:
        return hosts.far(declared.name).survey.facts()


def _own_pipes() -> tuple[int, int]:
    """Takes stdin and stdout for itself: whatever else prints, prints to stderr, and nothing
    that is started here holds the connection open."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _ending(far_end: FarEnd) -> Callable[[int, object], None]:
    def end(number: int, frame: object) -> None:
        far_end.end()
        os._exit(128 + number)

    return end


def main() -> None:
    """Exits by itself; code 0 at the end of stdin or of the lease, 1 for garbage."""
    name = sys.argv[1] if len(sys.argv) > 1 else "remote"
    lease_s = float(sys.argv[2]) if len(sys.argv) > 2 else wire.LEASE_S
    incoming, outgoing = _own_pipes()
    far_end = FarEnd(name, incoming, outgoing, lease_s=lease_s)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _ending(far_end))
    code = 0
    try:
        far_end.serve()
    except (wire.Garbled, BrokenPipeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        code = 1
    far_end.end()
    sys.stderr.flush()
    os._exit(code)  # threads of requests may hang in what they do


if __name__ == "__main__":
    main()
