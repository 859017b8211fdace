"""MLX, control side: commands and request fields as data. Never imports mlx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdctl.engines.bodies import error_of, has_media, one_token
from pdctl.engines.commands import environment_of, python_of
from pdctl.engines.interface import Command, Leg
from pdctl.engines.memory import needed_bytes
from pdctl.engines.mlx.options import OWNED, check_options, option_arguments
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Host, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan

ABORT_PATH = "/pdctl/abort"

OFFLINE_ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Checkpoints are directories: nothing is ever looked up on a hub."""

NOT_ON_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "echo")

MOST_LOGPROBS = 5
"""Alternatives per token that completions' older form may ask for."""

PROCESS_BYTES = 400 << 20
"""Resident memory of Python, mlx-lm and its tokenizer, before any weight."""


class MlxSpec:
    """`EngineSpec` for MLX; no state."""

    engine = Engine.MLX
    supported = ("0.31.3", "0.33")
    recomputes_last_token = True
    caches_handoffs = False
    prefills_first = False
    owned_options = frozenset(OWNED)
    not_with_sharing: frozenset[str] = frozenset()
    constraints: frozenset[str] = frozenset()
    over_context: tuple[str, ...] = ()
    ranking: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 10}

    def check(self, replica: Replica) -> list[Diagnostic]:
        found = check_options(replica.engine_config, replica.name)
        if replica.devices:
            found.append(
                Diagnostic(
                    code="topology.devices",
                    summary=f'replica "{replica.name}": MLX has no devices to choose from',
                    replica=replica.name,
                    field="devices",
                    hint="remove devices; MLX uses its machine's one device",
                )
            )
        return found

    def probe(self, replica: Replica, host: Host) -> Command:
        return Command(
            argv=(python_of(replica, host), "-m", "pdctl.engines.mlx.probe", replica.model),
            env=environment_of(replica, host, OFFLINE_ENV),
        )

    def command(self, replica: ReplicaPlan, host: Host, plan: Plan) -> Command:
        declared = replica.declared
        return Command(
            argv=(
                python_of(declared, host),
                *("-m", "pdctl.engines.mlx.server"),
                *("--model", replica.model),
                *("--host", replica.http_host),
                *("--port", str(replica.http_port)),
                *option_arguments(declared.engine_config),
            ),
            env=environment_of(declared, host, OFFLINE_ENV),
        )

    def prefill_body(self, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
        return {**one_token(body, NOT_ON_PREFILL), "pdctl": msgspec.to_builtins(leg)}

    def decode_body(
        self, body: dict[str, Any], leg: Leg, prefilled: bytes | None = None
    ) -> dict[str, Any]:
        return {**body, "pdctl": msgspec.to_builtins(leg)}

    def abort(self, room: int) -> tuple[str, dict[str, Any]] | None:
        return ABORT_PATH, {"room": room}

    def release(self, room: int) -> tuple[str, dict[str, Any]] | None:
        return None

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]:
        return list(body_refusals(body))

    def error_message(self, status: int, body: bytes) -> tuple[str, str | None]:
        return error_of(status, body)

    def memory_bytes(self, replica: ReplicaPlan, contract: Contract, weights_bytes: int) -> int:
        return needed_bytes(replica, contract, weights_bytes, processes_bytes=PROCESS_BYTES)


def body_refusals(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What this server cannot do for any request; a handoff adds nothing to it.

    `seed` is honoured (a sampler key per request), and so are tools, logprobs and stop strings.
    """
    if body.get("echo"):
        yield "echo", "MLX does not repeat the prompt; send echo = false"
    if body.get("tool_choice") not in (None, "auto", "none"):
        yield "tool_choice", 'the model chooses by itself on MLX; send "auto" or "none"'
    yield from _logprobs_refusals(body.get("logprobs"))
    for name in ("draft_model", "adapters"):
        if body.get(name) is not None:
            yield name, f"{name} is not served by MLX replicas in this version"
    if body.get("response_format") and body["response_format"] != {"type": "text"}:
        yield "response_format", "MLX cannot constrain its output to a format"
    if has_media(body.get("messages")):
        yield "messages", "text alone is served in this version"


def _logprobs_refusals(asked: Any) -> Iterator[tuple[str, str]]:
    """A whole number is completions' older form, of OpenAI's own range."""
    whole = isinstance(asked, int) and not isinstance(asked, bool)
    if whole and not 0 <= asked <= MOST_LOGPROBS:
        yield "logprobs", f"it must be true, false, or 0 to {MOST_LOGPROBS}"
