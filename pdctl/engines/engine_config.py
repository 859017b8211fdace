"""What every engine's adapter does with `engine_config`: it passes the engine's own options
through, and refuses by name what pdctl sets itself or can't serve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
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


class Flags(NamedTuple):
    """What a server's command line takes, by normalised name."""

    owned: Mapping[str, str]
    """Options that pdctl sets itself or refuses, and what to do instead."""
    switches: frozenset[str]
    """Those that take true or false."""
    values: frozenset[str]
    """Those that take a value."""
    unknown: str
    """What is said of any other; as `Problem.what`."""
    listing: str | None = None
    """The hint where no known option's name is near."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """Of an option by its name and the kind of its value; an engine has more to say."""
        if name in self.owned:
            return Problem("owned", "is not for engine_config", self.owned[name])
        if name in self.switches:
            is_fit = isinstance(value, bool)
            return None if is_fit else Problem("value", "must be true or false", None)
        if name not in self.values:
            near = get_close_matches(name, self.switches | self.values, n=1)
            hint = f"did you mean {near[0]}?" if near else self.listing
            return Problem("unknown", self.unknown, hint)
        if isinstance(value, bool):
            return Problem("value", "takes a value, not true or false", None)
        return None


def option_words(
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    words: Callable[[str, Any], list[str]],
) -> list[str]:
    """The command-line form of an `engine_config`, defaults included, sorted by name.

    Args:
        words: the engine's own; gets the option as it is spelled there, without dashes before
            it, and the value.
    """
    values = {**defaults, **{normalised(key): value for key, value in config.items()}}
    return [word for name in sorted(values) for word in words(name.replace("_", "-"), values[name])]


def check_shared(replica: Replica, switches: Collection[str]) -> list[Diagnostic]:
    """What keeps an ordinary replica from sharing its prefixes, where [sharing] says that it
    does.

    Args:
        switches: the engine's own; normalised names.
    """
    return [
        Diagnostic(
            code="topology.engine_config.sharing",
            summary=f'replica "{replica.name}": engine_config.{key} leaves it no prefix to share',
            replica=replica.name,
            field=f"engine_config.{key}",
            hint=f"leave {key} or [sharing] away",
        )
        for key, value in replica.engine_config.items()
        if normalised(key) in switches and value
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
