"""Checkpoints for contracts and fingerprints: tiny, random, and made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny import make_checkpoint

from pdctl.topology.digests import DigestCache


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache")
