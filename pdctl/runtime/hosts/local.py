"""This machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

from pdctl.engines.interface import Command
from pdctl.errors import HostError
from pdctl.runtime.hosts.interface import Completed, Mark, Slice
from pdctl.runtime.hosts.local_survey import LocalSurvey
from pdctl.runtime.hosts.survey import Survey
from pdctl.runtime.machine import process


class LocalHost:
    """A `RuntimeHost` without any connection in between."""

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self.survey: Survey = LocalSurvey(name)

    def run(self, command: Command, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        try:
            child = subprocess.Popen(
                _expanded(command.argv),
                env=process.environment(command),
                cwd=command.cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise self._not_executed(command, error) from error
        with child:
            try:
                out, err = child.communicate(stdin, timeout=timeout_s)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise HostError(
                    f'host "{self.name}": {command.argv[0]} did not end within {timeout_s:g} s'
                ) from error
        return Completed(returncode=child.returncode, stdout=out, stderr=err)

    def spawn(self, command: Command, *, log: str) -> Mark:
        whole = Command(argv=_expanded(command.argv), env=command.env, cwd=command.cwd)
        try:
            child = process.start(whole, log=Path(log).expanduser())
        except OSError as error:
            raise self._not_executed(command, error) from error
        threading.Thread(target=child.wait, name=f"reap-{child.pid}", daemon=True).start()
        return process.mark_of(child.pid) or Mark(pid=child.pid, birth="gone")

    def alive(self, mark: Mark) -> bool:
        return process.is_alive(mark)

    def signal(self, mark: Mark, number: int) -> None:
        process.signal_group(mark, number)

    def marked(self, run: str) -> list[Mark]:
        return process.marked(run)

    def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        try:
            with Path(path).expanduser().open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
                return file.read(max_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(path, error) from error

    def slice(self, path: str, start: int, max_bytes: int) -> Slice:
        try:
            with Path(path).expanduser().open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return Slice(size=size, content=os.pread(file.fileno(), max_bytes, start))
        except FileNotFoundError:
            return Slice(size=0, content=b"")
        except OSError as error:
            raise self._failed(path, error) from error

    def write(self, path: str, content: bytes) -> None:
        target = Path(path).expanduser()
        try:
            descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            raise self._failed(path, error) from error

    def remove(self, path: str) -> None:
        target = Path(path).expanduser()
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(path, error) from error

    def make_dir(self, path: str) -> None:
        target = Path(path).expanduser()
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                target.mkdir(mode=0o700)
            found = target.lstat()
        except OSError as error:
            raise self._failed(path, error) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise HostError(
                f'host "{self.name}": {path} is not a folder of this user',
                hint="remove it, or have its owner remove it",
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise HostError(
                f'host "{self.name}": {path} is open to other users', hint=f"chmod 700 {path}"
            )

    def _not_executed(self, command: Command, error: OSError) -> HostError:
        return HostError(
            f'host "{self.name}": can\'t run {command.argv[0]}: {error.strerror}',
            hint="`python` of the host or the replica names the interpreter to use",
        )

    def _failed(self, path: str, error: OSError) -> HostError:
        return HostError(f'host "{self.name}": {path}: {error.strerror}')


def _expanded(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The program's own `~`; arguments are left to whoever built them."""
    return (os.path.expanduser(argv[0]), *argv[1:])
