"""Whether an engine loaded what the contract says (DESIGN §5: effective values count). Pure."""

from __future__ import annotations

import msgspec

from pdctl.engines.channel import Effective, Ready
from pdctl.topology.contract import Contract
from pdctl.topology.plan import ReplicaPlan


def disagreements(ready: Ready, contract: Contract, plan: ReplicaPlan) -> list[str]:
    """A sentence per field in which the running engine differs; empty when it agrees."""
    found = list(_effective(ready.effective, contract, plan))
    for field, wanted, got in (
        ("engine", plan.engine.value, ready.engine.value),
        ("http_port", plan.http_port, ready.http_port),
        ("data_port", plan.data_port, ready.data_port),
    ):
        if wanted != got:
            found.append(_sentence(field, wanted, got))
    return found


def _effective(effective: Effective, contract: Contract, plan: ReplicaPlan) -> list[str]:
    found = [
        _sentence(f"{part}.{name}", getattr(declared, name), getattr(loaded, name))
        for part, declared, loaded in (
            ("attention", contract.attention, effective.attention),
            ("positions", contract.positions, effective.positions),
        )
        for name in declared.__struct_fields__
        if getattr(declared, name) != getattr(loaded, name)
    ]
    if effective.compute_dtype is not plan.compute_dtype:
        found.append(
            _sentence("compute_dtype", plan.compute_dtype.value, effective.compute_dtype.value)
        )
    return found


def _sentence(field: str, wanted: object, got: object) -> str:
    return f"{field} should be {_text(wanted)}, the engine has {_text(got)}"


def _text(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
