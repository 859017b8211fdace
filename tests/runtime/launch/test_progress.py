"""What a launch tells of its stages, and when one ends it."""

from __future__ import annotations

import msgspec
import pytest

from pdctl.engines.channel import PairState
from pdctl.runtime.agent.stores import StoreState
from pdctl.runtime.agent.view import Snapshot
from pdctl.runtime.launch.events import LaunchEvent, Stage
from pdctl.runtime.launch.launching import _replicas_ready
from pdctl.runtime.launch.progress import Progress

STORE = StoreState(name="store-gpu1", host="gpu1", state="starting", pid=7)


def picture(**changes: object) -> Snapshot:
    store = msgspec.structs.replace(STORE, **changes)
    return Snapshot(host="local", run="r", version=1, members=(), router=None, stores=(store,))


def test_a_store_is_told_once_per_state() -> None:
    """As replicas are, under its log's name."""
    told: list[LaunchEvent] = []
    progress = Progress(told.append)
    for state in ("stopped", "starting", "starting", "ready"):
        progress.show(picture(state=state))
    assert [(event.stage, event.subject, event.state) for event in told] == [
        (Stage.STORE, "store-gpu1", "starting"),
        (Stage.STORE, "store-gpu1", "ready"),
    ]


def test_only_a_pairs_canary_is_called_a_pairs() -> None:
    """An ordinary replica that answers alone is a path of its own."""
    told: list[LaunchEvent] = []
    pair = PairState(prefill="p0", decode="d0", transport="tcp", state="ready")
    alone = PairState(prefill="o0", decode="o0", transport="", state="canary", cause="it runs")
    shown = msgspec.structs.replace(picture(state="stopped"), pairs=(pair,), replicas=(alone,))
    Progress(told.append).show(shown)
    assert [(event.stage, event.subject, event.state) for event in told] == [
        (Stage.PAIR, "p0>d0", "ready"),
        (Stage.PATH, "o0", "canary"),
    ]


def test_replicas_wait_for_their_stores() -> None:
    """A launch goes on to its router once the stores serve, too."""
    assert not _replicas_ready(picture())
    assert _replicas_ready(picture(state="ready"))
    assert Progress.waiting(picture()).startswith('the page store of host "gpu1" is starting')


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "backoff", "cause": "it exited with status 5"},
        {"state": "starting", "restarts": 1, "cause": "it exited with status 5"},
    ],
)
def test_a_store_that_ends_ends_the_launch(changes: dict[str, object]) -> None:
    """R58: by name, with its log, on its host; later the same would be a miss."""
    trouble = Progress.trouble(picture(**changes))
    assert trouble is not None
    assert trouble.sentence == ('the page store of host "gpu1" failed: it exited with status 5')
    assert (trouble.log, trouble.host) == ("store-gpu1", "gpu1")
    assert Progress.trouble(picture()) is None
