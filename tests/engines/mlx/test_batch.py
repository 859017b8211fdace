"""What a step of the batch does with one request's failure, without a model."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from pdctl.engines.mlx import batch as module
from pdctl.engines.mlx import versions
from pdctl.engines.mlx.batch import Batch
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.legs import PrefillLeg
from pdctl.engines.mlx.versions import Prompt
from pdctl.errors import HandoffCancelled
from pdctl.handoff.counters import CounterBoard

UID = 7


class FailingLeg(PrefillLeg):
    """Fails where positions leave the caches."""

    def __init__(self, error: Exception) -> None:
        self.error, self.shared = error, None

    def computed(self, caches: list[Any], row: int, positions: int) -> None:
        raise self.error


class Generator:
    """One prompt in the making, for ever."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def next(self) -> tuple[list[Any], list[Any]]:
        return [], []


class Detokenizer:
    """A table that is costly to make, and the text of one answer."""

    def __init__(self) -> None:
        self.table = {1: "one"}
        self.text = ""

    def reset(self) -> None:
        self.text = ""


def test_answers_share_the_detokenizers_table_alone() -> None:
    """mlx-lm 0.31.3 makes that table anew wherever its tokenizer is asked for a detokenizer."""
    first = Detokenizer()
    first.text = "said"
    second = versions.fresh(first)
    assert second.table is first.table
    assert (first.text, second.text) == ("said", "")


def ended_by(error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What a call ends with whose leg raises `error` in a step."""
    monkeypatch.setattr(module.library, "BatchGenerator", Generator)
    monkeypatch.setattr(module.versions, "insert", lambda *_, **__: UID)
    monkeypatch.setattr(module.versions, "prefilling", lambda _: [(UID, 0, 3, [])])
    args = SimpleNamespace(
        prompt_cache_bytes=None, decode_concurrency=1, prompt_concurrency=1, prefill_step_size=8
    )
    provider = SimpleNamespace(
        cli_args=args,
        tokenizer=SimpleNamespace(detokenizer=Detokenizer()),
        model=SimpleNamespace(layers=[]),
        model_key="m",
    )
    ends: list[BaseException | None] = []
    batch = Batch(provider, None, CounterBoard(), lambda _, end: ends.append(end))
    prompt = Prompt(
        tokens=[1, 2, 3], segments=[[1, 2, 3]], segment_kinds=["user"], initial_state="x"
    )
    call = Call(prompt, SimpleNamespace(max_tokens=1), room=5, keeps_prefix=False)
    call.context = SimpleNamespace(prompt_cache_count=0)
    call.leg = FailingLeg(error)
    batch.insert(call)
    batch.step()
    return ends


def test_a_handoff_that_was_cancelled_is_no_failure_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The decode leg refuses a request while prefill computes: an everyday 400, no traceback."""
    error = HandoffCancelled("room 5 was cancelled on the sender")
    assert ended_by(error, monkeypatch) == [error]
    assert caplog.records == []


def test_any_other_failure_ends_that_request_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R34: with its traceback."""
    error = RuntimeError("std::bad_cast")
    with caplog.at_level(logging.ERROR):
        assert ended_by(error, monkeypatch) == [error]
    assert caplog.records[0].exc_info is not None
