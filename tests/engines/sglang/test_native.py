"""SGLang's own handoff as pdctl counts it, with SGLang's classes but none of its processes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # of SGLang's own imports
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang")
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.nixl import NixlKVManager, NixlKVReceiver, NixlKVSender
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

    from pdctl.engines.sglang import native
    from pdctl.engines.sglang.hooks import class_of

from engines.specs import LEG

from pdctl.engines.channel import Failed
from pdctl.handoff.counters import CounterBoard, PairCounters

TOKENS = 130


class SglangsEnd:
    """What SGLang knows of one leg."""

    status = KVPoll.Bootstrapping
    was_aborted = False

    def poll(self) -> int:
        return int(self.status)

    def abort(self) -> None:
        self.was_aborted, self.status = True, KVPoll.Failed


class End(native.Counted, SglangsEnd):
    side = "decode"
    bootstrap_room = LEG.room

    def __init__(self) -> None:
        self.board = CounterBoard()
        self.told: list[Failed] = []
        session = SimpleNamespace(board=self.board, report=self.told.append)
        self.kv_mgr: Any = SimpleNamespace(session=session, failure_records={})

    def amounts(self) -> dict[str, int]:
        return {"imported_tokens": self.tokens, "host_bytes": 5}

    @property
    def pair(self) -> PairCounters:
        return self.board.read().pairs[LEG.prefill]


@pytest.fixture
def end() -> End:
    made = End()
    made.begin(LEG, list(range(TOKENS)), salt="s")
    return made


def test_the_native_backend_is_sglangs_with_our_classes() -> None:
    """Any other backend stays what it was."""
    kinds = {kind: class_of(None, TransferBackend.NIXL, kind) for kind in native_kinds()}
    assert issubclass(kinds[KVClassType.MANAGER], NixlKVManager)
    assert issubclass(kinds[KVClassType.SENDER], NixlKVSender)
    assert issubclass(kinds[KVClassType.RECEIVER], NixlKVReceiver)
    asked = []
    class_of(lambda *given: asked.append(given), TransferBackend.MOONCAKE, KVClassType.SENDER)
    assert asked == [(TransferBackend.MOONCAKE, KVClassType.SENDER)]


def native_kinds() -> list[KVClassType]:
    return [kind for kind in KVClassType if kind is not KVClassType.KVARGS]


def test_a_leg_is_counted_once_at_its_begin_and_once_at_its_end(end: End) -> None:
    assert end.pair == PairCounters(handoffs_active=1)
    assert end.poll() == KVPoll.Bootstrapping
    end.status = KVPoll.Success
    assert [end.poll(), end.poll()] == [KVPoll.Success] * 2
    end.abort()
    assert end.pair == PairCounters(handoffs_completed=1, imported_tokens=TOKENS, host_bytes=5)
    assert end.told == []


def test_a_failed_leg_is_told_with_sglangs_own_reason(end: End) -> None:
    """R67: SGLang's answer is a bare 500."""
    end.kv_mgr.failure_records[LEG.room] = "the prefill server is gone"
    end.status = KVPoll.Failed
    assert [end.poll(), end.poll()] == [KVPoll.Failed] * 2
    assert end.pair == PairCounters(handoffs_failed=1)
    assert [(f.room, f.leg, f.cause, f.detail) for f in end.told] == [
        (LEG.room, "decode", "peer_lost", "the prefill server is gone")
    ]
    assert end.board.read().failures == {"peer_lost": 1}


@pytest.mark.parametrize("by_us", [True, False])
def test_a_leg_that_was_told_to_end_is_cancelled(end: End, by_us: bool) -> None:
    """By the router at this end, or at the other one, which tells it."""
    if by_us:
        end.abort()
        assert end.was_aborted
    else:
        end.kv_mgr.failure_records[LEG.room] = "Aborted by decode-side abort notification."
        end.status = KVPoll.Failed
    assert end.poll() == KVPoll.Failed
    assert end.pair == PairCounters(handoffs_cancelled=1)
    assert end.told == []


def test_a_leg_that_never_began_is_sglangs_alone() -> None:
    """Its warm-up and its health check move nothing."""
    end = End()
    end.status = KVPoll.Success
    assert end.poll() == KVPoll.Success
    end.abort()
    assert end.board.read().pairs == {}
