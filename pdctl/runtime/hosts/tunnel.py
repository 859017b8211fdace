"""The process that leads to a far end: its pipes, what it says on stderr, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading

from pdctl.runtime.hosts import ssh
from pdctl.runtime.machine import process

END_S = 1.0
"""For it to end by itself, and once it is killed."""
_KEPT_STDERR_BYTES = 8 << 10


class Tunnel:
    """Runs in a session of its own: a terminal's Ctrl-C is for us, not for it.

    Raises:
        OSError: it can't be executed.
    """

    def __init__(self, argv: tuple[str, ...]) -> None:
        environment = {**os.environ, **ssh.ENVIRONMENT}
        environment.pop(process.ACTOR_KEY_ENV, None)
        self._process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._stderr = b""
        self._listener = threading.Thread(target=self._listen, name="stderr", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def descriptors(self) -> tuple[int, int]:
        """Its stdout and stdin, the caller's to close. Once."""
        incoming, outgoing = self._process.stdout, self._process.stdin
        assert incoming is not None
        assert outgoing is not None
        with incoming, outgoing:
            return os.dup(incoming.fileno()), os.dup(outgoing.fileno())

    def said(self) -> str:
        """The last of what came at stderr."""
        return self._stderr.decode(errors="replace")

    def kill(self) -> None:
        """The process and what it started to get there (a jump host's ssh, say)."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self, *, at_once: bool) -> int | None:
        """Waits for its end, bounded; killed at once, or when it does not end by itself.

        Returns:
            Its own exit code; None where it had to be killed.
        """
        returncode: int | None = None
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = self._process.wait(END_S)
        if returncode is None:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._listener.join(END_S)
        return returncode

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream, contextlib.suppress(OSError):
            while chunk := os.read(stream.fileno(), 1 << 12):
                self._stderr = (self._stderr + chunk)[-_KEPT_STDERR_BYTES:]
