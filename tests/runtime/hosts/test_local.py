from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

import pytest

from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.errors import HostError
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.machine import process


@pytest.fixture
def host() -> RuntimeHost:
    return LocalHost()


def test_the_seam_has_ten_methods_at_most() -> None:
    """What a remote host must also do fits on a screen."""
    methods = [n for n, v in vars(RuntimeHost).items() if callable(v) and not n.startswith("_")]
    assert 0 < len(methods) <= 10
    assert all(hasattr(LocalHost, name) for name in methods)


def test_run_returns_what_the_command_said(host: RuntimeHost) -> None:
    """Exit code, both streams, the added environment, and what stdin held."""
    command = Command(argv=("sh", "-c", 'cat; echo "$X" >&2; exit 3'), env={"X": "added"})
    done = host.run(command, stdin=b"given", timeout_s=10)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"given", b"added\n")


def test_run_past_its_time_kills_the_whole_group(host: RuntimeHost) -> None:
    """R6: a command that does not end is ended, with what it started."""
    run = uuid.uuid4().hex
    command = Command(argv=("sh", "-c", "sleep 600 & sleep 600"), env={RUN_ENV: run})
    with pytest.raises(HostError, match=r"did not end within 0\.3 s"):
        host.run(command, timeout_s=0.3)
    until_s = time.monotonic() + 10
    while host.marked(run) and time.monotonic() < until_s:
        pass
    assert host.marked(run) == []


def test_nothing_inherits_the_actor_key(host: RuntimeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that runs here does not get the key that agents and their callers share."""
    monkeypatch.setenv(process.ACTOR_KEY_ENV, "secret")
    assert b"secret" not in host.run(Command(argv=("env",)), timeout_s=10).stdout


def test_a_missing_program_is_named(host: RuntimeHost) -> None:
    """Foreign errors do not cross the seam: HostError with host and program."""
    with pytest.raises(HostError, match=r'host "local".*no-such-python'):
        host.run(Command(argv=("/no-such-python",)), timeout_s=1)
    with pytest.raises(HostError, match="no-such-python"):
        host.spawn(Command(argv=("/no-such-python",)), log=os.devnull)


def test_a_spawned_process_is_found_signalled_and_gone(host: RuntimeHost, tmp_path: Path) -> None:
    """spawn → alive → marked → signal → gone."""
    run = uuid.uuid4().hex
    mark = host.spawn(Command(argv=("sleep", "600"), env={RUN_ENV: run}), log=str(tmp_path / "log"))
    assert host.alive(mark)
    assert host.marked(run) == [mark]
    host.signal(mark, signal.SIGKILL)
    until_s = time.monotonic() + 10
    while host.alive(mark) and time.monotonic() < until_s:
        pass
    assert host.marked(run) == []


def test_listeners_name_port_process_and_its_start(host: RuntimeHost) -> None:
    """Every listening port of this user comes with its process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = [one for one in host.survey.listeners() if one.port == port]
    assert found.pid == os.getpid()
    assert found.since is not None
    assert found.since <= time.time()


def test_files_are_replaced_whole_and_private(host: RuntimeHost, tmp_path: Path) -> None:
    """write is atomic, 0600, and leaves no trace of its temporary file."""
    path = tmp_path / "record"
    host.write(str(path), b"first")
    host.write(str(path), b"second")
    assert host.read(str(path)) == b"second"
    assert host.read(str(path), max_bytes=3) == b"ond"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["record"]


def test_absent_files_read_as_none_and_are_removed_silently(
    host: RuntimeHost, tmp_path: Path
) -> None:
    """Reading and removing what is not there is no error."""
    assert host.read(str(tmp_path / "absent")) is None
    host.remove(str(tmp_path / "absent"))
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    host.remove(str(tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_others_can_enter_is_refused(host: RuntimeHost, tmp_path: Path) -> None:
    """A new folder is 0700; an open one, a link or a file in its place is a HostError."""
    fresh = tmp_path / "a" / "b"
    host.make_dir(str(fresh))
    host.make_dir(str(fresh))
    assert fresh.stat().st_mode & 0o777 == 0o700
    fresh.chmod(0o755)
    with pytest.raises(HostError, match="open to other users"):
        host.make_dir(str(fresh))
    (tmp_path / "link").symlink_to(fresh)
    with pytest.raises(HostError, match="not a folder of this user"):
        host.make_dir(str(tmp_path / "link"))


def test_a_mark_survives_being_looked_up_again() -> None:
    """The birth of a process does not change between two looks."""
    assert process.mark_of(os.getpid()) == process.mark_of(os.getpid())
    assert process.mark_of(os.getpid()) is not None
    assert sys.platform != "linux" or "-" in str(process.mark_of(os.getpid()))
