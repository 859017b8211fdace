"""Hosts over a real sshd: what leads there, what prevents it, and what is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import sshd
from ports import free_port

from pdctl import __version__
from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.errors import HostError
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.reach import Hosts
from pdctl.runtime.hosts.ssh import Forward
from pdctl.runtime.machine import process
from pdctl.topology.model import Host

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def running() -> Iterator[sshd.Machines]:
    with sshd.machines("gpu1", "gpu2") as machines:
        yield machines


@pytest.fixture
def far(running: sshd.Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[sshd.Machines]:
    """Two machines; whatever a test did, no connection of it is left."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    before = {p.pid for p in ours()}
    known = running.known_hosts.read_text()
    yield running
    running.known_hosts.write_text(known)
    until("no ssh of ours is left", lambda: {p.pid for p in ours()} <= before)
    until("no far end is left", lambda: not any(far_ends(running[n]) for n in ("gpu1", "gpu2")))


def ours() -> list[psutil.Process]:
    """ssh processes below this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name() == "ssh":
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def far_ends(machine: sshd.Machine) -> list[psutil.Process]:
    """Far ends of one machine, and its zombies."""
    found = []
    for one in machine.sessions():
        try:
            words = one.cmdline()
            if "pdctl.runtime.hosts.far_end" in words or one.status() == psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.NoSuchProcess:
            continue
    return found


def until(what: str, condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {WITHIN_S} s: {what}"
        threading.Event().wait(0.02)


def reach(*hosts: Host, **options: object) -> Hosts:
    return Hosts({host.name: host for host in hosts}, **options)  # type: ignore[arg-type]


def refused(host: Host, **options: object) -> HostError:
    """The one error that using this host is."""
    with reach(host, **options) as hosts:
        with pytest.raises(HostError) as caught:
            hosts[host.name].survey.listeners()
        assert not hosts.far(host.name).connected
    error = caught.value
    assert error.message.startswith(f'host "{host.name}": ')
    assert error.exit_code == 4
    assert error.hint
    return error


@pytest.mark.ssh
def test_each_machine_is_itself(far: sshd.Machines) -> None:
    """Homes and state directories are the hosts' own; a host without `ssh` is this one."""
    with reach(far["gpu1"].host(), far["gpu2"].host(), Host(name="local")) as hosts:
        assert isinstance(hosts["local"], LocalHost)
        for name in ("gpu1", "gpu2"):
            facts = hosts[name].survey.facts()
            assert facts.state_home == str(far[name].state_home / "pdctl")
            assert facts.pdctl_version == __version__
            hosts[name].write("~/file", name.encode())
            assert (far[name].home / "file").read_bytes() == name.encode()
        assert set(hosts) == {"gpu1", "gpu2", "local"}


@pytest.mark.ssh
def test_leaving_ends_everything_there_but_what_was_spawned(
    far: sshd.Machines, tmp_path: Path
) -> None:
    """U26: after close no ssh and no far end is left; a spawned process is, in its own session."""
    run = uuid.uuid4().hex
    with reach(far["gpu1"].host()) as hosts:
        mark = hosts["gpu1"].spawn(
            Command(argv=("sleep", "600"), env={RUN_ENV: run}), log=str(tmp_path / "log")
        )
        assert len(ours()) == 1
        assert far_ends(far["gpu1"]) != []
    assert ours() == []
    until("the far end has gone", lambda: far_ends(far["gpu1"]) == [])
    assert process.is_alive(mark)
    assert os.getsid(mark.pid) == mark.pid
    with reach(far["gpu1"].host()) as hosts:
        assert hosts["gpu1"].marked(run) == [mark]
        hosts["gpu1"].signal(mark, signal.SIGKILL)
        until("it has gone", lambda: not hosts["gpu1"].alive(mark))


@pytest.mark.ssh
@pytest.mark.parametrize("form", ["alias", "url", "user@"])
def test_destinations(far: sshd.Machines, form: str) -> None:
    """A name of the configuration, an ssh:// URL with a port, a user before a name."""
    machine = far["gpu1"]
    forms = {"alias": "gpu1", "url": machine.url, "user@": f"{machine.user}@gpu1"}
    with reach(machine.host(ssh=forms[form])) as hosts:
        assert hosts["gpu1"].read("/no-such-file") is None


@pytest.mark.ssh
def test_a_jump_host_leads_on(far: sshd.Machines) -> None:
    """ProxyJump of the user's configuration: two hops, and neither leaves a process."""
    with far.config.open("a") as config:
        config.write(
            f"Host inner\n  HostName 127.0.0.1\n  Port {far['gpu2'].port}\n"
            f"  HostKeyAlias [127.0.0.1]:{far['gpu2'].port}\n  ProxyJump gpu1\n"
        )
    with reach(far["gpu2"].host(ssh="inner")) as hosts:
        facts = hosts["gpu2"].survey.facts()
        assert facts.state_home == str(far["gpu2"].state_home / "pdctl")
        assert len(ours()) == 2
    assert ours() == []


@pytest.mark.ssh
def test_a_users_own_master_is_used_and_left_alone(far: sshd.Machines) -> None:
    """ControlMaster of the user's configuration: no connection of ours, and none becomes one."""
    path = far.folder / "master"
    with far.config.open("a") as config:
        config.write(
            f"Host shared\n  HostName 127.0.0.1\n  Port {far['gpu1'].port}\n  ControlMaster auto\n"
            f"  HostKeyAlias [127.0.0.1]:{far['gpu1'].port}\n  ControlPath {path}\n"
        )
    host = far["gpu1"].host(ssh="shared")
    with reach(host) as hosts:
        assert hosts["gpu1"].read("/no-such-file") is None
    assert not path.exists()
    with subprocess.Popen(["ssh", "-N", "shared"], start_new_session=True) as master:
        until("the master listens", path.exists)
        with reach(host) as hosts:
            assert hosts["gpu1"].read("/no-such-file") is None
            assert len([p for p in far["gpu1"].sessions() if p.name() == "sshd"]) <= 2
        assert master.poll() is None
        master.terminate()


@pytest.mark.ssh
def test_an_unknown_host_is_refused(far: sshd.Machines) -> None:
    """Nobody is trusted for being there first: the hint is to compare its key by hand."""
    far.known_hosts.write_text("")
    error = refused(far["gpu1"].host())
    assert "ssh gpu1 failed: Host key verification failed." in error.message
    assert "compare its key: ssh gpu1" in (error.hint or "")


@pytest.mark.ssh
def test_a_wrong_host_key_is_refused(far: sshd.Machines) -> None:
    """Another machine answers at that address: the hint says what that may mean."""
    first, second = far["gpu1"], far["gpu2"]
    key = second.known_line.split()[2]
    far.known_hosts.write_text(f"[127.0.0.1]:{first.port} ssh-ed25519 {key}\n")
    error = refused(first.host())
    assert "Host key verification failed" in error.message
    assert "somebody may be in between" in (error.hint or "")


@pytest.mark.ssh
def test_a_refused_key_is_refused(far: sshd.Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """No password is asked for: it says that no key was accepted."""
    monkeypatch.delenv("SSH_AUTH_SOCK")
    error = refused(far["gpu1"].host())
    assert "Permission denied (publickey)" in error.message
    assert "ssh-add" in (error.hint or "")


@pytest.mark.ssh
def test_a_host_that_sleeps_is_given_up(far: sshd.Machines) -> None:
    """R6: a listener that never says a word; the time is ssh's ConnectTimeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        started_s = time.monotonic()
        error = refused(Host(name="gpu1", ssh=f"ssh://127.0.0.1:{port}"), connect_timeout_s=1)
        assert time.monotonic() - started_s < WITHIN_S
    assert "timed out" in error.message
    assert "asleep" in (error.hint or "")


@pytest.mark.ssh
def test_a_host_without_sshd_refuses(far: sshd.Machines) -> None:
    """Connection refused: nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    error = refused(Host(name="gpu1", ssh=f"ssh://127.0.0.1:{port}"))
    assert "Connection refused" in error.message
    assert "no sshd listens there" in (error.hint or "")


@pytest.mark.ssh
def test_a_missing_interpreter_is_named(far: sshd.Machines) -> None:
    """The path that the topology gives, as that shell reports it."""
    error = refused(far["gpu1"].host(python="~/no/python"))
    assert "can't run ~/no/python there" in error.message
    assert "hosts.gpu1" in (error.hint or "")


@pytest.mark.ssh
def test_an_interpreter_without_pdctl_is_named(far: sshd.Machines, tmp_path: Path) -> None:
    """It runs, and has no pdctl: the hint is the command that installs this version."""
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    error = refused(far["gpu1"].host(python=python))
    assert f"{python} there ended with exit code 1: " in error.message
    assert f"to gpu1, and there: {python} -m pip install ./" in (error.hint or "")


@pytest.mark.ssh
def test_another_version_there_is_refused(far: sshd.Machines, tmp_path: Path) -> None:
    """Both versions are named."""
    other = tmp_path / "python"
    other.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import pdctl, runpy, sys\n"
        'pdctl.__version__ = "9.9.9"; sys.argv = sys.argv[2:]\n'
        'runpy.run_module("pdctl.runtime.hosts.far_end", run_name="__main__")\' "$@"\n'
    )
    other.chmod(0o755)
    error = refused(far["gpu1"].host(python=str(other)))
    assert "has pdctl 9.9.9" in error.message


@pytest.mark.ssh
def test_a_noisy_shell_does_no_harm(far: sshd.Machines) -> None:
    """~/.bashrc prints at every command; one that ends the shell is shown as what it said."""
    rc = far["gpu1"].home / ".bashrc"
    rc.write_text("echo Welcome to gpu1; echo on stderr >&2; set -o noclobber\n")
    try:
        with reach(far["gpu1"].host()) as hosts:
            assert hosts["gpu1"].run(Command(argv=("echo", "x")), timeout_s=10).stdout == b"x\n"
        rc.write_text("echo closed for today; exit 0\n")
        assert "closed for today" in refused(far["gpu1"].host()).message
    finally:
        rc.unlink()


@pytest.mark.ssh
def test_no_ssh_on_this_machine_is_named(
    far: sshd.Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without OpenSSH's client the hint is to install it."""
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "install the OpenSSH client" in (refused(far["gpu1"].host()).hint or "")


@pytest.mark.ssh
def test_a_cut_connection_fails_what_waits_and_the_next_call_connects(
    far: sshd.Machines,
) -> None:
    """R6: sshd's process of the connection is killed: an error at once, the far end and its
    command end, and the next call works."""
    run = uuid.uuid4().hex
    with reach(far["gpu1"].host()) as hosts:
        host = hosts.far("gpu1")
        told: list[HostError] = []
        host.on_lost = told.append
        host.connect()
        command = Command(argv=("sleep", "600"), env={RUN_ENV: run})
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(host.run, command, timeout_s=600)
            until("it runs", lambda: process.marked(run) != [])
            (end,) = far_ends(far["gpu1"])
            far["gpu1"].cut()
            with pytest.raises(HostError, match="the connection was lost"):
                waiting.result(WITHIN_S)
        assert len(told) == 1
        until("the far end has gone", lambda: not end.is_running())
        until("so has its command", lambda: process.marked(run) == [])
        assert host.read("/no-such-file") is None
        assert host.connected


@pytest.mark.ssh
def test_a_frozen_link_is_noticed_at_both_ends(far: sshd.Machines) -> None:
    """R6: ssh stands still and nobody closes anything. (The times are the connection's own in
    `test_remote`, the lease's in `test_far_end`.) Closing is bounded all the same."""
    with reach(far["gpu1"].host()) as hosts:
        pid = hosts.far("gpu1").connect().pid
        os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
        hosts.close()
        assert time.monotonic() - started_s < WITHIN_S
        assert not psutil.pid_exists(pid)


@pytest.mark.ssh
def test_twenty_calls_at_once_and_fifty_megabytes(far: sshd.Machines) -> None:
    """One connection for all; quick ones come back while 50 MB of a file are on their way."""
    path = far["gpu1"].home / "big"
    content = os.urandom(1 << 20) * 50
    path.write_bytes(content)
    with reach(far["gpu1"].host()) as hosts, concurrent.futures.ThreadPoolExecutor(21) as pool:
        host = hosts["gpu1"]
        big = pool.submit(host.read, str(path), max_bytes=len(content))
        command = Command(argv=("cat",))
        small = [pool.submit(host.run, command, stdin=b"%d" % n, timeout_s=10) for n in range(20)]
        assert [call.result(WITHIN_S).stdout for call in small] == [b"%d" % n for n in range(20)]
        assert big.result(WITHIN_S) == content
        assert len(ours()) == 1
    path.unlink()


@pytest.mark.ssh
def test_forwards_last_as_long_as_the_connection(far: sshd.Machines) -> None:
    """A port of that machine's loopback answers here, anew after a drop, and no more at the
    end; a port that is taken here is one clear error."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here, there = probe.getsockname()[1], server.getsockname()[1]
        forwards = {"gpu1": (Forward(local_port=here, remote_port=there),)}
        host = far["gpu1"].host()
        probe.listen()
        error = refused(host, forwards=forwards)
        assert "ssh gpu1 failed" in error.message
        assert f"bind [127.0.0.1]:{here}: Address already in use" in (error.hint or "")
        probe.close()
        with reach(host, forwards=forwards) as hosts:
            for _ in range(2):
                hosts.far("gpu1").connect()
                assert reaches(here, server)
                lost = hosts.far("gpu1").lost
                far["gpu1"].cut()
                assert lost is not None
                assert lost.wait(WITHIN_S)
        assert not reaches(here, server)


@pytest.mark.ssh
def test_a_forward_is_added_and_cuts_nothing(far: sshd.Machines) -> None:
    """What goes through the connection goes on; the next connection has all that is wanted, and
    not what is wanted no more; one that can't be laid changes nothing; then none is left."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports = [free_port(), free_port()]
        first, second = (
            Forward(local_port=port, remote_port=server.getsockname()[1])
            for port, server in zip(ports, servers, strict=True)
        )
        hosts = stack.enter_context(reach(far["gpu1"].host(), forwards={"gpu1": (first,)}))
        host = hosts.far("gpu1")
        pid = host.connect().pid
        with (
            socket.create_connection(("127.0.0.1", ports[0])) as running,
            servers[0].accept()[0] as accepted,
        ):
            host.forward((first, second))
            assert reaches(ports[1], servers[1])
            busy = Forward(local_port=taken.getsockname()[1], remote_port=1)
            with pytest.raises(HostError, match="ssh gpu1 failed"):
                host.forward((first, second, busy))
            accepted.sendall(b"still")
            assert running.recv(5) == b"still"
        assert host.connect().pid == pid
        host.forward((second,))
        lost = host.lost
        far["gpu1"].cut()
        assert lost is not None
        assert lost.wait(WITHIN_S)
        host.connect()
        assert len(ours()) == 1
        assert reaches(ports[1], servers[1])
        assert not reaches(ports[0], servers[0])


@pytest.mark.ssh
def test_a_lost_forward_that_was_added_ends_the_connection(far: sshd.Machines) -> None:
    """So that whoever holds the host connects anew, with all of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = server.getsockname()[1]
        one, two = (Forward(local_port=free_port(), remote_port=there) for _ in range(2))
        with reach(far["gpu1"].host(), forwards={"gpu1": (one,)}) as hosts:
            host = hosts.far("gpu1")
            main = host.connect()
            host.forward((one, two))
            (beside,) = (process for process in ours() if process.pid != main.pid)
            beside.kill()
            assert main.lost.wait(WITHIN_S)
            host.connect()
            assert reaches(one.local_port, server)
            assert reaches(two.local_port, server)


def reaches(port: int, server: socket.socket) -> bool:
    """Whether who dials `port` here arrives at `server`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as dialled:
            server.settimeout(WITHIN_S)
            with server.accept()[0] as accepted:
                accepted.sendall(b"x")
                return dialled.recv(1) == b"x"
    except ConnectionRefusedError:
        return False


@pytest.mark.ssh
def test_a_killed_owner_leaves_nothing_that_is_in_the_way(far: sshd.Machines) -> None:
    """Its ssh lives on while somebody uses a forward; the next owner ends it and has the port."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here, there = probe.getsockname()[1], server.getsockname()[1]
        probe.close()
        script = (
            "import msgspec, sys, pdctl.runtime.hosts.reach as r\n"
            "from pdctl.runtime.hosts.ssh import Forward\n"
            "from pdctl.topology.model import Host\n"
            "host = msgspec.json.decode(sys.argv[1], type=Host)\n"
            f"forwards = {{'gpu1': (Forward(local_port={here}, remote_port={there}),)}}\n"
            "with r.Hosts({'gpu1': host}, forwards=forwards) as hosts:\n"
            "    hosts.far('gpu1').connect(); print('up', flush=True); sys.stdin.read()\n"
        )
        host = far["gpu1"].host()
        argv = [sys.executable, "-c", script, msgspec.json.encode(host).decode()]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"up\n"
            server.settimeout(WITHIN_S)
            with socket.create_connection(("127.0.0.1", here)), server.accept()[0]:
                owner.kill()
                owner.wait()
                assert reaches(here, server)
                forwards = {"gpu1": (Forward(local_port=here, remote_port=there),)}
                with reach(host, forwards=forwards) as hosts:
                    hosts.far("gpu1").connect()
                    assert reaches(here, server)


@pytest.mark.ssh
def test_closing_while_others_connect_and_call(far: sshd.Machines) -> None:
    """Several threads use it, several close it: all end, and nothing is left."""
    hosts = reach(far["gpu1"].host(), far["gpu2"].host())
    names = ("gpu1", "gpu2")
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        command = Command(argv=("sleep", "600"))
        calls = [pool.submit(hosts[name].run, command, timeout_s=600) for name in names * 3]
        until("ssh runs", lambda: len(ours()) == 2)
        for closer in [pool.submit(hosts.close) for _ in range(4)]:
            closer.result(WITHIN_S)
        for call in calls:
            with pytest.raises(HostError, match="closed"):
                call.result(WITHIN_S)
    assert ours() == []


@pytest.mark.ssh
def test_one_host_asks_another(far: sshd.Machines) -> None:
    """`route`: what a host sees of another over its own SSH, or why it sees nothing."""
    far.add("hub", far.environment)
    far.add("bare", {"PATH": far.environment["PATH"]})
    with reach(far["hub"].host(), far["bare"].host()) as hosts:
        assert hosts.far("hub").route(far["gpu2"].host()).state_home == str(
            far["gpu2"].state_home / "pdctl"
        )
        with pytest.raises(HostError, match=r'host "gpu2": ssh gpu2 failed: .*Permission'):
            hosts.far("bare").route(far["gpu2"].host())
