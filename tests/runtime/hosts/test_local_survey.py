"""What this machine says of itself, and trial connections over real sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from ports import free_port
from tiny import make_checkpoint

from pdctl import __version__
from pdctl.errors import HostError
from pdctl.runtime.hosts import facts, trial
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.local_survey import LocalSurvey
from pdctl.runtime.hosts.survey import Binding, HostFacts, Survey
from pdctl.runtime.machine.boot import boot_id
from pdctl.topology.digests import DigestCache
from pdctl.topology.fingerprint import FingerprintError


@pytest.fixture
def survey(tmp_path: Path) -> Iterator[LocalSurvey]:
    it = LocalSurvey("here", cache=DigestCache(tmp_path / "cache"))
    yield it
    it.close()


def free_address() -> tuple[str, int]:
    return "127.0.0.1", free_port()


def listens(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=10):
            return True
    except ConnectionRefusedError:
        return False


def test_facts_are_this_machines(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of this interpreter, the user, the state's place even before it exists."""
    monkeypatch.setenv("XDG_STATE_HOME", "/nowhere/at/all")
    began = time.time()
    found = survey.facts()
    assert found.pdctl_version == __version__
    assert found.python == sys.executable
    assert found.python_version == "{}.{}.{}".format(*sys.version_info)
    assert found.xoscar_version is not None
    assert found.uid == os.getuid()
    assert found.state_home == "/nowhere/at/all/pdctl"
    assert found.boot == survey.facts().boot
    assert began <= found.clock_s <= time.time()
    assert found.memory_free_bytes > 1 << 20
    assert found.disk_free_bytes > 0


def test_another_interpreter_prints_the_same_facts() -> None:
    """`python -m pdctl.runtime.hosts.facts` is one JSON document."""
    raw = subprocess.run(
        (sys.executable, "-m", "pdctl.runtime.hosts.facts"),
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = msgspec.json.decode(raw.stdout, type=HostFacts)
    assert found.boot == boot_id()


def nvidia_smi(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nvidia_devices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes come in MiB; a device that tells none is left out."""
    nvidia_smi(
        tmp_path,
        "echo '0, NVIDIA H200, 143771, 143000'; echo '1, NVIDIA GB10, [N/A], [N/A]'",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (device,) = facts.nvidia_devices()
    assert (device.index, device.name) == (0, "NVIDIA H200")
    assert (device.total_bytes, device.free_bytes) == (143771 << 20, 143000 << 20)


@pytest.mark.parametrize("script", ["exit 9", "echo broken", "sleep 60"])
def test_a_broken_driver_means_no_devices(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: nvidia-smi that fails, babbles or hangs costs no more than its bound."""
    nvidia_smi(tmp_path, script if "sleep" not in script else f"exec {script}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(facts, "DEVICES_S", 0.5)
    assert facts.nvidia_devices() == ()


def test_a_checkpoint_and_its_fingerprint(survey: Survey, tmp_path: Path) -> None:
    """Links are followed for `real_dir`; R55: the second fingerprint reads nothing."""
    made = make_checkpoint(tmp_path / "m", "llama")
    link = tmp_path / "link"
    link.symlink_to(made)
    read = survey.checkpoint(str(link))
    assert (read.model_dir, read.real_dir) == (str(link), str(made.resolve()))
    assert read.checkpoint is not None
    told: list[tuple[int, int]] = []
    first = survey.fingerprint(str(link), read.checkpoint, lambda a, b: told.append((a, b)))
    assert told[-1] == (first.total_bytes, first.total_bytes)
    assert survey.fingerprint(str(made), read.checkpoint, lambda a, b: None).read_bytes == 0
    (made / "model.safetensors").write_bytes(b"short")
    with pytest.raises(FingerprintError, match=r"model\.safetensors"):
        survey.fingerprint(str(made), read.checkpoint, lambda a, b: None)
    assert survey.checkpoint(str(tmp_path / "absent")).problems


def test_home_is_expanded(survey: Survey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is that host's home."""
    make_checkpoint(tmp_path / "m", "llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    read = survey.checkpoint("~/m")
    assert read.model_dir == str(tmp_path / "m")
    assert read.problems == ()


def test_bindings_name_what_is_taken_and_leave_nothing(survey: Survey) -> None:
    """U25: a taken port is named with its process; a free one is free afterwards."""
    free = free_address()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = (
            Binding(subject="a", address=free, field=None),
            Binding(subject="b", address=taken.getsockname(), field="f", replica="r"),
        )
        (found,) = survey.bindings(wanted)
    assert found.code == "host.port_busy"
    assert f"(pid {os.getpid()})" in found.summary
    assert (found.field, found.replica) == ("f", "r")
    assert not listens(free)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_right_dialler_is_answered(host: str, survey: Survey) -> None:
    """R59: IPv4, IPv6 and names; the port is free again when the dialler returns."""
    address = (host, free_port())
    survey.answer(address, "token", for_s=30)
    found = survey.dial(address, "token", timeout_s=10, measure_bytes=8 << 20)
    assert found.error is None
    assert found.resolved in ("127.0.0.1", "::1")
    assert found.round_trip_s is not None
    assert 0 < found.round_trip_s < 10
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 0
    assert not listens(address)


def test_every_address_of_a_name_is_tried(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a receiver does: a name whose first address is closed still leads to the second."""
    address = free_address()
    survey.answer(address, "token", for_s=30)
    closed = free_address()
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", a) for a in (closed, address)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **options: both)
    found = survey.dial(("both.lan", address[1]), "token", timeout_s=10)
    assert (found.error, found.resolved) == (None, "127.0.0.1")


def test_without_a_measurement_no_speed_is_told(survey: Survey) -> None:
    address = free_address()
    survey.answer(address, "token", for_s=30)
    assert survey.dial(address, "token", timeout_s=10).bytes_per_s is None


WRONG = {"something else listens there", "connection reset by peer"}
"""The second one where it hung up before it had read everything."""


def test_a_trial_under_tls(survey: Survey) -> None:
    """Only who derives the same certificate from the token gets in; the rest is as without."""
    address = free_address()
    survey.answer(address, "token", for_s=30, encrypt=True)
    plain = survey.dial(address, "token", timeout_s=10)
    other = survey.dial(address, "other", timeout_s=10, encrypt=True)
    assert {plain.error, other.error} <= WRONG
    found = survey.dial(address, "token", timeout_s=10, measure_bytes=8 << 20, encrypt=True)
    assert found.error is None
    assert found.round_trip_s is not None
    assert found.bytes_per_s is not None
    assert 0 < found.round_trip_s < 10
    assert found.bytes_per_s > 0
    assert not listens(address)


def test_who_speaks_no_tls_is_something_else(survey: Survey) -> None:
    address = free_address()
    survey.answer(address, "token", for_s=30)
    found = survey.dial(address, "token", timeout_s=10, encrypt=True)
    assert found.connected
    assert found.error in WRONG


def hung_up(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_hung_up_on(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends another token, garbage or nothing gets nothing; the right one still does."""
    monkeypatch.setattr(trial, "HANDSHAKE_S", 1.0)
    address = free_address()
    survey.answer(address, "token", for_s=30)
    wrong = survey.dial(address, "other", timeout_s=10)
    assert wrong.error == "something else listens there"
    with (
        socket.create_connection(address, 10) as silent,
        socket.create_connection(address, 10) as loud,
    ):
        loud.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nAccept: everything at all\r\n\r\n")
        assert hung_up(loud)
        assert survey.dial(address, "token", timeout_s=10).error is None
        assert hung_up(silent)


def test_an_answer_ends_by_itself(survey: Survey) -> None:
    """Nobody came: after `for_s` nothing listens."""
    address = free_address()
    survey.answer(address, "token", for_s=1.0)
    assert listens(address)
    until = time.monotonic() + 10
    while listens(address):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_second_answer_at_one_address_ends_the_first(survey: Survey) -> None:
    address = free_address()
    survey.answer(address, "first", for_s=30)
    survey.answer(address, "second", for_s=30)
    assert survey.dial(address, "second", timeout_s=10).error is None


def test_where_it_cannot_listen_is_said(survey: Survey) -> None:
    """A taken port and an address of another machine are HostErrors that name the host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=f'host "here": port {port} is in use'):
            survey.answer(("127.0.0.1", port), "token", for_s=1)
    with pytest.raises(HostError, match=r"192\.0\.2\.1 is no address of its host"):
        survey.answer(("192.0.2.1", port), "token", for_s=1)


@contextmanager
def mute() -> Iterator[tuple[str, int]]:
    """Accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()
        held: list[socket.socket] = []

        def accept() -> None:
            held.append(server.accept()[0])
            ended.wait(30)

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()
        ended.set()
        thread.join()
        for one in held:
            one.close()


def test_what_fails_while_dialling_is_told_within_its_time(survey: Survey) -> None:
    """R6: refused, unresolvable and mute ends are each a sentence, and bounded."""
    assert survey.dial(free_address(), "t", timeout_s=10).error == "connection refused"
    nowhere = survey.dial(("no-such-host.invalid", 1), "t", timeout_s=10)
    assert nowhere.error == "no-such-host.invalid does not resolve"
    with mute() as address:
        began = time.monotonic()
        found = survey.dial(address, "t", timeout_s=0.3)
        assert found.error == "no answer within 0.3 s"
        assert time.monotonic() - began < 20


def test_a_measurement_is_bounded(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that would take longer than the measurement's time is still measured."""
    monkeypatch.setattr(trial, "MEASURE_S", 0.05)
    address = free_address()
    survey.answer(address, "token", for_s=30)
    began = time.monotonic()
    found = survey.dial(address, "token", timeout_s=20, measure_bytes=1 << 30)
    assert found.error is None
    assert found.bytes_per_s
    assert time.monotonic() - began < 10


def test_the_local_host_has_a_survey() -> None:
    assert json.dumps(LocalHost("gpu").survey.facts().pdctl_version)
