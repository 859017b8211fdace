"""What doctor finds on a fleet: hosts, ports, links over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from ports import free_port
from runtime.checks.pair import pair_text
from runtime.fleet import Fleet, own_ports
from tiny import make_checkpoint

from pdctl import __version__
from pdctl.runtime.checks.doctor import diagnose, exit_code
from pdctl.runtime.checks.findings import Findings
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.outcome import Silent
from pdctl.topology.load import loads
from pdctl.topology.plan import derive


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    own_ports(monkeypatch)
    found = Fleet(tmp_path, "local", "gpu1", "studio")
    found.each(lambda host: host.names.update({"10.0.0.1": "127.0.0.1"}))
    return found


def topology(model: Path, *, data_port: int, encrypt: bool = False) -> str:
    """With d1 beside p0."""
    text = pair_text(
        *("examined", model),
        address="10.0.0.1",
        bind=f"127.0.0.1:{free_port()}",
        router=f"[handoff]\nencrypt = {str(encrypt).lower()}",
        prefill=f"data_port = {data_port}",
    )
    _, table, decode = text.rpartition("[[replicas]]")
    return text + (table + decode).replace("d0", "d1").replace("studio", "gpu1")


Examine = Callable[..., Findings]


@pytest.fixture
def examine(fleet: Fleet) -> Examine:
    def run(text: str, *, runs: bool = False, busy: bool = False) -> Findings:
        declared, found = loads(text)
        assert declared is not None, found
        kept = derive(declared) if runs else None
        done = diagnose(Ground(declared, fleet.hosts, Silent(), kept=kept), [])
        assert busy or fleet.listening() == []
        return done

    return run


def test_a_fleet_that_fits(model: Path, fleet: Fleet, examine: Examine) -> None:
    """Every host with its versions and free things; every pair, far and near, with its round
    trip and its measured speed."""
    fleet["gpu1"].round_trip_s, fleet["gpu1"].clock_offset_s = 0.0015, -0.25
    port = free_port(run=5)
    found = examine(topology(model, data_port=port))
    assert found.fit, found.diagnostics
    assert exit_code(found) == 0
    assert found.running is False
    local, gpu1, studio = found.hosts
    assert (local.name, local.destination, local.reached_ms) == ("local", None, None)
    assert (gpu1.destination, studio.destination) == ("gpu1", "studio.local")
    assert gpu1.reached_ms is not None
    assert (gpu1.round_trip_ms, gpu1.clock_offset_s) == (1.5, -0.25)
    assert gpu1.pdctl_version == __version__
    assert [(e.replica, e.engine_version) for e in gpu1.engines] == [
        ("p0", "0.32.2"),
        ("d1", "0.32.2"),
    ]
    assert gpu1.disk_free_bytes
    assert {p.state for host in found.hosts for p in host.ports} == {"free"}
    assert [(p.prefill, p.decode) for p in found.pairs] == [("p0", "d0"), ("p0", "d1")]
    for pair in found.pairs:
        assert (pair.address, pair.port) == ("10.0.0.1", port)
        assert pair.error is None
        assert pair.note is None
        assert pair.round_trip_ms
        assert pair.bytes_per_s
    assert [p.decode_host for p in found.pairs] == ["studio", "gpu1"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=Findings) == found


def test_a_closed_link_comes_with_what_opens_and_what_tests_it(
    model: Path, fleet: Fleet, examine: Examine
) -> None:
    """U30: the exact commands; the other pair is still measured; exit code 4."""
    fleet["studio"].walled = True
    port = free_port(run=5)
    found = examine(topology(model, data_port=port))
    closed, near = found.pairs
    assert (closed.tried, closed.error) == (True, "no answer within 5 s")
    assert closed.opens is not None
    assert closed.opens.startswith(f"ssh gpu1 'sudo ufw allow {port}/tcp")
    assert closed.tests == (
        f"ssh gpu1 'python3 -m http.server {port} --bind 10.0.0.1'",
        f"ssh studio.local 'nc -vz -w 5 10.0.0.1 {port}'",
    )
    assert near.bytes_per_s
    assert [d.code for d in found.diagnostics] == ["host.data_plane"]
    assert exit_code(found) == 4


def test_an_unreachable_host_leaves_the_others(model: Path, fleet: Fleet, examine: Examine) -> None:
    """Its pairs say so, without being dialled; the rest is examined."""
    fleet["studio"].lost_at = "facts"
    found = examine(topology(model, data_port=free_port(run=5)))
    assert [host.error for host in found.hosts] == [None, None, 'host "studio": it is away']
    assert [pair.error for pair in found.pairs] == ["host studio can't be reached", None]
    assert [pair.tried for pair in found.pairs] == [False, True]
    assert fleet["studio"].questions == ["facts"]
    assert [d.code for d in found.diagnostics] == ["host.unreachable"]
    assert exit_code(found) == 4


def test_a_running_cluster_is_tried_beside_its_own_port(
    model: Path, fleet: Fleet, examine: Examine
) -> None:
    """Its data port is taken by itself: a free one near it is used, and that is said."""
    port = free_port(run=5)
    with socket.create_server(("127.0.0.1", port)):
        fleet["gpu1"].listening = [port, port + 1]
        found = examine(topology(model, data_port=port), runs=True)
    assert found.running
    assert found.fit, found.diagnostics
    for pair in found.pairs:
        assert pair.port > port + 1
        assert pair.note is not None
        assert pair.note.startswith(f"port {port} is in use by this cluster itself; tried beside")
        assert pair.bytes_per_s
    assert port in [p.port for p in found.hosts[1].ports]
    assert {p.state for host in found.hosts for p in host.ports} == {"own"}


@pytest.mark.parametrize("open_itself", [True, False])
def test_what_is_closed_beside_a_running_sender_is_no_fault(
    open_itself: bool, model: Path, fleet: Fleet, examine: Examine
) -> None:
    """A firewall that opens the data port alone is right: the pair is open, and not measured.
    Where that port is closed too, it is the one that is named."""
    port = free_port(run=5)
    beside = frozenset(range(port + 1, port + 100))
    fleet["studio"].closed_ports = beside if open_itself else beside | {port}
    with socket.create_server(("127.0.0.1", port)) as sender:
        hang_up = threading.Thread(target=lambda: sender.accept()[0].close())
        hang_up.start()
        fleet["gpu1"].listening = [port]
        found = examine(topology(model, data_port=port), runs=True, busy=True)
        socket.create_connection(("127.0.0.1", port)).close()
        hang_up.join()
    far, near = found.pairs
    assert far.port == port
    assert (far.error is None) is open_itself
    assert far.bytes_per_s is None
    assert near.bytes_per_s
    assert found.fit is open_itself
    if open_itself:
        assert far.note is not None
        assert far.note.endswith("beside it is closed: not measured")
    else:
        assert far.opens is not None
        assert f"ufw allow {port}/tcp" in far.opens


def test_a_port_that_somebody_else_has_is_named(
    model: Path, fleet: Fleet, examine: Examine
) -> None:
    """U25: the port is closed, the pair says why, and nothing dials the stranger."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        declared, _ = loads(topology(model, data_port=port))
        assert declared is not None
        found = diagnose(Ground(declared, fleet.hosts, Silent()), [])
    assert [p.error for p in found.pairs] == ["p0 can't listen there", "p0 can't listen there"]
    assert [p.tried for p in found.pairs] == [False, False]
    assert [d.code for d in found.diagnostics] == ["host.port_busy"]
    assert [p.port for p in found.hosts[1].ports if p.state == "closed"] == [port]
    assert fleet["studio"].dialled == []


@pytest.mark.parametrize(("encrypt", "words"), [(True, "TLS 1.3"), (False, "plain TCP")])
def test_it_says_what_the_data_plane_is(
    encrypt: bool, words: str, model: Path, fleet: Fleet, examine: Examine
) -> None:
    """Which is what is measured, too."""
    found = examine(topology(model, data_port=free_port(run=5), encrypt=encrypt))
    assert found.encrypt is encrypt
    assert found.data_plane is not None
    assert found.data_plane.startswith(words)
    assert fleet["gpu1"].encrypted is encrypt
    assert all(pair.bytes_per_s for pair in found.pairs)


def test_warnings_do_not_make_it_unfit(model: Path, fleet: Fleet, examine: Examine) -> None:
    fleet["studio"].facts = {"disk_free_bytes": 10**8}
    found = examine(topology(model, data_port=free_port(run=5)))
    assert [d.code for d in found.diagnostics] == ["host.disk"]
    assert exit_code(found) == 0
