"""How a launch and a taking down look: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pdctl.cli import render
from pdctl.runtime.launch.events import LaunchEvent, Stage
from pdctl.trace import monotonic_s

STYLES = {
    "ready": "green",
    "starting": "yellow",
    "canary": "yellow",
    "waiting": "dim",
    "backoff": "red",
    "failed": "bold red",
}
SETTLED = frozenset({"ready", "failed", "backoff"})
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Board:
    """The latest state of each subject, and how long it took to get there."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live
        self._began_s = monotonic_s()
        self._rows: dict[tuple[Stage, str], tuple[LaunchEvent, float]] = {}
        self._lock = threading.Lock()

    def show(self, event: LaunchEvent) -> None:
        """Takes one event; any thread."""
        with self._lock:
            if event.stage is Stage.LOG:
                self._line(f"  {event.subject} | {event.state}")
            elif event.stage is Stage.STOP:
                self._line(f"stopped {event.subject} (pid {event.pid})")
            elif event.stage is Stage.ROLLBACK:
                self._line("rolling back: stopping everything that was started …", "yellow")
            else:
                self._rows[(event.stage, event.subject)] = (event, monotonic_s() - self._began_s)
                self._changed(event)

    def say(self, text: str) -> None:
        with self._lock:
            self._line(text)

    def close(self) -> None:
        """The last picture stays; what follows are lines."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _changed(self, event: LaunchEvent) -> None:
        if self._live is not None:
            self._live.update(self._table())
            return
        detail = f": {event.detail}" if event.detail else ""
        subject = "" if event.subject == event.stage else f" {event.subject}"
        self._line(f"{event.stage.value}{subject} {event.state}{detail}")

    def _line(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(text, style=style or ""))

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        for (stage, subject), (event, at_s) in self._rows.items():
            settled = event.state in SETTLED
            sign: Text | Spinner = Text("✔" if event.state == "ready" else "✘")
            state = Text(event.state, style=STYLES.get(event.state, ""))
            table.add_row(
                sign if settled else Spinner("dots"),
                stage.value,
                subject,
                state,
                f"{at_s:.1f} s",
                Text(event.detail or "", style="dim"),
            )
        return table


@contextmanager
def board() -> Iterator[Board]:
    """Shows events while its block runs."""
    console = render.stderr()
    if not console.is_terminal:
        yield Board(console, None)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield Board(console, live)


class Prefixes:
    """Log lines on stdout, each behind its replica's name, in a colour of its own."""

    def __init__(self, names: list[str]) -> None:
        self._console = render.stdout()
        self._console.soft_wrap = True
        self._width = max(map(len, names), default=0)
        self._styles = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}

    def show(self, name: str, text: str) -> None:
        prefix = Text(f"{name:<{self._width}} | ", style=self._styles.get(name, ""))
        self._console.print(prefix + Text(text), soft_wrap=True)
