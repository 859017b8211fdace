"""A cluster of doubles per test, driven by `pdctl`; whatever it leaves is swept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.shell import Shell
from runtime.clusters import sweep
from tiny import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture
def shell(tmp_path: Path, model: Path) -> Iterator[Shell]:
    it = Shell(tmp_path, model)
    it.write()
    yield it
    record = it.state.read()
    for one in [*it.records, *([record] if record else [])]:
        sweep(one)
