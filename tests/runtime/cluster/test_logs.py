from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path

import anyio
import pytest

from pdctl.errors import HostError, UsageError
from pdctl.runtime.cluster.logs import (
    Line,
    Log,
    Selection,
    follow,
    parse_pattern,
    parse_since,
    read,
    sizes,
)
from pdctl.runtime.hosts.interface import Slice
from pdctl.runtime.hosts.local import LocalHost

NOW = datetime(2026, 1, 31, 12, 0, 0)

LOG = """\
before any time
2026-01-31 11:00:00,123 INFO pdctl.agent one
  continued
2026-01-31T11:30:00 INFO two
127.0.0.1 - - "POST /v1/completions"
2026-01-31 11:59:59 three
"""


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, Log]:
    (tmp_path / "p0.log").write_text(LOG)
    (tmp_path / "d0.log").write_bytes(b"only \xff line\n")
    return {name: log(tmp_path / f"{name}.log") for name in ("p0", "d0", "router")}


def log(path: Path) -> Log:
    return Log(host=LocalHost(), path=str(path))


def texts(logs: dict[str, Log], name: str, selection: Selection) -> list[str]:
    return [line.text for line in read(logs, selection) if line.name == name]


def test_every_line_comes_with_its_name(logs: dict[str, Log]) -> None:
    """Whole logs, undecodable bytes replaced, and one that does not exist is empty."""
    assert texts(logs, "p0", Selection()) == LOG.splitlines()
    assert texts(logs, "d0", Selection()) == ["only \N{REPLACEMENT CHARACTER} line"]
    assert texts(logs, "router", Selection()) == []


@pytest.mark.parametrize("count", range(8))
def test_tail_is_of_each_log(logs: dict[str, Log], count: int) -> None:
    """At most so many of the last lines; none for 0."""
    expected = LOG.splitlines()[-count:] if count else []
    assert texts(logs, "p0", Selection(tail=count)) == expected


def test_tail_reads_long_logs_from_their_end(tmp_path: Path) -> None:
    """A log of many blocks gives exactly its last lines."""
    path = tmp_path / "p0.log"
    path.write_text("".join(f"{i} {'x' * 200}\n" for i in range(5000)))
    found = texts({"p0": log(path)}, "p0", Selection(tail=700))
    assert [int(line.split()[0]) for line in found] == list(range(4300, 5000))


def test_since_goes_by_the_times_in_the_lines(logs: dict[str, Log]) -> None:
    """A line without a time belongs to the one before it; those before any time are old."""
    since = datetime(2026, 1, 31, 11, 30)
    assert texts(logs, "p0", Selection(since=since)) == LOG.splitlines()[3:]


def test_grep_and_tail_combine(logs: dict[str, Log]) -> None:
    """The pattern first, then the last of what it found."""
    selection = Selection(tail=1, pattern=re.compile("INFO"))
    assert texts(logs, "p0", selection) == ["2026-01-31T11:30:00 INFO two"]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("10m", NOW - timedelta(minutes=10)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("2d", NOW - timedelta(days=2)),
        ("2026-01-31T11:30", datetime(2026, 1, 31, 11, 30)),
        ("2026-01-31", datetime(2026, 1, 31)),
    ],
)
def test_since_takes_spans_and_times(text: str, moment: datetime) -> None:
    """10m, 2h, 90s, 1d ago, or a local date and time."""
    assert parse_since(text, NOW) == moment


def test_bad_options_are_usage_errors() -> None:
    """What is no time, and what is no regular expression, is named."""
    with pytest.raises(UsageError, match='--since "yesterday"'):
        parse_since("yesterday")
    with pytest.raises(UsageError, match=r'--grep "\["'):
        parse_pattern("[")


@pytest.mark.anyio
async def test_follow_gives_whole_lines_as_they_come(tmp_path: Path) -> None:
    """From now on; a half line waits for its end; a log that starts anew, or only now, is read
    from its start."""
    p0, d0 = tmp_path / "p0.log", tmp_path / "d0.log"
    p0.write_text("old\n")
    seen: list[Line] = []
    wanted: list[tuple[str, str]] = []
    steps = (
        (p0, "a", "half", None),
        (p0, "a", " line\n", ("p0", "half line")),
        (d0, "w", "new log\n", ("d0", "new log")),
        (p0, "w", "anew\n", ("p0", "anew")),
    )
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def collect() -> None:
                async for line in follow({"p0": log(p0), "d0": log(d0)}):
                    seen.append(line)  # noqa: PERF401

            tasks.start_soon(collect)
            await anyio.wait_all_tasks_blocked()
            for path, mode, text, expected in steps:
                with path.open(mode) as file:
                    file.write(text)
                if expected is None:
                    continue
                wanted.append(expected)
                while len(seen) < len(wanted):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                assert [(line.name, line.text) for line in seen] == wanted
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_reading_then_following_misses_and_repeats_nothing(tmp_path: Path) -> None:
    """A line that is written between the two is shown once, by the second."""
    path = tmp_path / "p0.log"
    logs = {"p0": log(path)}
    path.write_text("one\n")
    ends = sizes(logs)
    with path.open("a") as file:
        file.write("two\n")
    assert [line.text for line in read(logs, Selection(), ends)] == ["one"]
    with anyio.fail_after(10):
        async for line in follow(logs, starts=ends):
            assert line.text == "two"
            break


class AwayHost(LocalHost):
    """This machine, behind a connection that is away for a while."""

    away = False

    def slice(self, path: str, start: int, max_bytes: int) -> Slice:
        if self.away:
            raise HostError('host "far": the connection is lost')
        return super().slice(path, start, max_bytes)


@pytest.mark.anyio
async def test_a_host_that_was_away_is_read_on(tmp_path: Path) -> None:
    """It is said once, and lines that were written meanwhile come when it is back."""
    path = tmp_path / "p0.log"
    path.touch()
    host = AwayHost()
    told: list[tuple[str, str]] = []

    def missing(name: str, why: str) -> None:
        told.append((name, why))
        path.write_text("meanwhile\n")
        host.away = False

    logs = {"p0": Log(host=host, path=str(path), far=True)}
    starts = sizes(logs)
    host.away = True
    with anyio.fail_after(10):
        async for line in follow(logs, starts=starts, missing=missing):
            assert line.text == "meanwhile"
            break
    assert told == [("p0", 'host "far": the connection is lost')]
