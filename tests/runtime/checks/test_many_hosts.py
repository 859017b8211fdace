"""Validation over several hosts: each is asked, each failure is named, nothing else suffers."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ports import free_port
from runtime.checks.pair import pair_text
from runtime.fleet import Fleet, own_ports
from tiny import make_checkpoint

from pdctl.errors import HostError
from pdctl.runtime.checks.outcome import Silent, Validation
from pdctl.runtime.checks.validation import validate
from pdctl.topology.diagnostics import Severity
from pdctl.topology.load import loads
from pdctl.topology.plan import derive

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """gpu1 stands at 10.0.0.1 and at a name; everything of it is loopback here."""
    own_ports(monkeypatch)
    found = Fleet(tmp_path, "local", "gpu1", "studio")
    real = {"10.0.0.1": "127.0.0.1", "gpu1.lan": "localhost", "fd00::77": "::1"}
    found.each(lambda host: host.names.update(real))
    return found


def topology(model: Path, *, address: str = "10.0.0.1", more: str = "", router: str = "") -> str:
    studio = "ssh://user@studio.local:2222"
    bind = f"127.0.0.1:{free_port()}"
    text = pair_text("many", model, address=address, bind=bind, router=router, studio=studio)
    return text + more


Check = Callable[..., Validation]


@pytest.fixture
def check(tmp_path: Path, fleet: Fleet) -> Check:
    def run(text: str, **options: Any) -> Validation:
        file = tmp_path / "topology.toml"
        file.write_text(text)
        found = validate(file, reach=fleet.reach, environ={}, **options)
        assert fleet.closed == 1
        assert fleet.listening() == []
        return found

    return run


def codes(found: Validation) -> list[str]:
    return [d.code for d in found.report.diagnostics]


@pytest.mark.parametrize("address", ["10.0.0.1", "gpu1.lan", "fd00::77"])
def test_a_fleet_that_fits_is_valid(address: str, model: Path, fleet: Fleet, check: Check) -> None:
    """R59: the decode host dials the prefill's data port by IPv4, by name and by IPv6; every
    host's ports are tried on that host, and nothing listens afterwards."""
    found = check(topology(model, address=address))
    assert found.report.valid, found.report
    assert found.plan is not None
    port = found.plan.replica("p0").data_port
    assert fleet["studio"].dialled == [(address, port)]
    assert fleet["gpu1"].dialled == []
    assert {b.subject for b in fleet["studio"].bound} == {
        'agent of host "studio"',
        'replica "d0" http_port',
    }
    assert "router" in {b.subject for b in fleet["local"].bound}


@pytest.mark.parametrize("question", ["facts", "bindings"])
def test_an_unreachable_host_is_one_error(
    question: str, model: Path, fleet: Fleet, check: Check
) -> None:
    """Exit code 4, once, at whatever moment it goes away; the others are still checked, and the
    pair is not dialled."""
    fleet["studio"].lost_at = question
    fleet["local"].facts = {"disk_free_bytes": 10**8}
    found = check(topology(model))
    fault = found.report.errors
    assert [d.code for d in fault] == ["host.unreachable"]
    assert (fault[0].summary, fault[0].hint) == ('host "studio": it is away', "switch it on")
    assert found.report.exit_code == 4
    assert "host.disk" in codes(found)
    assert fleet["studio"].dialled == []


def test_hosts_are_asked_at_the_same_time(
    model: Path, fleet: Fleet, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host's first question waits until all three were asked theirs."""
    together = threading.Barrier(3)

    def wait(host: Any) -> None:
        ask = host.survey.facts

        def facts() -> Any:
            together.wait(30)
            return ask()

        monkeypatch.setattr(host.survey, "facts", facts)

    fleet.each(wait)
    check(topology(model))
    assert not together.broken


@pytest.mark.parametrize(
    ("facts", "code", "words", "severity"),
    [
        ({"pdctl_version": "9.9"}, "host.pdctl_version", "has pdctl 9.9", "error"),
        ({"python_version": "3.10.14"}, "host.python_version", "is Python 3.10.14", "error"),
        ({"xoscar_version": None}, "host.rpc_version", "has no xoscar", "error"),
        ({"xoscar_version": "0.11.4"}, "host.rpc_version", "has xoscar 0.11.4", "error"),
        ({"disk_free_bytes": 0}, "host.disk_full", "nothing is free on the disk of", "error"),
        ({"disk_free_bytes": 10**8}, "host.disk", "only 95.4 MiB are free", "warning"),
        ({"clock_s": 1.0}, "host.clock", "behind this machine's", "warning"),
        ({"memory_free_bytes": 1}, "host.memory", 'host "gpu1": the replicas need', "warning"),
    ],
)
def test_an_unfit_host_is_named(
    facts: dict[str, Any],
    code: str,
    words: str,
    severity: str,
    model: Path,
    fleet: Fleet,
    check: Check,
) -> None:
    """Versions of the agent's interpreter, disk, clock and memory, per host."""
    fleet["gpu1"].facts = facts
    found = check(topology(model))
    assert codes(found) == [code]
    (only,) = found.report.diagnostics
    assert 'host "gpu1"' in only.summary
    assert words in only.summary
    assert only.severity == severity
    assert only.hint
    assert found.report.exit_code == (4 if severity == "error" else 0)


def test_where_clusters_lie_on_each_host_is_known(model: Path, fleet: Fleet, check: Check) -> None:
    """Each host's own XDG_STATE_HOME counts there."""
    fleet["gpu1"].facts = {"state_home": "/scratch/me/pdctl"}
    homes = check(topology(model)).homes
    assert homes["gpu1"] == "/scratch/me/pdctl"
    assert set(homes) == {"local", "gpu1", "studio"}


def test_another_patch_of_the_rpc_is_fine(model: Path, fleet: Fleet, check: Check) -> None:
    """Only major and minor must be equal."""
    own = fleet["gpu1"].survey.facts().xoscar_version
    assert own is not None
    fleet["gpu1"].facts = {"xoscar_version": f"{own}.99"}
    assert check(topology(model)).report.valid


@pytest.mark.parametrize(("offset_s", "told"), [(1.9, False), (2.2, True), (-3.0, True)])
def test_clock_skew_is_warned_above_two_seconds(
    offset_s: float, told: bool, model: Path, fleet: Fleet, check: Check
) -> None:
    """The connection's own measurement counts, and its doubt is not held against the host."""
    fleet["gpu1"].clock_offset_s, fleet["gpu1"].round_trip_s = offset_s, 0.1
    found = check(topology(model))
    assert codes(found) == (["host.clock"] if told else [])
    assert found.report.valid


def test_hosts_of_one_machine_share_its_memory(model: Path, fleet: Fleet, check: Check) -> None:
    """Two replicas fit one by one, but not together; the page budget counts for the sender."""
    room = {"boot": "one", "memory_free_bytes": 1 * GIB}
    for name in ("gpu1", "studio"):
        fleet[name].facts = room
    text = topology(model, router='[handoff]\nbuffer_bytes = "700MiB"')
    found = check(text)
    assert codes(found) == ["host.memory"]
    assert "hosts gpu1 and studio, which are one machine" in found.report.diagnostics[0].summary


def test_the_page_budget_counts(model: Path, fleet: Fleet, check: Check) -> None:
    """A prefill replica holds `buffer_bytes` beside weights and KV."""
    fleet.each(lambda host: host.facts.update(memory_free_bytes=4 * GIB))
    found = check(topology(model, router='[handoff]\nbuffer_bytes = "8GiB"'))
    assert [d.summary.split(":")[0] for d in found.report.diagnostics] == ['host "gpu1"']


def test_a_running_cluster_has_its_memory(model: Path, fleet: Fleet, check: Check) -> None:
    """What stays where it is needs no more than it has."""
    first = check(topology(model))
    fleet.closed = 0
    fleet.each(lambda host: host.facts.update(memory_free_bytes=1))
    assert codes(check(topology(model), kept=first.plan)) == []


def test_a_model_missing_on_a_host_is_that_hosts_fault(
    model: Path, fleet: Fleet, check: Check
) -> None:
    """Exit code 4: the file is right, the directory is not there; the rest is still checked."""
    fleet["local"].facts = {"disk_free_bytes": 10**8}
    text = topology(model)
    head, _, tail = text.rpartition(f'"{model}"')
    found = check(f'{head}"/absent/model"{tail}')
    assert [d.code for d in found.report.errors if d.replica == "d0"] == ["host.model_missing"]
    error = next(d for d in found.report.errors if d.replica == "d0")
    assert error.summary.endswith("no directory /absent/model (on studio)")
    assert found.report.exit_code == 4
    assert "host.disk" in codes(found)


def test_weights_are_compared_across_hosts(
    model: Path, fleet: Fleet, check: Check, tmp_path: Path
) -> None:
    """R54: each host fingerprints its own copy; a difference is exit code 3."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    template = copy / "chat_template.jinja"
    template.write_text("{{ messages }}")
    text = topology(model)
    head, _, tail = text.rpartition(f'"{model}"')
    found = check(f'{head}"{copy}"{tail}')
    assert "contract.chat_template" in codes(found)
    assert found.report.exit_code == 3


@pytest.mark.parametrize(("host", "where"), [("studio", "d0"), ("gpu1", "p0")])
def test_a_port_in_use_on_a_host_is_named_there(
    host: str, where: str, model: Path, fleet: Fleet, check: Check
) -> None:
    """U25: exit code 4, with the replica, the port, and the host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        name = f'name = "{where}"'
        found = check(topology(model).replace(name, f"{name}\nhttp_port = {port}"))
    busy = next(d for d in found.report.errors if d.code == "host.port_busy")
    assert busy.summary.startswith(f'replica "{where}" http_port: port {port} is in use')
    assert busy.summary.endswith(f"(on {host})")
    assert found.report.exit_code == 4


def test_a_closed_data_plane_names_both_ends_and_the_way_out(
    model: Path, fleet: Fleet, check: Check
) -> None:
    """U30: which pair, which hosts, which port, what opens it, and what tests it by hand."""
    fleet["studio"].walled = True
    port = free_port()
    text = topology(model).replace('role = "prefill"', f'role = "prefill"\ndata_port = {port}')
    found = check(text)
    (error,) = found.report.errors
    assert error.code == "host.data_plane"
    assert error.summary == (
        f'pair "p0" → "d0": host "studio" can\'t reach host "gpu1" at 10.0.0.1 port {port}: '
        "no answer within 5 s"
    )
    assert error.hint is not None
    assert f"ssh gpu1 'sudo ufw allow {port}/tcp" in error.hint
    assert f"ssh -l user -p 2222 studio.local 'nc -vz -w 5 10.0.0.1 {port}'" in error.hint
    assert error.detail is not None
    assert f"ssh gpu1 'python3 -m http.server {port} --bind 10.0.0.1'" in error.detail
    assert found.report.exit_code == 4


def test_an_address_that_does_not_resolve_there_is_named(
    model: Path, fleet: Fleet, check: Check
) -> None:
    """R59: the sender knows its own name, the receiver does not."""
    fleet["gpu1"].names["far.invalid"] = "127.0.0.1"
    found = check(topology(model, address="far.invalid"))
    (error,) = found.report.errors
    assert error.code == "host.data_plane"
    assert error.summary.endswith("far.invalid does not resolve")


def test_a_name_that_the_sender_does_not_know_is_told_once(
    model: Path, fleet: Fleet, check: Check
) -> None:
    """Its own host can't listen there: an error of the address, and no second one of the link."""
    found = check(topology(model, address="far.invalid"))
    assert codes(found) == ["host.address"]
    assert found.report.errors[0].summary == (
        'replica "p0" data_port: far.invalid does not resolve there (on gpu1)'
    )
    assert fleet["studio"].dialled == []


def shared(model: Path) -> str:
    """Besides the pair, an ordinary replica on each host, which share."""
    text = topology(model).replace("[hosts.studio]", '[hosts.studio]\naddress = "10.0.0.2"')
    head, _, replicas = text.partition("[[replicas]]")
    ordinary = "".join(
        f'[[replicas]]\nname = "o-{host}"\nhost = "{host}"\nengine = "mlx"\nrole = "both"\n'
        f'model = "{model}"\n'
        for host in ("gpu1", "studio")
    )
    return f"{head}[sharing]\n[[replicas]]{replicas}{ordinary}"


def test_page_stores_are_dialled_from_each_others_hosts(
    model: Path, fleet: Fleet, check: Check
) -> None:
    """Both ways; what is closed is a warning that names both ends and the way out."""
    fleet.each(lambda host: host.names.update({"10.0.0.2": "127.0.0.1"}))
    found = check(shared(model))
    assert found.report.valid
    assert found.report.warning_count == 0
    assert found.plan is not None
    ports = {store.host: store.data_port for store in found.plan.stores}
    assert ("10.0.0.1", ports["gpu1"]) in fleet["studio"].dialled
    assert ("10.0.0.2", ports["studio"]) in fleet["gpu1"].dialled
    assert fleet.listening() == []
    fleet["gpu1"].closed_ports = frozenset({ports["studio"] or 0})
    fleet.closed = 0
    found = check(shared(model))
    assert found.report.valid
    (warning,) = found.report.diagnostics
    assert warning.code == "host.page_store"
    assert 'host "gpu1" can\'t reach the page store of host "studio"' in warning.summary
    assert f"ufw allow {ports['studio']}" in (warning.hint or "")


def test_a_clusters_own_ports_are_not_dialled(model: Path, fleet: Fleet, check: Check) -> None:
    """A running sender has its port: it is neither a clash nor a wall."""
    fleet["studio"].walled = True
    port = free_port()
    text = topology(model).replace('role = "prefill"', f'role = "prefill"\ndata_port = {port}')
    declared, _ = loads(text)
    assert declared is not None
    found = check(text, kept=derive(declared))
    assert found.report.valid, found.report
    assert fleet["studio"].dialled == []


def test_a_clusters_own_port_on_another_host_is_not_its_own(
    model: Path, fleet: Fleet, check: Check
) -> None:
    """The same number there is somebody else's: it is tried, and told when it is taken."""
    text = topology(model)
    declared, _ = loads(text)
    assert declared is not None
    running = derive(declared)
    number = running.replica("p0").http_port
    with socket.create_server(("127.0.0.1", number)):
        moved = text.replace('role = "decode"', f'role = "decode"\nhttp_port = {number}')
        found = check(moved, kept=running)
    assert "host.port_busy" in codes(found)
    assert [b.address[1] for b in fleet["studio"].bound if b.replica == "d0"] == [number]


def test_every_pair_is_dialled(model: Path, fleet: Fleet, check: Check) -> None:
    """Two receivers of one sender take turns at its port."""
    second = f"""
[[replicas]]
name = "d1"
host = "local"
engine = "mlx"
role = "decode"
model = "{model}"
"""
    assert check(topology(model, more=second)).report.valid
    assert len(fleet["studio"].dialled) == len(fleet["local"].dialled) == 1


def test_a_router_elsewhere_must_reach_every_host(model: Path, fleet: Fleet, check: Check) -> None:
    """The keeper is there: its own SSH is tried, not ours; the failure names both hosts."""
    assert check(topology(model, router='host = "gpu1"')).report.valid
    assert "route studio" in fleet["gpu1"].questions
    fleet.closed = 0
    fleet["gpu1"].routes["studio"] = HostError("Permission denied (publickey)", hint="a key")
    found = check(topology(model, router='host = "gpu1"'))
    (error,) = found.report.errors
    assert error.code == "host.route"
    assert 'host "gpu1", where the router runs, can\'t reach host "studio"' in error.summary
    assert "Permission denied (publickey)" in error.summary
    assert (
        error.hint
        == "`ssh gpu1 ssh -l user -p 2222 studio.local true` must work without a question"
    )


def test_a_broken_file_connects_nowhere(model: Path, fleet: Fleet, check: Check) -> None:
    """R52: no host beyond this one is asked anything."""
    found = check(topology(model).replace("[router]", "[router]\nbnd = 1"))
    assert codes(found) == ["topology.unknown_key"]
    assert fleet["gpu1"].questions == fleet["studio"].questions == []


def test_progress_is_told_per_host(model: Path, fleet: Fleet, check: Check) -> None:
    """Each host's steps by its name; hashing says where the directory lies."""
    told: list[str] = []

    class Listening(Silent):
        def host(self, name: str, text: str) -> None:
            told.append(f"{name} {text}")

        def hashing(self, model_dir: str, done_bytes: int, total_bytes: int) -> None:
            told.append(model_dir)

    check(topology(model), watcher=Listening())
    for name in ("gpu1", "studio", "local"):
        assert f"{name} checking ports" in told
    assert f"gpu1:{model}" in told or f"studio:{model}" in told


def test_warnings_stay_warnings(model: Path, fleet: Fleet, check: Check) -> None:
    """A plan comes with them."""
    fleet["studio"].facts = {"disk_free_bytes": 10**8}
    found = check(topology(model))
    assert [d.severity for d in found.report.diagnostics] == [Severity.WARNING]
    assert msgspec.json.encode(found.plan)
