"""The table of verbs: name, where its function is, and the line that `--help` shows.

A verb's module is imported only when that verb runs, so that `pdctl --help` is quick and
pulls in no actor library. A row whose module does not exist yet is not shown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from typer.core import TyperCommand


class Verb(NamedTuple):
    name: str
    target: str
    """`module:function`; the function's signature and docstring are the command line."""
    help: str
    command_class: str = ""
    """Name in the same module; empty for Typer's own."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def load(self) -> Callable[..., Any]:
        module, _, function = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return loaded

    def load_class(self) -> type[TyperCommand]:
        if not self.command_class:
            return TyperCommand
        loaded: type[TyperCommand] = getattr(
            importlib.import_module(self.module), self.command_class
        )
        return loaded


def _verb(name: str, help: str, command_class: str = "") -> Verb:
    """By custom a verb's function bears its name, in a file of that name."""
    word = name.replace("-", "_")
    return Verb(name, f"pdctl.cli.{word}:{word}", help, command_class)


ROWS = (
    _verb("init", "Write a commented starter topology."),
    _verb("validate", "Check everything that can be known before launch."),
    _verb("demo-model", "Make the small checkpoint that the demo uses."),
    _verb("fingerprint", "Show the contract of one local checkpoint."),
    _verb("plan", "Show what `up` would run: commands, ports and pairs."),
    _verb("up", "Launch a cluster and wait until every pair has answered."),
    _verb("ps", "Show replicas, router and pairs of a running cluster."),
    _verb("logs", "Show the replicas' logs."),
    _verb("restart", "Drain, stop and start one replica."),
    _verb("drain", "Send no new requests to one replica."),
    _verb("down", "Stop everything that `up` started, and prove it."),
    _verb("bench", "Measure every path over prompt lengths.", "BenchCommand"),
    _verb("doctor", "Test each host, and each pair's link."),
)

VERBS = {verb.name: verb for verb in ROWS if find_spec(verb.module) is not None}
