"""SGLang, control side: commands and request fields as data. Never imports sglang."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdctl.engines.bodies import error_of, has_media, one_token
from pdctl.engines.commands import environment_of, python_of, ucx_environment
from pdctl.engines.engine_config import check_one_device, whole_number
from pdctl.engines.interface import Command, Leg
from pdctl.engines.memory import needed_bytes
from pdctl.engines.sglang.options import OWNED, check_options, option_arguments
from pdctl.errors import HANDOFF_CAUSES
from pdctl.handoff.transport.tcp import parse_address
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import PAGE_TOKENS, Engine, Host, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan

PLUGIN = "pdctl"
"""Its name among the entry points of `sglang.srt.plugins` (pyproject.toml)."""

BACKEND = "pdctl"
"""The transfer backend that the plug-in adds to SGLang's own."""

NATIVE = "nixl"
"""SGLang's own."""

LEG_FIELD = "pdctl"
"""Of `custom_params`."""
CACHE_FIELD = "pdctl_cache"
"""The same; false: past the hosts' page stores."""

QUIET_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_PLUGINS": PLUGIN,
    # a health check that generates waits its turn behind a long prefill
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # else pages leave before the step that reads them has begun, which needs its events
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
"""Nothing is looked up on a hub; no plug-in but pdctl's is loaded, unless `env` names more."""

ROLES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "null"}

NOT_ON_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "echo",
    "return_token_ids",
    "return_hidden_states",
    "return_cached_tokens_details",
)
"""What constrains the first token stays: a decode replica of SGLang takes it as it is."""

RANKED = {"logprobs", "top_logprobs"}
"""SGLang's own handoff carries them for the first token, and what decode shows is taken from it."""

NOT_WITH_A_HANDOFF = {
    "echo": "the decode replica never computes the prompt",
    "return_hidden_states": "the decode replica never computes the prompt",
    "session_params": "a session's KV cache lies on one replica",
    "lora_path": "adapters are not served in this version",
    "rid": "it is pdctl's own",
}

FROM_PREFILL = {
    "logprobs": "the first token comes from the prefill replica, without its log probability",
    "top_logprobs": "the first token comes from the prefill replica, without its log probability",
    "min_tokens": "the first token comes from the prefill replica, which does not know of it",
    "return_token_ids": "the prompt's tokens are shown by the replica that computes them",
}
"""What a decode replica can't honour, since it takes its first token from P."""

CONSTRAINTS = frozenset(
    ("response_format", "json_schema", "regex", "ebnf", "tool_choice", "custom_logit_processor")
)

RID_DIGITS = 16
"""SGLang aborts by the beginning of an id: all have one length, so that none begins another."""

PROCESSES_BYTES = 2 << 30
"""Resident memory of its three processes, before any weight."""

_CAUSE = re.compile(r"\[pdctl:(\w+)\] *(.*)", re.DOTALL)


class SglangSpec:
    """`EngineSpec` for SGLang; no state."""

    engine = Engine.SGLANG
    supported = ("0.5.21", "0.5.24")
    recomputes_last_token = False
    caches_handoffs = True
    prefills_first = False
    owned_options = frozenset(OWNED)
    not_with_sharing = frozenset({"disable_radix_cache"})
    constraints = CONSTRAINTS
    over_context: tuple[str, ...] = ("model's context length", "model's maximum context length")
    ranking: Mapping[str, Any] = {"logprobs": 10, "return_token_ids": True}

    def check(self, replica: Replica) -> list[Diagnostic]:
        return check_options(replica.engine_config, replica.name) + check_one_device(replica)

    def probe(self, replica: Replica, host: Host) -> Command:
        dtype = replica.compute_dtype or "auto"
        python = python_of(replica, host)
        return Command(
            argv=(python, "-m", "pdctl.engines.sglang.probe", replica.model, dtype),
            env=_env(replica, host),
        )

    def command(self, replica: ReplicaPlan, host: Host, plan: Plan) -> Command:
        declared = replica.declared
        return Command(
            argv=(
                python_of(declared, host),
                *("-m", "pdctl.engines.sglang.server"),
                *("--model-path", replica.model),
                *("--served-model-name", plan.model),
                *("--host", replica.http_host),
                *("--port", str(replica.http_port)),
                *("--dtype", replica.compute_dtype.value),
                *("--context-length", str(plan.context_length)),
                *("--page-size", str(PAGE_TOKENS)),
                *("--disaggregation-mode", ROLES[replica.role]),
                *_backend(replica),
                *option_arguments(declared.engine_config),
            ),
            env=_env(declared, host, _own_handoff(replica, plan)),
        )

    def prefill_body(self, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
        dropped = set(NOT_ON_PREFILL) - RANKED if leg.native else NOT_ON_PREFILL
        return {**one_token(body, dropped), **_fields(body, leg)}

    def decode_body(
        self, body: dict[str, Any], leg: Leg, prefilled: bytes | None = None
    ) -> dict[str, Any]:
        return {**body, **_fields(body, leg)}

    def abort(self, room: int) -> tuple[str, dict[str, Any]] | None:
        return "/abort_request", {"rid": request_id(room)}

    def release(self, room: int) -> tuple[str, dict[str, Any]] | None:
        return None

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]:
        return list(_refusals(body, role))

    def error_message(self, status: int, body: bytes) -> tuple[str, str | None]:
        said, cause = error_of(status, body)
        named = _CAUSE.search(said)
        if named is not None and named[1] in HANDOFF_CAUSES:
            return named[2], named[1]
        return said, cause

    def memory_bytes(self, replica: ReplicaPlan, contract: Contract, weights_bytes: int) -> int:
        declared = whole_number(replica.declared.engine_config, "max_total_tokens")
        return needed_bytes(
            *(replica, contract, weights_bytes),
            processes_bytes=PROCESSES_BYTES,
            kv_tokens=declared,
        )


def request_id(room: int) -> str:
    """SGLang's id of the leg of that room, the same on both ends."""
    return f"pdctl-{room:0{RID_DIGITS}x}"


def failure_text(cause: str, message: str) -> str:
    """How the in-engine part writes a cause into SGLang's own error text, whatever surrounds
    it; `error_message` reads it back."""
    return f"[pdctl:{cause}] {message}"


def _fields(body: dict[str, Any], leg: Leg) -> dict[str, Any]:
    host, port = parse_address(leg.sender)
    return {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": leg.room,
        "rid": request_id(leg.room),
        "custom_params": {
            **(body.get("custom_params") or {}),
            LEG_FIELD: msgspec.to_builtins(leg),
            **({CACHE_FIELD: False} if body.get(CACHE_FIELD) is False else {}),
        },
    }


def _backend(replica: ReplicaPlan) -> tuple[str, ...]:
    if replica.role is Role.BOTH:
        return ()
    if not replica.native:
        return "--disaggregation-transfer-backend", BACKEND
    port = replica.side_port
    meeting = () if port is None else ("--disaggregation-bootstrap-port", str(port))
    return "--disaggregation-transfer-backend", NATIVE, *meeting


def _own_handoff(replica: ReplicaPlan, plan: Plan) -> dict[str, str]:
    """Of SGLang's own: the address of all that it listens on, and its deadlines."""
    if not replica.native:
        return {}
    timeout_s = str(math.ceil(plan.timeout_s))
    return {
        "SGLANG_HOST_IP": replica.data_host,
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": timeout_s,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": timeout_s,
        **ucx_environment(replica),
    }


def _env(replica: Replica, host: Host, more: Mapping[str, str] | None = None) -> dict[str, str]:
    chosen = ",".join(map(str, replica.devices))
    devices = {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}
    return environment_of(replica, host, {**QUIET_ENV, **devices, **(more or {})})


def _refusals(body: dict[str, Any], role: Role) -> Iterator[tuple[str, str]]:
    if has_media(body.get("messages")):
        yield "messages", "text alone is served in this version"
    if role is Role.BOTH:
        return
    for name, reason in NOT_WITH_A_HANDOFF.items():
        if body.get(name):
            yield name, reason
    if role is Role.DECODE:
        for name, reason in FROM_PREFILL.items():
            if body.get(name) or (name == "logprobs" and _is_zero(body.get(name))):
                yield name, reason


def _is_zero(asked: Any) -> bool:
    """In completions' older form: the log probability of the token itself, and no others."""
    return asked == 0 and not isinstance(asked, bool)
