from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdctl.errors import ClusterError
from pdctl.runtime.cluster import lock

HOLD = (
    "import sys, pathlib\n"
    "from pdctl.runtime.cluster import lock\n"
    "with lock.held(pathlib.Path(sys.argv[1]), 'studio', command='pdctl up studio.toml'):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    """Two `up` at once: the error names command, pid and time; afterwards it is free."""
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ClusterError, match=r"pdctl up studio\.toml") as caught:
            lock.held(path, "studio").__enter__()
        assert f"pid {other.pid}" in caught.value.message
        assert "since" in caught.value.message
        other.communicate("")
    with lock.held(path, "studio"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_killed_holder_frees_it(tmp_path: Path) -> None:
    """A lock file whose holder died by SIGKILL is no obstacle."""
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
        other.wait(10)
    assert path.exists()
    with lock.held(path, "studio"):
        pass
    assert not path.exists()


def test_a_lock_is_released_when_its_block_fails(tmp_path: Path) -> None:
    """An error inside does not keep the lock."""
    path = tmp_path / "lock"
    with pytest.raises(RuntimeError), lock.held(path, "studio"):
        raise RuntimeError
    with lock.held(path, "studio"):
        assert path.exists()


def test_a_removed_lock_file_is_not_mistaken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opened the file just before its holder removed it takes the new file instead."""
    path = tmp_path / "lock"
    removed: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(os.fstat(descriptor).st_ino)
            path.unlink()
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": flock}))
    with lock.held(path, "studio"):
        assert removed
        assert path.exists()
    assert not path.exists()
