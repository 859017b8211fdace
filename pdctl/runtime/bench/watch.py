"""Progress of a sweep: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdctl.runtime.bench.columns import Column
from pdctl.runtime.bench.measure import Observer, Place
from pdctl.runtime.bench.settings import Settings


@contextmanager
def watching(
    console: Console, settings: Settings, columns: int, done: int = 0
) -> Iterator[Observer]:
    """An observer that draws on `console` until the block ends; `done` places are left out."""
    if not console.is_terminal:
        yield Lines(console)
        return
    rounds = settings.num_warmups + settings.num_prompts
    places = len(settings.input_lens) * len(settings.concurrency) - done
    total = rounds * columns * places
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        yield Bar(progress, total)


class Lines:
    """One line per place, one per note: what a log file should hold."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def place(self, place: Place) -> None:
        self._say(_words(place))

    def turn(self, place: Place, column: Column, stage: str) -> None:
        pass

    def done(self, place: Place, column: Column) -> None:
        pass

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar:
    """Turns done of all turns; rounds that are run again do not advance it."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total)
        self._repeating = False

    def place(self, place: Place) -> None:
        self._progress.update(self._task, description=_words(place))

    def turn(self, place: Place, column: Column, stage: str) -> None:
        text = f"{_words(place)}, {column.path}, {stage}"
        self._progress.update(self._task, description=text)

    def done(self, place: Place, column: Column) -> None:
        self._progress.advance(self._task)

    def note(self, sentence: str) -> None:
        self._progress.console.print(sentence, markup=False, highlight=False)


def _words(place: Place) -> str:
    together = f", {place.concurrency} at once" if place.concurrency > 1 else ""
    return f"{place.input_len} tokens{together}"
