"""Replicas as others see them, before they have said anything."""

from __future__ import annotations

import pytest
from engines.specs import declared, native, planned

from pdctl.handoff.counters import OF_A_HANDOFF, shown_counters
from pdctl.runtime.agent import picture
from pdctl.topology.model import Engine, Role


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_a_native_replica_that_has_not_reported_shows_no_zeros(engine: Engine) -> None:
    """Its side port stands where a sender is dialled."""
    found = picture.planned(native(engine, Role.PREFILL))
    shown = shown_counters(found.counters)
    assert {shown[name] for name in OF_A_HANDOFF} == {None}
    assert shown["prompt_tokens"] == 0
    assert found.data_port == 9200


def test_any_other_replica_begins_at_zero() -> None:
    found = picture.planned(planned(declared(Engine.VLLM)))
    assert shown_counters(found.counters)["handoffs_completed"] == 0
