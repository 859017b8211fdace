"""What every engine's Ready says in the same way."""

from __future__ import annotations

import logging

import msgspec
import pytest
from engines.test_attachment import ASSIGNMENT, ATTENTION, POSITIONS
from handoff.devices import ArrayMemory, Arrays
from handoff.reaches import Read

from pdctl.engines.ends import close_each, open_ends
from pdctl.engines.readiness import effective_of, terms_of
from pdctl.engines.session import DEVICE_ENV, checked_device
from pdctl.errors import HandoffError, LaunchError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import MemoryKind
from pdctl.handoff.transport import choice, nixl
from pdctl.topology.model import ComputeDtype, Role, Transport

CONTRACT = ASSIGNMENT.contract


def test_what_an_engine_does_not_tell_is_the_contracts() -> None:
    """An engine that names no limit of positions needs none; a theta that it tells counts."""
    told = {"rope_theta": 1e4, "max_positions": None}
    found = effective_of(CONTRACT, ATTENTION, told, ComputeDtype.FLOAT32)
    assert found.positions == msgspec.structs.replace(POSITIONS, rope_theta=1e4)
    assert (found.attention, found.compute_dtype) == (ATTENTION, ComputeDtype.FLOAT32)


def test_positions_that_are_not_scaled_are_told_as_none() -> None:
    """None of `scaling` is a value: it differs from a contract that scales."""
    positions = msgspec.structs.replace(POSITIONS, scaling={"type": "linear", "factor": 2.0})
    scaled = msgspec.structs.replace(CONTRACT, positions=positions)
    found = effective_of(scaled, ATTENTION, {"scaling": None}, ComputeDtype.FLOAT16)
    assert found.positions.scaling is None


def test_an_engines_own_terms_stand_beside_those_of_all() -> None:
    """Pages and transports are the same for every engine of this version."""
    terms = terms_of(CONTRACT, block_tokens=16)
    assert terms == {"page_tokens": 64, "block_tokens": 16, "transports": ["tcp"]}
    assert terms_of(CONTRACT, nixl=True)["transports"] == ["tcp", "nixl"]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_end_that_is_to_read_does_not_open_without_nixl(
    monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """It does not take TCP instead, without a word."""
    monkeypatch.setattr(nixl, "installed", lambda: None)
    transports = {"x0": Transport.NIXL, "y0": Transport.TCP}
    assigned = msgspec.structs.replace(ASSIGNMENT, role=role, transports=transports)
    with pytest.raises(HandoffError, match="NIXL"):
        open_ends(assigned, CounterBoard(), lambda failed: None, {})


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_end_on_a_device_that_has_too_little_says_so(
    monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """Both ends allocate at their start, what they read into too; nothing is left open."""
    monkeypatch.setattr(choice, "NixlReach", lambda *_, **__: Read().make_reach("p0"))
    transports = {"x0": Transport.NIXL}
    assigned = msgspec.structs.replace(
        ASSIGNMENT, role=role, transports=transports, device_pages=True
    )

    class Small(Arrays):
        def __call__(self, size: int) -> ArrayMemory:
            raise MemoryError(f"{size} bytes are wanted")

    with pytest.raises(MemoryError, match="bytes are wanted"):
        open_ends(assigned, CounterBoard(), lambda failed: None, {}, device=Small())


@pytest.mark.parametrize(
    ("kind", "env", "fits"),
    [
        (MemoryKind.DEVICE, {}, True),
        (MemoryKind.HOST, {}, False),
        (MemoryKind.HOST, {DEVICE_ENV: "host"}, True),
        (None, {DEVICE_ENV: "host"}, False),
    ],
)
def test_an_engine_without_the_device_that_was_named_does_not_start(
    kind: MemoryKind | None, env: dict[str, str], fits: bool
) -> None:
    """R52: the plan says where pages lie, and nothing else is done without a word."""
    made = None if kind is None else Arrays()
    if made is not None:
        made.kind = kind
    if fits:
        checked_device(made, env)
        return
    with pytest.raises(LaunchError, match="keeps KV in host memory"):
        checked_device(made, env)


def test_a_clean_up_goes_on_after_a_step_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """What failed is logged."""
    taken: list[int] = []
    with caplog.at_level(logging.ERROR):
        close_each((lambda: taken.append(1), lambda: 1 / 0, lambda: taken.append(3)))
    assert taken == [1, 3]
    assert "ZeroDivisionError" in caplog.text
