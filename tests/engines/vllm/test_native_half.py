"""What is added to vLLM's own handoff in its scheduler, against stand-ins for vLLM's requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engines.specs import LEG

from pdctl.engines.vllm.native_half import Counted, NativeHalf
from pdctl.errors import PeerLost

BLOCK_BYTES = 1000


def request(name: str, params: dict[str, Any] | None, tokens: int = 130) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=tokens,
        kv_transfer_params=params,
        output_token_ids=[1],
        status=SimpleNamespace(name="RUNNING"),
    )


def prefill(name: str = "p") -> Any:
    params = {"do_remote_decode": True, "pdctl": msgspec.to_builtins(LEG)}
    return request(name, params)


def decode(name: str = "d") -> Any:
    params = {"do_remote_prefill": True, "pdctl": msgspec.to_builtins(LEG)}
    return request(name, params)


def ended(asked: Any, status: str) -> Any:
    asked.status = SimpleNamespace(name=status)
    return asked


def schedule(*names: str) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


@pytest.fixture
def half() -> NativeHalf:
    return NativeHalf(BLOCK_BYTES, "host_bytes")


def counts(half: NativeHalf) -> dict[str, int]:
    """What the step counts with the one peer, added up."""
    total: dict[str, int] = {}
    for counted in half.step(schedule()).counted:
        assert counted.peer == LEG.prefill
        for name, amount in counted.amounts.items():
            total[name] = total.get(name, 0) + amount
    return total


def test_a_handoff_is_counted_where_its_blocks_are_read(half: NativeHalf) -> None:
    asked = decode()
    half.arrived(asked)
    half.placed(asked, 3, 130)
    assert half.step(schedule()).counted == [
        Counted(peer="p0", amounts={"handoffs_active": 1}),
    ]
    assert half.received({"d"}) == {"d"}
    assert counts(half) == {
        "handoffs_active": -1,
        "handoffs_completed": 1,
        "imported_tokens": 130,
        "host_bytes": 3 * BLOCK_BYTES,
    }
    half.finished(ended(asked, "FINISHED_STOPPED"))
    assert counts(half) == {}


@pytest.mark.parametrize(
    ("status", "name", "told"),
    [("FINISHED_ERROR", "handoffs_failed", 1), ("FINISHED_ABORTED", "handoffs_cancelled", 0)],
)
def test_a_reading_that_does_not_end_well_is_counted_as_what_it_was(
    half: NativeHalf, status: str, name: str, told: int
) -> None:
    """R67: vLLM's answer is a bare 500, so that the cause is told beside it. Its blocks are
    waited for all the same, whoever ended the request (U1)."""
    asked = decode()
    half.arrived(asked)
    half.placed(asked, 3, 130)
    half.finished(ended(asked, status))
    step = half.step(schedule())
    assert [(f.room, f.leg, f.cause) for f in step.failed] == [
        (LEG.room, "decode", PeerLost.cause)
    ] * told
    amounts = [counted.amounts for counted in step.counted]
    assert amounts == [{"handoffs_active": 1}, {"handoffs_active": -1, name: 1}]
    assert half.received({"d"}) == {"d"}
    assert counts(half) == {}


def test_a_request_that_the_scheduler_does_not_wait_for_is_kept_from_it(half: NativeHalf) -> None:
    """U14: aborted before it had blocks, with a prefill replica that is gone, it would end
    vLLM's engine."""
    asked = decode()
    half.arrived(asked)
    half.finished(ended(asked, "FINISHED_ABORTED"))
    assert half.received({"d"}) == set()


def test_load_and_progress_are_told_by_room_at_both_ends(half: NativeHalf) -> None:
    """R5: a prompt that is still computed counts as progress, too."""
    sent, read = prefill(), decode()
    half.arrived(sent)
    half.arrived(read)
    half.arrived(request("own", None, tokens=5))
    load = half.step(schedule("p", "own")).load
    assert (load.requests_active, load.prompt_tokens, load.decoding) == (3, 265, [LEG.room])
    half.finished(ended(sent, "FINISHED_LENGTH_CAPPED"))
    load = half.step(schedule("own")).load
    assert (load.requests_active, load.output_tokens, load.decoded) == (2, 1, [LEG.room])


def test_a_leg_that_is_none_is_an_ordinary_request(half: NativeHalf) -> None:
    """R34: what comes in a body never ends the engine."""
    asked = request("r", {"do_remote_prefill": True, "pdctl": {"room": "x"}})
    half.arrived(asked)
    half.placed(asked, 3, 130)
    half.finished(ended(asked, "FINISHED_ERROR"))
    step = half.step(schedule("r"))
    assert (step.counted, step.failed) == ([], [])
