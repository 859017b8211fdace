"""What the whole run shares: comparisons of greedy text, reported at its end; no deadlines."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable

import pytest
from agreement import Agreement, report

PROPERTY = "agreement"


def pytest_configure() -> None:
    """Others use the cores, too: how long one of hypothesis' examples takes says nothing. An
    engine's environment has no hypothesis.

    A shell starts what it puts into the background with SIGINT ignored, and so would everything
    be that is interrupted here."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("in company", deadline=None)
        settings.load_profile("in company")


@pytest.fixture
def agreement(record_property: Callable[[str, object], None]) -> Agreement:
    """Compares greedy text; every comparison is in the run's report, and in junit's."""
    return Agreement(lambda found: record_property(PROPERTY, found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    kept = [
        found
        for each in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed"))
        if each.when == "call"
        for name, found in each.user_properties
        if name == PROPERTY
    ]
    if kept:
        terminalreporter.section("greedy text beside an engine alone")
        for line in report(kept):
            terminalreporter.write_line(line)
