"""What is put on an agent's host, and what of it stays."""

from __future__ import annotations

from pathlib import Path

import msgspec
from runtime.clusters import written

from pdctl.runtime.cluster.placement import Placement, clear, deposit
from pdctl.runtime.hosts.local import LocalHost


def test_logs_stay_until_the_next_launch(tmp_path: Path) -> None:
    """Over restarts of an agent and after `down`, as on the machine that launched."""
    host, place = LocalHost("far"), Placement(state=str(tmp_path / "far"), socket_dir="/none")
    log = Path(place.log("d0"))
    with written(tmp_path) as (state, record):
        later = msgspec.structs.replace(record, run="another")
        for one, kept in ((record, False), (record, True), (later, False), (later, True)):
            deposit(host, place, one, key=state.read_key(), api_key=None)
            assert log.exists() is kept
            log.write_text("a line\n")
        clear(host, place)
        assert [path.name for path in Path(place.state).iterdir()] == ["logs"]
        assert log.exists()
        deposit(host, place, later, key=state.read_key(), api_key=None)
        assert not log.exists()
