"""Whatever makes a host not fit, as it is seen at the terminal: one error, exit code 4, the same
from `validate` and from `up`, and nothing of either is left on any machine."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from runtime.checks.test_over_ssh import (
    OTHER_VERSION,
    PDCTL,
    TIMEOUT_S,
    address,
    far,
    left_on,
    studio,
    topology,
)
from sshd import Machines

pytestmark = pytest.mark.ssh

__all__ = ("address", "far")


class Place(NamedTuple):
    """Where a fault is made."""

    far: Machines
    folder: Path
    address: str
    stack: contextlib.ExitStack

    @property
    def text(self) -> str:
        return topology(self.address)

    def script(self, words: str) -> str:
        """A program on every machine."""
        path = self.folder / "script"
        path.write_text(f"#!/bin/sh\n{words}\n")
        path.chmod(0o755)
        return str(path)

    def known(self, text: str) -> None:
        before = self.far.known_hosts.read_text()
        self.far.known_hosts.write_text(text)
        self.stack.callback(self.far.known_hosts.write_text, before)

    def taken(self, at: str) -> int:
        server = self.stack.enter_context(socket.create_server((at, 0)))
        return int(server.getsockname()[1])


def unknown_host(place: Place) -> str:
    return studio(place.text, ssh="no-such-machine.invalid")


def unknown_host_key(place: Place) -> str:
    place.known(place.far["gpu1"].known_line)
    return place.text


def wrong_host_key(place: Place) -> str:
    where, kind, key = (place.far[n].known_line.split()[i] for n, i in KEY_PARTS)
    place.known(f"{place.far['gpu1'].known_line}{where} {kind} {key}\n")
    return place.text


KEY_PARTS = (("studio", 0), ("gpu1", 1), ("gpu1", 2))


def refused_key(place: Place) -> str:
    return studio(place.text, ssh=f"ssh://nobody@127.0.0.1:{place.far['studio'].port}")


def asleep(place: Place) -> str:
    return studio(place.text, ssh=f"ssh://127.0.0.1:{place.taken('127.0.0.1')}")


def off(place: Place) -> str:
    place.far["studio"].stop()
    place.stack.callback(place.far["studio"].start)
    return place.text


def no_python(place: Place) -> str:
    return studio(place.text, python="~/absent/python")


def no_pdctl(place: Place) -> str:
    return studio(place.text, python=place.script(f'exec {sys.executable} -S -I "$@"'))


def other_version(place: Place) -> str:
    script = OTHER_VERSION.format(python=sys.executable).removeprefix("#!/bin/sh\n")
    return studio(place.text, python=place.script(script))


def no_engine(place: Place) -> str:
    bare = place.script(f'exec {sys.executable} -S -I "$@"')
    return place.text.replace('role = "decode"', f'role = "decode"\npython = "{bare}"')


def no_engine_python(place: Place) -> str:
    return place.text.replace('role = "decode"', 'role = "decode"\npython = "/absent/python"')


def no_model(place: Place) -> str:
    return topology(place.address, model="~/models/absent")


def data_port_taken(place: Place) -> str:
    port = place.taken(place.address)
    return place.text.replace('role = "prefill"', f'role = "prefill"\ndata_port = {port}')


def http_port_taken(place: Place) -> str:
    port = place.taken("127.0.0.1")
    return place.text.replace('role = "decode"', f'role = "decode"\nhttp_port = {port}')


def disk_full(place: Place) -> str:
    home = str(place.far["gpu1"].state_home)
    mount = ("mount", "-t", "tmpfs", "-o", "size=64k", "none", home)
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us mount a small disk")
    place.stack.callback(subprocess.run, ("umount", "-l", home), check=True)
    return place.text


def data_plane_closed(place: Place) -> str:
    """studio's commands run in a network of their own, from where nothing is reached."""
    if subprocess.run(("unshare", "-n", "true"), capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us make a network namespace")
    return studio(place.text, python=place.script(f'exec unshare -n -- {sys.executable} "$@"'))


class Fault(NamedTuple):
    make: Callable[[Place], str]
    sentence: str
    """A regular expression of the whole error."""
    hint: str
    """What is in its hint."""


FAULTS = [
    Fault(
        unknown_host,
        'host "studio": ssh no-such-machine.invalid failed: Could not resolve hostname .*',
        "~/.ssh/config",
    ),
    Fault(
        unknown_host_key,
        r'host "studio": ssh studio failed: Host key verification failed\.',
        "connect once by hand and compare its key: ssh studio",
    ),
    Fault(
        wrong_host_key,
        r'host "studio": ssh studio failed: Host key verification failed\.',
        "remove its old key with `ssh-keygen -R`",
    ),
    Fault(
        refused_key,
        r'host "studio": ssh ssh://nobody@.* failed: nobody@127\.0\.0\.1: Permission denied .*',
        "ssh-copy-id",
    ),
    Fault(asleep, r'host "studio": ssh ssh://127\.0\.0\.1:\d+ failed: .* timed out', "asleep"),
    Fault(off, 'host "studio": ssh studio failed: .* Connection refused', "no sshd listens there"),
    Fault(
        no_python,
        r'host "studio": can\'t run ~/absent/python there: .* No such file or directory',
        "`agent_python` or `python` of hosts.studio",
    ),
    Fault(
        no_pdctl,
        r'host "studio": .* there ended with exit code 1: .*No module named \'pdctl\'\)',
        "to studio, and there: ",
    ),
    Fault(
        other_version,
        r'host "studio": .*/script there has pdctl 9\.9, this is .*',
        "the same version on both: copy ",
    ),
    Fault(
        no_engine,
        r'replica "d0": .*/script can\'t run mlx: .* \(on studio\)',
        "-m pip install './",
    ),
    Fault(
        no_engine_python,
        r'replica "d0": can\'t run /absent/python: No such file or directory \(on studio\)',
        "`python` of the host or the replica",
    ),
    Fault(
        no_model,
        r'replica "p0": there is no directory .*/gpu1/models/absent \(on gpu1\)',
        "copy the checkpoint to gpu1",
    ),
    Fault(
        data_port_taken,
        r'replica "p0" data_port: port \d+ is in use by .* \(pid \d+\) \(on gpu1\)',
        "choose another port",
    ),
    Fault(
        http_port_taken,
        r'replica "d0" http_port: port \d+ is in use by .* \(pid \d+\) \(on studio\)',
        "choose another port",
    ),
    Fault(disk_full, 'host "gpu1": nothing is free on the disk of .*', "free some space"),
    Fault(
        data_plane_closed,
        'pair "p0" → "d0": host "studio" can\'t reach host "gpu1" at .* port .*: network is .*',
        "`ssh studio 'nc -vz -w 5 ",
    ),
]


@pytest.fixture
def place(far: Machines, tmp_path: Path, address: str) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        yield Place(far, tmp_path, address, stack)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.make.__name__)
def test_one_error_and_exit_4(fault: Fault, place: Place) -> None:
    """R58: one sentence that names host and thing, a hint, and nothing left on any machine."""
    file = place.folder / "topology.toml"
    file.write_text(fault.make(place))
    state = place.folder / "state"
    env = {**os.environ, **place.far.environment, "XDG_STATE_HOME": str(state)}
    env |= {"XDG_CACHE_HOME": str(place.folder / "cache"), "NO_COLOR": "1"}
    for verb in ("validate", "up"):
        done = subprocess.run(
            (str(PDCTL), verb, str(file), *(("--detach",) if verb == "up" else ())),
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 4, done.stdout + done.stderr
        told = done.stdout + done.stderr
        (sentence,) = re.findall(r"^error: (.*)", told, re.MULTILINE)
        assert re.fullmatch(fault.sentence, sentence), sentence
        (hint,) = re.findall(r"^hint: (.*)", told, re.MULTILINE)
        assert fault.hint in hint
        assert "Traceback" not in told
        assert left_on(place.far) == []
        assert [path for path in state.rglob("*") if path.is_file()] == []
        for machine in place.far:
            assert [path for path in machine.state_home.rglob("*") if path.is_file()] == []
