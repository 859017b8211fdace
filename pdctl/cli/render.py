"""How things look: errors and warnings on stderr, data on stdout, progress where there is a
terminal and plain lines where there is none. rich honours NO_COLOR."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn
from rich.text import Text

from pdctl.topology.diagnostics import Diagnostic, Report, Severity
from pdctl.topology.sizes import approximate_size

PIPE_COLUMNS = 160
"""Width of tables where stdout is not a terminal."""

_STYLES = {"error": "bold red", "warning": "bold yellow", "hint": "cyan"}
_PLAIN_STEP_BYTES = 1 << 30
"""Without a terminal, hashing says something once per so many bytes."""


class _Heedless:
    """A stream that may lose its reader: what nobody sees any more is dropped.

    Progress is told here, and telling it must never end a launch or a taking down half-way
    (a closed terminal answers every write with EIO, a closed pipe with EPIPE).
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Output(Console):
    """Data: a reader that has gone is the caller's to know, as a BrokenPipeError."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def stderr() -> Console:
    heedless = cast("IO[str]", _Heedless(sys.stderr))
    return Console(file=heedless, stderr=True, highlight=False, markup=False, soft_wrap=True)


def stdout() -> Console:
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return _Output(width=width, highlight=False, markup=False)


def show_error(message: str, hint: str | None) -> None:
    """`error: …`, an empty line, `hint: …`."""
    _labelled(stderr(), "error", message)
    if hint is not None:
        _hint(stderr(), hint)


def show_diagnostics(report: Report) -> None:
    """Every problem with its detail and hint, then how many there were."""
    console = stderr()
    for found in report.diagnostics:
        _show_one(console, found)
    if report.diagnostics:
        errors = counted(report.error_count, "error")
        warnings = counted(report.warning_count, "warning")
        console.print(f"{errors}, {warnings}")


def _show_one(console: Console, found: Diagnostic) -> None:
    label = "error" if found.severity is Severity.ERROR else "warning"
    _labelled(console, label, found.summary)
    for line in (found.detail or "").splitlines():
        console.print(f"  {line}")
    if found.hint is not None:
        _hint(console, found.hint)
    console.print()


def _hint(console: Console, hint: str) -> None:
    console.print()
    _labelled(console, "hint", hint)


def _labelled(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label}:", _STYLES[label]), " ", text))


def counted(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    """One indented JSON document on stdout."""
    body = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(body.decode() + "\n")
    sys.stdout.flush()


class _Size(DownloadColumn):
    """Bytes done and in all; nothing for a row that counts none."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


class Steps:
    """A `Watcher` on stderr: a row per host and per directory on a terminal, else lines."""

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar
        self._lock = threading.Lock()
        self._hosts: dict[str, TaskID] = {}
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, int] = {}

    def step(self, text: str) -> None:
        self._console.print(f"{text} …", style="dim")

    def host(self, name: str, text: str) -> None:
        if self._bar is None:
            self._console.print(f"{name}: {text} …", style="dim")
            return
        with self._lock:
            if name not in self._hosts:
                self._hosts[name] = self._bar.add_task("", total=None)
        self._bar.update(self._hosts[name], description=f"{name}: {text}")

    def hashing(self, model_dir: str, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._say(model_dir, done_bytes, total_bytes)
            return
        with self._lock:
            if model_dir not in self._tasks:
                title = f"hashing {model_dir}"
                self._tasks[model_dir] = self._bar.add_task(title, total=total_bytes)
        self._bar.update(self._tasks[model_dir], completed=done_bytes)

    def _say(self, model_dir: str, done_bytes: int, total_bytes: int) -> None:
        with self._lock:
            step = done_bytes // _PLAIN_STEP_BYTES
            if step <= self._said.get(model_dir, 0):
                return
            self._said[model_dir] = step
        done, total = approximate_size(done_bytes), approximate_size(total_bytes)
        self._console.print(f"{model_dir}: hashed {done} of {total}", style="dim")


@contextmanager
def steps() -> Iterator[Steps]:
    """Shows progress while its block runs."""
    console = stderr()
    if not console.is_terminal:
        yield Steps(console, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Size(binary_units=True))
    with Progress(*columns, console=console, transient=True) as bar:
        yield Steps(console, bar)
