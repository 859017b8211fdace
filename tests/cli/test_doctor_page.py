"""docs/doctor.md against what doctor prints."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pdctl.runtime.checks.findings import EngineFound, Findings, HostFound, PairFound, PortFound
from pdctl.runtime.hosts.survey import Device

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


@pytest.mark.parametrize(
    "kind", [Findings, HostFound, PairFound, PortFound, EngineFound, Device], ids=str
)
def test_every_key_is_on_the_page(kind: type[msgspec.Struct]) -> None:
    """A key that is added must be documented."""
    named = set(re.findall(r"`([a-z_]+)(?:\[\])?`", PAGE))
    assert {field.name for field in msgspec.structs.fields(kind)} <= named
