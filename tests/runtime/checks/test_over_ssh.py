"""Validation and doctor over real OpenSSH: two machines, each an sshd of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import free_port
from runtime.checks.pair import pair_text
from runtime.fleet import own_address
from sshd import Machines, machines
from tiny import make_checkpoint

pytestmark = pytest.mark.ssh

PDCTL = Path(sys.executable).with_name("pdctl")
TIMEOUT_S = 90


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """gpu1, studio, and one from which no other is reached; each with the model in its home."""
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")
    with machines() as found:
        for name in ("gpu1", "studio"):
            machine = found.add(name, found.environment)
            shutil.copytree(model, machine.home / "models" / "tiny")
        path = {"PATH": found.environment["PATH"]}
        machine = found.add("keyless", path)
        shutil.copytree(model, machine.home / "models" / "tiny")
        yield found


@pytest.fixture
def address() -> str:
    found = own_address()
    if found is None or found.startswith("127."):
        pytest.skip("this machine has no address beyond loopback")
    return found


def topology(address: str, *, router: str = "local", model: str = "~/models/tiny") -> str:
    return pair_text(
        *("over-ssh", "~/models/tiny"),
        address=address,
        bind=f"127.0.0.1:{free_port()}",
        router=f'host = "{router}"',
        studio="studio",
        python=sys.executable,
        prefill_model=model,
    )


class Pdctl:
    """Runs pdctl as a user of these machines does; nothing of it may stay on them."""

    def __init__(self, far: Machines, folder: Path) -> None:
        self._far = far
        self._file = folder / "topology.toml"
        self._env = {
            **os.environ,
            **far.environment,
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "NO_COLOR": "1",
        }

    def __call__(self, verb: str, text: str) -> tuple[int, Any]:
        self._file.write_text(text)
        done = subprocess.run(
            (str(PDCTL), verb, str(self._file), "--json"),
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def pdctl(far: Machines, tmp_path: Path) -> Pdctl:
    return Pdctl(far, tmp_path)


def told(report: Any) -> list[tuple[str, str]]:
    return [(d["severity"], d["code"]) for d in report["diagnostics"]]


def test_two_machines_are_valid(pdctl: Pdctl, address: str) -> None:
    """Models, environments, fingerprints, ports and the link, all where they will be used."""
    code, report = pdctl("validate", topology(address))
    assert (code, report["valid"]) == (0, True), report


def test_the_link_is_measured(pdctl: Pdctl, address: str) -> None:
    """Doctor dials from one machine to the other, and knows what is on both."""
    code, found = pdctl("doctor", topology(address))
    assert code == 0, found["diagnostics"]
    by_name = {host["name"]: host for host in found["hosts"]}
    for name in ("gpu1", "studio"):
        assert by_name[name]["destination"] == name
        assert by_name[name]["reached_ms"] > 0
        assert by_name[name]["round_trip_ms"] > 0
        assert abs(by_name[name]["clock_offset_s"]) < 1
        assert by_name[name]["engines"][0]["engine_version"]
    (pair,) = found["pairs"]
    assert (pair["prefill_host"], pair["decode_host"]) == ("gpu1", "studio")
    assert (pair["address"], pair["resolved"]) == (address, address)
    assert pair["bytes_per_s"] > 1e6


def test_the_link_may_be_ipv6(pdctl: Pdctl) -> None:
    """R59."""
    found = own_address(socket.AF_INET6)
    if found is None or found == "::1":
        pytest.skip("this machine has no IPv6 address beyond loopback")
    code, report = pdctl("doctor", topology(found))
    assert code == 0, report["diagnostics"]
    assert report["pairs"][0]["resolved"] == found


def test_a_machine_that_is_gone_is_one_error(pdctl: Pdctl, far: Machines, address: str) -> None:
    """Exit code 4; a model that is missing on the other machine is told in the same pass."""
    far["studio"].stop()
    try:
        code, report = pdctl("validate", topology(address, model="~/models/absent"))
    finally:
        far["studio"].start()
    assert code == 4
    assert told(report) == [("error", "host.unreachable"), ("error", "host.model_missing")]
    gone, missing = report["diagnostics"]
    assert 'host "studio"' in gone["summary"]
    assert f"{far['gpu1'].home}/models/absent (on gpu1)" in missing["summary"]


OTHER_VERSION = """#!/bin/sh
exec {python} -c '
import runpy, sys
import pdctl
pdctl.__version__ = "9.9"
sys.argv[0:1] = []
del sys.argv[0]
runpy.run_module("pdctl.runtime.hosts.far_end", run_name="__main__")
' "$@"
"""


def studio(text: str, **fields: str) -> str:
    """The topology with fields of [hosts.studio] replaced."""
    head, table, tail = text.partition("[hosts.studio]\n")
    kept = {"ssh": "studio", "python": sys.executable, **fields}
    lines = "".join(f'{key} = "{value}"\n' for key, value in kept.items())
    return head + table + lines + tail[tail.index("[[replicas]]") :]


@pytest.mark.parametrize("fault", ["refused key", "other version"])
def test_what_prevents_a_host_is_one_error(
    fault: str, pdctl: Pdctl, far: Machines, address: str, tmp_path: Path
) -> None:
    """Whoever says it, ssh or the far end: exit code 4, one error that names the host, with a
    hint; the pair is not dialled, and no connection is left. `test_exit_4` has all others."""
    other = tmp_path / "other"
    other.write_text(OTHER_VERSION.format(python=sys.executable))
    other.chmod(0o755)
    changes, words = {
        "refused key": (
            {"ssh": f"ssh://nobody@127.0.0.1:{far['studio'].port}"},
            "Permission denied",
        ),
        "other version": ({"python": str(other)}, "9.9"),
    }[fault]
    code, found = pdctl("doctor", studio(topology(address), **changes))
    assert (code, told(found)) == (4, [("error", "host.unreachable")])
    error = found["diagnostics"][0]
    assert error["summary"].startswith('host "studio": ')
    assert words in error["summary"]
    assert error["hint"]
    assert found["hosts"][2]["error"] == error["summary"]
    assert found["pairs"][0]["error"] == "host studio can't be reached"
    assert left_on(far) == []


def test_an_engine_that_is_missing_there_is_named(
    pdctl: Pdctl, far: Machines, address: str, tmp_path: Path
) -> None:
    """Exit code 4: the host is fine, the replica's own interpreter has no engine; the hint
    installs it."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    text = topology(address).replace('role = "decode"', f'role = "decode"\npython = "{bare}"')
    code, report = pdctl("validate", text)
    assert (code, told(report)) == (4, [("error", "host.probe")])
    error = report["diagnostics"][0]
    assert error["replica"] == "d0"
    assert "No module named" in error["summary"]
    assert error["summary"].endswith("(on studio)")
    assert f"to studio, and there: {bare} -m pip install './" in error["hint"]
    assert error["hint"].endswith("[mlx]'")


def test_a_data_port_that_is_taken_there_is_named(pdctl: Pdctl, address: str) -> None:
    """U25: by whom, and on which host."""
    with socket.create_server((address, 0)) as taken:
        port = taken.getsockname()[1]
        text = topology(address).replace(
            'role = "prefill"', f'role = "prefill"\ndata_port = {port}'
        )
        code, report = pdctl("validate", text)
    assert (code, told(report)) == (4, [("error", "host.port_busy")])
    assert report["diagnostics"][0]["summary"].endswith("(on gpu1)")
    assert f"(pid {os.getpid()})" in report["diagnostics"][0]["summary"]


def test_the_routers_host_must_reach_the_others(pdctl: Pdctl, address: str) -> None:
    """From there, not from here: its own SSH counts. One that has no key is named."""
    code, report = pdctl("validate", topology(address, router="gpu1"))
    assert code == 0, report
    text = topology(address, router="gpu1").replace('ssh = "gpu1"', 'ssh = "keyless"')
    code, report = pdctl("validate", text)
    assert (code, told(report)) == (4, [("error", "host.route")])
    summary = report["diagnostics"][0]["summary"]
    assert summary.startswith('host "gpu1", where the router runs, can\'t reach host "studio": ')


def test_a_closed_data_plane_is_named(pdctl: Pdctl, address: str, tmp_path: Path) -> None:
    """U30: studio's commands run in a network of their own, from where nothing is reached."""
    if subprocess.run(("unshare", "-n", "true"), capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us make a network namespace")
    walled = tmp_path / "python"
    walled.write_text(f'#!/bin/sh\nexec unshare -n -- {sys.executable} "$@"\n')
    walled.chmod(0o755)
    head, _, tail = topology(address).rpartition(f'python = "{sys.executable}"')
    text = f'{head}python = "{walled}"{tail}'
    code, report = pdctl("validate", text)
    assert (code, told(report)) == (4, [("error", "host.data_plane")])
    found = report["diagnostics"][0]
    assert 'host "studio" can\'t reach host "gpu1" at ' in found["summary"]
    assert found["summary"].endswith("network is unreachable")
    assert "ssh gpu1 'sudo ufw allow " in found["hint"]
    assert f"ssh studio 'nc -vz -w 5 {address} " in found["hint"]


def test_a_full_disk_there_is_an_error(far: Machines, pdctl: Pdctl, address: str) -> None:
    """Exit code 4: nothing can be logged there, so nothing is launched."""
    home = far["gpu1"].state_home
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(home)), capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        code, report = pdctl("validate", topology(address))
    finally:
        subprocess.run(("umount", str(home)), check=True)
    assert (code, told(report)) == (4, [("error", "host.disk_full")])
    assert str(home) in report["diagnostics"][0]["summary"]


def left_on(far: Machines) -> list[str]:
    """Command lines of far ends that still run; they have a moment to end."""
    until = time.monotonic() + 10
    while True:
        found = [
            line
            for name in ("gpu1", "studio")
            for process in far[name].sessions()
            if "far_end" in (line := _command_line(process))
        ]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_nothing_is_left_on_any_machine(pdctl: Pdctl, far: Machines, address: str) -> None:
    """R58: after validate and doctor no process of ours is left there."""
    pdctl("validate", topology(address))
    pdctl("doctor", topology(address))
    assert left_on(far) == []
