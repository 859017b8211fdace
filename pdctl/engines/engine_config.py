"""What every engine's adapter does with `engine_config`: it passes the engine's own options
through, and refuses by name what pdctl sets itself or can't serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Replica


class Problem(NamedTuple):
    """Why one entry can't be passed on."""

    code: str
    what: str
    """As a sentence goes on after the option's name."""
    hint: str | None


def normalised(key: str) -> str:
    """One spelling of an option's name: `prefill-step-size` is `prefill_step_size`."""
    return key.lower().replace("-", "_")


def whole_number(config: Mapping[str, Any], name: str) -> int | None:
    """The value of a normalised name, where it is there and a whole number."""
    value = {normalised(key): value for key, value in config.items()}.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def check_one_device(replica: Replica) -> list[Diagnostic]:
    """What engines that choose among several devices say of a replica that names two."""
    if len(replica.devices) < 2:
        return []
    return [
        Diagnostic(
            code="topology.devices",
            summary=f'replica "{replica.name}": it has {len(replica.devices)} devices, '
            "and one replica runs on one device in this version",
            replica=replica.name,
            field="devices",
            hint="write a replica for each device",
        )
    ]


def check_config(
    config: Mapping[str, Any], replica: str, judge: Callable[[str, Any], Problem | None]
) -> list[Diagnostic]:
    """Every entry that can't be passed on, in the file's order.

    Args:
        judge: the engine's own; gets the normalised name and the value.
    """
    found = []
    for key, value in config.items():
        problem = judge(normalised(key), value)
        if problem is not None:
            found.append(
                Diagnostic(
                    code=f"topology.engine_config.{problem.code}",
                    summary=f'replica "{replica}": engine_config.{key} {problem.what}',
                    replica=replica,
                    field=f"engine_config.{key}",
                    hint=problem.hint,
                )
            )
    return found
