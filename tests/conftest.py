"""What the whole run shares: comparisons of greedy text, reported at its end."""

from __future__ import annotations

import pytest
from agreement import Agreement

KEPT = pytest.StashKey[Agreement]()


@pytest.fixture(scope="session")
def agreement(pytestconfig: pytest.Config) -> Agreement:
    """Where greedy text was compared, and how it came out."""
    return pytestconfig.stash.setdefault(KEPT, Agreement())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    kept = config.stash.get(KEPT, Agreement())
    if kept.made:
        terminalreporter.section("greedy text beside an engine alone")
        for line in kept.report():
            terminalreporter.write_line(line)
