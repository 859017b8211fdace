"""What every engine's adapter does with `engine_config`: it passes the engine's own options
through, and refuses by name what pdctl sets itself or can't serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pdctl.topology.diagnostics import Diagnostic


class Problem(NamedTuple):
    """Why one entry can't be passed on."""

    code: str
    what: str
    """As a sentence goes on after the option's name."""
    hint: str | None


def normalised(key: str) -> str:
    """One spelling of an option's name: `prefill-step-size` is `prefill_step_size`."""
    return key.lower().replace("-", "_")


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
