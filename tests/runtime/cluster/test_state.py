from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
from runtime.clusters import written

from pdctl.errors import ClusterError, TopologyError
from pdctl.runtime.cluster import state as module
from pdctl.runtime.cluster.state import (
    StateDir,
    actor_key,
    clusters,
    handoff_key,
    own_plan,
    resolve,
    state_home,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "pdctl"


def test_the_state_home_honours_xdg(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_STATE_HOME, where it is absolute; ~/.local/state otherwise."""
    assert state_home() == home
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_home() == Path.home() / ".local" / "state" / "pdctl"


def test_nothing_in_the_state_is_open_to_others(tmp_path: Path) -> None:
    """Folders are 0700, files 0600: the key among them."""
    with written(tmp_path) as (state, record):
        state.write(record)
        state.write_api_key("secret")
    for path in [state.path, *state.path.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    """Topology, plan and contract survive the file."""
    with written(tmp_path) as (state, record):
        assert state.read() == record
        assert record.contract.digest == state.read().contract.digest  # type: ignore[union-attr]


def test_a_damaged_or_foreign_record_is_named(tmp_path: Path) -> None:
    """Another version's record is an error with a hint, not a traceback."""
    with written(tmp_path) as (state, record):
        state.write(msgspec.structs.replace(record, format=99))
        with pytest.raises(ClusterError, match="format 99"):
            state.read()
        (state.path / "cluster.json").write_text("{")
        with pytest.raises(ClusterError, match="can't be read"):
            state.read()


def test_clearing_leaves_the_logs_alone(tmp_path: Path) -> None:
    """R62: after clear only logs are left, and the next launch can start."""
    with written(tmp_path) as (state, _):
        state.write_api_key("secret")
        state.journal("local").write_text("{}")
        state.log("p0").write_text("line")
        state.clear()
        assert [p.name for p in state.path.iterdir()] == ["logs"]
        assert state.log("p0").read_text() == "line"


def test_pruning_removes_only_what_is_empty(home: Path) -> None:
    """A launch that never began leaves no folder; one with logs keeps them."""
    state = StateDir.of("studio")
    state.make()
    state.prune()
    assert not state.path.exists()
    state.make()
    state.log("p0").write_text("line")
    state.prune()
    assert state.log("p0").exists()


def test_a_cluster_is_found_by_name_file_or_recorded_path(tmp_path: Path, home: Path) -> None:
    """A topology that can't be parsed any more still names the cluster that it launched."""
    file = tmp_path / "topology.toml"
    with written(tmp_path) as (state, record):
        launched = StateDir.of(record.cluster)
        launched.make()
        launched.write(msgspec.structs.replace(record, topology_path=str(file.resolve())))
    assert resolve(record.cluster).path == launched.path
    file.write_text(f'name = "{record.cluster}"\n')
    assert resolve(str(file)).path == launched.path
    file.write_text("not [ toml")
    assert resolve(str(file)).path == launched.path
    assert [c.path for c in clusters()] == [launched.path]
    assert state.path != launched.path


def test_what_names_no_cluster_is_a_topology_error(tmp_path: Path) -> None:
    """Neither a file nor a cluster; a file without a usable name."""
    for target in ("nothing-here", "", ".", "x" * 5000, "nul\0", str(tmp_path)):
        with pytest.raises(TopologyError, match="neither a topology file nor a cluster"):
            resolve(target)
    file = tmp_path / "topology.toml"
    file.write_text("schema = 1\n")
    with pytest.raises(TopologyError, match="no cluster name"):
        resolve(str(file))
    file.write_text("x = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(TopologyError, match="no cluster name"):
        resolve(str(file))
    assert own_plan(file) is None
    file.write_text('name = "../../etc"\n')
    with pytest.raises(TopologyError, match="not a cluster name"):
        resolve(str(file))


def test_actors_and_engines_prove_different_keys(tmp_path: Path) -> None:
    """An engine that knows its handoff key can't speak to an agent."""
    with written(tmp_path) as (state, _):
        key = state.read_key()
    assert len(bytes.fromhex(key)) == 32
    assert len(handoff_key(key)) == 32
    assert len({key, actor_key(key), handoff_key(key).hex()}) == 3


def test_what_was_taken_down_is_known_until_the_next_launch(tmp_path: Path) -> None:
    """By its record beside its logs; one that can't be read is as none."""
    with written(tmp_path) as (state, record):
        assert state.read_ended() is None
        state.write_ended(record)
        state.clear()
        assert (state.read(), state.read_ended()) == (None, record)
        assert [p.name for p in state.path.iterdir()] == ["logs"]
        (state.logs / "ended.json").write_text("{}")
        assert state.read_ended() is None
        state.clear_logs()
        assert list(state.logs.iterdir()) == []


def test_a_cluster_without_a_log_here_is_known_too(tmp_path: Path) -> None:
    """Everything of it ran elsewhere: the folder of logs is empty, and goes when `up` ends."""
    with written(tmp_path) as (state, record):
        state.prune()
        state.write_ended(record)
        assert state.read_ended() == record


def test_keys_differ_from_one_launch_to_the_next(tmp_path: Path) -> None:
    """The key is generated per cluster at `up`."""
    with written(tmp_path) as (state, _):
        assert state.read_key() != state.create_key()


def test_socket_paths_stay_short(tmp_path: Path) -> None:
    """A Unix socket's path is limited to 104 bytes on macOS, whatever the host's name."""
    with written(tmp_path) as (_, record):
        assert len(f"{record.socket_dir}/{'h' * 63}.sock") < 104
    assert module.RECORD_FORMAT == 1


def test_a_running_clusters_own_plan_is_known_by_its_file(tmp_path: Path) -> None:
    """Thus `plan` and `validate` of a running cluster see no clash with itself."""
    file = tmp_path / "topology.toml"
    with written(tmp_path) as (_, record):
        launched = StateDir.of(record.cluster)
        launched.make()
        launched.write(record)
    file.write_text(f'name = "{record.cluster}"\n')
    assert own_plan(file) == record.plan
    file.write_text('name = "another"\n')
    assert own_plan(file) is own_plan(tmp_path / "absent") is None
