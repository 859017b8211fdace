"""The seam between pdctl and one engine, control side. One implementation per engine folder.

A *spec* is pure: it returns commands and request fields as data, and does no I/O. It runs in
the CLI, the agent and the router, so it must not import its engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Host, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A process to run, as data. Nothing in it is secret."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the host's own environment."""
    cwd: str | None = None


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """What the router tells one engine about one handoff; the body field of both legs."""

    room: int
    """Random, 62 bits."""
    ticket: str
    """`pdctl.handoff.ticket`: HMAC over room, both replicas, contract digest, expiry."""
    prefill: str
    decode: str
    sender: str
    """Where P listens: "host:port" or "[v6]:port"."""
    timeout_s: float
    """What is left of the request's one deadline, counted from the moment of arrival."""
    native: bool = False
    """The engine's own handoff carries it; `sender` is then where that meets its peers."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe command printed, run in the replica's own environment on its host."""

    engine_version: str
    pdctl_version: str
    python_version: str
    effective: dict[str, Any] | None = None
    """{"attention": {...}, "positions": {...}} as that engine reads this checkpoint; None
    where it cannot be known without loading."""
    has_nixl: bool = False
    """The environment has NIXL's Python package."""
    nixl_problem: str = ""
    """Why pages can't be read through NIXL in that environment; "" where they can."""
    problems: tuple[str, ...] = ()
    """What this engine can't serve of this checkpoint, a sentence each."""


class EngineSpec(Protocol):
    """Ten methods at most (STYLE)."""

    engine: Engine
    supported: tuple[str, str]
    """Oldest version that is supported, and the first that is not: ("0.31.3", "0.33")."""
    recomputes_last_token: bool
    """As a decode engine: imports n-1 positions (True) or all n and P's first token."""
    caches_handoffs: bool
    """As a prefill engine: a later prompt with the same prefix is not computed whole again."""
    owned_options: frozenset[str]
    """Option names, normalised (lower case, `_` for `-`), that pdctl sets itself."""
    not_with_sharing: frozenset[str]
    """Switches that leave an ordinary replica no prefix to share."""

    prefills_first: bool
    """In its own handoff (`Leg.native`) decode begins with what prefill answered."""

    constraints: frozenset[str]
    """Fields of a body by which this engine, in any role, limits which token may come: the
    first one too, where it samples just that (`first_token.py`)."""

    over_context: tuple[str, ...]
    """Words in which this engine refuses a prompt over the context where it names no parameter."""
    ranking: Mapping[str, Any]
    """Fields of a completion's body that make this engine name, at each place, the ten
    likeliest tokens by id, as the canary reads them."""

    def check(self, replica: Replica) -> list[Diagnostic]:
        """Problems of `engine_config` and of fields that this engine gives a meaning.
        Pure; called by validate, also offline. Codes start with `topology.`."""
        ...

    def probe(self, replica: Replica, host: Host) -> Command:
        """The command whose stdout is one JSON `Probe`; runs in the engine's environment,
        loads no weights, ends within seconds."""
        ...

    def command(self, replica: ReplicaPlan, host: Host, plan: Plan) -> Command:
        """The server. The agent adds PDCTL_SOCKET, PDCTL_REPLICA and PDCTL_RUN."""
        ...

    def prefill_body(self, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
        """P's copy of a client's body: one token, not streamed (DESIGN §7), and the leg."""
        ...

    def decode_body(
        self, body: dict[str, Any], leg: Leg, prefilled: bytes | None = None
    ) -> dict[str, Any]:
        """D's copy: the client's own, and the leg.

        Args:
            prefilled: prefill's answer, where decode begins with it.

        Raises:
            ProtocolViolation: that answer does not say where the KV cache is.
        """
        ...

    def abort(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """Path and JSON body of a POST that ends the leg of that room at once; None where
        closing the connection is enough."""
        ...

    def release(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """Path and JSON body of a POST that ends the handoff of a prefill leg which was answered
        while pages were still to leave; None where the answer comes after Done."""
        ...

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]:
        """(parameter, reason) for what a handoff that ends on this engine in `role` cannot
        honour; empty when all is fine. Called for every request: fast."""
        ...

    def error_message(self, status: int, body: bytes) -> tuple[str, str | None]:
        """The engine's own error answer as (message, handoff cause or None)."""
        ...

    def memory_bytes(self, replica: ReplicaPlan, contract: Contract, weights_bytes: int) -> int:
        """Estimate of what this replica needs, for validate's warning."""
        ...
