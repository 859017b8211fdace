"""`pdctl doctor` as a user types it, on this machine."""

from __future__ import annotations

import json
import socket

from cli.shell import Shell


def test_doctor_in_lines_and_as_json(shell: Shell) -> None:
    """Exit code 0; plain lines where stdout is no terminal; the documented JSON."""
    out, err = shell("doctor", shell.file)
    assert "host local: this machine\n" in out
    assert "pair p0>d0: local → local at 127.0.0.1:" in out
    assert "data plane: plain TCP" in out
    assert out.endswith("1 host, 1 pair: all is well\n")
    assert "local: checking ports" in err
    found = json.loads(shell("doctor", shell.file, "--json")[0])
    assert found["format_version"] == "1.0"
    assert (found["fit"], found["cluster"]) == (True, shell.name)
    assert found["pairs"][0]["bytes_per_s"] > 0


def test_a_file_that_is_wrong_is_exit_code_2(shell: Shell) -> None:
    """R52: no host is asked; the JSON has the same shape."""
    shell.edit('role = "decode"', 'role = "decoder"')
    out, err = shell("doctor", shell.file, code=2)
    assert out == ""
    assert "decoder" in err
    found = json.loads(shell("doctor", shell.file, "--json", code=2)[0])
    assert (found["fit"], found["hosts"], found["pairs"]) == (False, [], [])
    assert found["diagnostics"]


def test_a_host_that_is_not_fit_is_exit_code_4(shell: Shell) -> None:
    """U25: the router's port is taken: the error is on stderr, the port in the table. So is a
    sender's data port: nothing is dialled there, and that is said."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as sending,
    ):
        port, data_port = taken.getsockname()[1], sending.getsockname()[1]
        text = shell.file.read_text()
        bound = text.partition('bind = "')[2].partition('"')[0]
        shell.edit(bound, f"127.0.0.1:{port}")
        shell.edit('role = "prefill"', f'role = "prefill"\ndata_port = {data_port}')
        out, err = shell("doctor", shell.file, code=4)
    assert f"{port}, {data_port} can't be listened on" in out
    assert f"error: router: port {port} is in use" in err
    assert f"at 127.0.0.1:{data_port}: not tried: p0 can't listen there" in out
    assert out.endswith("not fit\n")


def test_doctor_of_a_running_cluster(shell: Shell) -> None:
    """By file and by name: its own ports are no clash, and a port beside the data port is
    measured, which is said; afterwards it still answers."""
    shell("up", "-d", shell.file)
    record = shell.record()
    own = record.plan.replica("p0").data_port
    for target in (shell.file, shell.name):
        found = json.loads(shell("doctor", target, "--json")[0])
        assert found["running"]
        assert found["pairs"][0]["port"] != own
        assert f"port {own} is in use by this cluster itself" in found["pairs"][0]["note"]
        assert found["pairs"][0]["bytes_per_s"] > 0
    assert shell.ask().status_code == 200
    shell("down", shell.name)
    shell.assert_down()
