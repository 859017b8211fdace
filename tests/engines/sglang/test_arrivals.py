"""What pdctl does as requests come to SGLang's scheduler and leave it, when it goes wrong. Run by
an environment that has SGLang."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engines.replicas import KEY

from pdctl.engines.interface import Leg
from pdctl.errors import HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.ticket import mint

with warnings.catch_warnings():
    # of SGLang's own imports
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang")
    from pdctl.engines.sglang import arrivals

LEG = Leg(
    room=7,
    ticket=mint(KEY, 7, "p0", "d0", "d" * 64, 1e12),
    prefill="p0",
    decode="d0",
    sender="127.0.0.1:18000",
    timeout_s=30.0,
)


class Broken:
    """An end whose beginning raises what nobody foresaw."""

    def __init__(self) -> None:
        self.failed: list[tuple[Leg, HandoffError]] = []

    def begin(self, leg: Leg, token_ids: list[int], salt: str | None = None) -> None:
        raise RuntimeError("begin broke")

    def fail(self, leg: Leg, error: HandoffError) -> None:
        self.failed.append((leg, error))


def request(end: Broken) -> Any:
    return SimpleNamespace(
        bootstrap_host="127.0.0.1",
        bootstrap_room=7,
        sampling_params=SimpleNamespace(custom_params={"pdctl": msgspec.to_builtins(LEG)}),
        origin_input_ids=[1, 2, 3],
        cache_salt=None,
        extra_key=None,
        disagg_kv_sender=end,
        kv_receiver=end,
    )


def check_failed(end: Broken) -> None:
    ((leg, error),) = end.failed
    assert leg == LEG
    assert "begin broke" in error.message


def test_an_error_where_a_prefill_leg_begins_is_that_requests() -> None:
    """R34: the scheduler hears nothing of it."""
    end, queue = Broken(), SimpleNamespace(queue=[])
    arrivals.to_prefill(lambda queue, req: queue.queue.append(req), queue, request(end))
    check_failed(end)


def test_an_error_where_a_decode_leg_begins_is_that_requests() -> None:
    """R34: likewise, of a receiver."""
    end = Broken()
    queue = SimpleNamespace(queue=[], max_total_num_tokens=2048, num_reserved_decode_tokens=512)

    def add(queue: Any, req: Any) -> None:
        queue.queue.append(SimpleNamespace(req=req, kv_receiver=end))

    arrivals.to_decode(add, queue, request(end))
    check_failed(end)


def test_a_step_that_cannot_be_counted_goes_out_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R35."""
    with caplog.at_level(logging.ERROR):
        arrivals.computed(None, [object()])
    assert "not counted" in caplog.text


@pytest.mark.parametrize(("output", "counted"), [([], (0, 0)), ([5], (3, 1))])
def test_a_prompt_that_was_refused_was_not_computed(
    output: list[int], counted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R40: no counter says that it was."""
    counts = CounterBoard()
    monkeypatch.setattr(arrivals, "board", lambda: counts)
    req = request(Broken())
    vars(req).update(output_ids=output, finished_output=False, finished=lambda: True)
    monkeypatch.setattr(arrivals, "is_health_check_generate_req", lambda req: False)
    arrivals.computed(None, [req])
    found = counts.read()
    assert (found.prompt_tokens, found.output_tokens) == counted
