"""Another machine: every method of a host is one call to its far end."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pdctl.engines.interface import Command
from pdctl.errors import HostError
from pdctl.runtime.hosts.connection import Connection
from pdctl.runtime.hosts.interface import Completed, Mark, Slice
from pdctl.runtime.hosts.remote_survey import PATIENCE_S, RemoteSurvey
from pdctl.runtime.hosts.ssh import Forward
from pdctl.runtime.hosts.survey import HostFacts, Survey
from pdctl.runtime.hosts.ways import Ways
from pdctl.topology.model import Host

ROUTE_S = 90.0
ENDING_S = 5.0
WAIT_FOR_CONNECT_S = 120.0


class RemoteHost:
    """A `RuntimeHost` behind a connection: made at first use, and again after a drop.

    A call in flight when the connection drops is a HostError, and nobody knows whether it
    happened; the next call connects anew. Marks are valid on this host only. Any thread.

    Args:
        ways: start what leads to the far end; the connection is established here.
    """

    def __init__(self, name: str, ways: Ways) -> None:
        self.name = name
        self.survey: Survey = RemoteSurvey(self.connect)
        self.on_lost: Callable[[HostError], None] | None = None
        """Called once per connection that drops by itself, from its own thread."""
        self._ways = ways
        self._lock = threading.Lock()
        self._closed = False
        self._latest: Connection | None = None
        self._attempt: concurrent.futures.Future[Connection] | None = None

    # -- the connection

    @property
    def connected(self) -> bool:
        latest = self._latest
        return latest is not None and latest.round_trip_s is not None and not latest.ending

    @property
    def lost(self) -> threading.Event | None:
        """Set when the connection of this moment has ended; None where there was none yet."""
        return None if self._latest is None else self._latest.lost

    @property
    def boot(self) -> str | None:
        """Of that machine, when the connection of this moment was made; None before the first."""
        return None if self._latest is None else self._latest.boot

    @property
    def round_trip_s(self) -> float | None:
        return None if self._latest is None else self._latest.round_trip_s

    @property
    def clock_offset_s(self) -> float | None:
        """Its clock minus ours."""
        return None if self._latest is None else self._latest.clock_offset_s

    def connect(self) -> Connection:
        """The connection, made where there is none. Callers at the same time share one attempt.

        Raises:
            HostError: why it can't be made.
        """
        with self._lock:
            if self._closed:
                raise HostError(f'host "{self.name}": the connection is closed')
            if self.connected and self._latest is not None:
                return self._latest
            attempt, mine = self._attempt, self._attempt is None
            if attempt is None:
                attempt = self._attempt = concurrent.futures.Future()
        if mine:
            self._try(attempt)
        try:
            return attempt.result(WAIT_FOR_CONNECT_S)
        except TimeoutError:
            raise HostError(f'host "{self.name}": connecting takes too long') from None
        except HostError as error:
            raise HostError(error.message, hint=error.hint) from error

    def _try(self, attempt: concurrent.futures.Future[Connection]) -> None:
        try:
            connection = self._open()
        except BaseException as error:
            with self._lock:
                self._attempt = None
            attempt.set_exception(error)
        else:
            with self._lock:
                self._attempt = None
            attempt.set_result(connection)

    def _open(self) -> Connection:
        before = self._latest
        if before is not None and not before.lost.wait(ENDING_S):
            before.close()  # it may hold the ports of the forwards
        connection = self._ways.main()
        connection.on_lost = self._dropped
        with self._lock:
            closed, self._latest = self._closed, connection
        if closed:
            connection.close()
        connection.establish()
        return connection

    def _dropped(self, cause: HostError) -> None:
        if self.on_lost is not None:
            self.on_lost(cause)

    def close(self) -> None:
        """Ends the connection for good; bounded. No process of it is left. Idempotent."""
        with self._lock:
            self._closed = True
            latest = self._latest
        if latest is not None:
            latest.close()
        self._ways.close()

    def forward(self, wanted: tuple[Forward, ...]) -> None:
        """See `Ways.lay`."""
        self._ways.lay(wanted)

    def _call(self, operation: str, *arguments: object, patience_s: float = PATIENCE_S) -> Any:
        return self.connect().call(operation, *arguments, patience_s=patience_s)

    # -- RuntimeHost

    def run(self, command: Command, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        patience_s = timeout_s + PATIENCE_S
        found: Completed = self._call("run", command, stdin, timeout_s, patience_s=patience_s)
        return found

    def spawn(self, command: Command, *, log: str) -> Mark:
        mark: Mark = self._call("spawn", command, log)
        return mark

    def alive(self, mark: Mark) -> bool:
        return bool(self._call("alive", mark))

    def signal(self, mark: Mark, number: int) -> None:
        self._call("signal", mark, number)

    def marked(self, run: str) -> list[Mark]:
        found: list[Mark] = self._call("marked", run)
        return found

    def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        content: bytes | None = self._call("read", path, max_bytes)
        return content

    def slice(self, path: str, start: int, max_bytes: int) -> Slice:
        part: Slice = self._call("slice", path, start, max_bytes)
        return part

    def write(self, path: str, content: bytes) -> None:
        self._call("write", path, content)

    def remove(self, path: str) -> None:
        self._call("remove", path)

    def make_dir(self, path: str) -> None:
        self._call("make_dir", path)

    # -- what only a far end does

    def relay(
        self, state_dir: str, method: str, arguments: Sequence[object], timeout_s: float
    ) -> concurrent.futures.Future[Any]:
        """Asks the agent there whose state lies in `state_dir`; never waits, connects beside.

        In the future: what the agent returned (msgpack's types), AgentLost where it does not
        answer, KeyError for a name that it does not know, HostError where the way is cut.
        """
        asked = ("relay", state_dir, method, list(arguments), timeout_s)
        latest = self._latest
        if latest is not None and self.connected:
            try:
                return latest.submit(*asked)
            except HostError:
                pass
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        threading.Thread(
            target=self._relay_anew, args=(asked, answer), name=f"connect-{self.name}", daemon=True
        ).start()
        return answer

    def _relay_anew(
        self,
        asked: tuple[str, str, str, list[object], float],
        answer: concurrent.futures.Future[Any],
    ) -> None:
        try:
            inner = self.connect().submit(*asked)
        except HostError as error:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return

        def settle(done: concurrent.futures.Future[Any]) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        inner.add_done_callback(settle)

    def route(self, declared: Host) -> HostFacts:
        """What this host sees of another over its own SSH. HostError where it can't."""
        facts: HostFacts = self._call("route", declared, patience_s=ROUTE_S)
        return facts
