"""vLLM's control side: commands, options and bodies as exact values."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import msgspec
import pytest
from engines import specs
from engines.specs import CONTRACT, LEG, LONG_ANSWER, ONE_TOKEN, plan_of, planned

from pdctl.engines.registry import spec_for
from pdctl.engines.vllm.spec import VllmSpec, transfer_config
from pdctl.topology.model import ComputeDtype, Engine, Host, OnFailure, Role
from pdctl.topology.sharing import StorePlan

SPEC = VllmSpec()
PARAMS = {"pdctl": msgspec.to_builtins(LEG)}
HOST = Host(name="local", python="/venv/bin/python")

declared = partial(specs.declared, Engine.VLLM)


def test_the_server_is_started_with_vllms_own_options() -> None:
    """R60: golden; on loopback, `_` becomes `-`, tables become JSON, false becomes `--no-`."""
    config = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "block_size": 64,
        "compilation_config": {"level": 0},
        "cudagraph_capture_sizes": [1, 2],
    }
    replica = planned(declared(engine_config=config))
    assert SPEC.command(replica, HOST, plan_of(replica)).argv == (
        "/venv/bin/python",
        *("-m", "pdctl.engines.vllm.server"),
        *("--model", "/m/qwen"),
        *("--served-model-name", "qwen"),
        *("--host", "127.0.0.1"),
        *("--port", "9100"),
        *("--dtype", "float32"),
        *("--max-model-len", "2048"),
        "--kv-transfer-config",
        '{"kv_connector": "PdctlConnector", '
        '"kv_connector_module_path": "pdctl.engines.vllm.connector", "kv_role": "kv_both", '
        '"kv_load_failure_policy": "fail", '
        '"kv_connector_extra_config": {"http_port": 9100, "role": "prefill"}}',
        *("--block-size", "64"),
        *("--compilation-config", '{"level": 0}'),
        *("--cudagraph-capture-sizes", "1", "2"),
        "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
    )


@pytest.mark.parametrize(
    ("role", "on_failure", "policy"),
    [
        (Role.DECODE, OnFailure.RECOMPUTE, "recompute"),
        (Role.DECODE, OnFailure.ERROR, "fail"),
        (Role.PREFILL, OnFailure.RECOMPUTE, "fail"),
    ],
)
def test_only_a_decode_replica_recomputes_and_only_where_asked(
    role: Role, on_failure: OnFailure, policy: str
) -> None:
    """R72: a failed load is never recomputed silently."""
    replica = planned(declared(role))
    config = json.loads(transfer_config(replica, plan_of(replica, on_failure)))
    assert config["kv_load_failure_policy"] == policy


@pytest.mark.parametrize(
    ("role", "shares", "policy"),
    [
        (Role.BOTH, True, "recompute"),
        (Role.PREFILL, True, "fail"),
        (Role.DECODE, False, "fail"),
    ],
)
def test_who_computes_prompts_looks_into_its_hosts_page_store(
    role: Role, shares: bool, policy: str
) -> None:
    """What the store no longer has an ordinary replica computes; a handoff fails of it. Decode's
    scheduler need not know of a store."""
    replica = planned(declared(role))
    stores = (StorePlan(host="local", buffer_bytes=1 << 30),)
    plan = msgspec.structs.replace(plan_of(replica), stores=stores)
    config = json.loads(transfer_config(replica, plan))
    assert config["kv_connector_extra_config"].get("shares", False) == shares
    assert config["kv_load_failure_policy"] == policy


def test_environment_of_a_replica_wins_and_devices_are_chosen() -> None:
    """Nothing of it is looked up on a hub, and nothing is reported to anyone."""
    host = Host(name="local", python="/a/python", env={"A": "1", "B": "1"})
    replica = declared(python="/b/python", env={"B": "2"}, devices=(1,))
    command = SPEC.probe(replica, host)
    assert command.argv == ("/b/python", "-m", "pdctl.engines.vllm.probe", "/m/qwen", "auto", "0")
    assert (command.env["A"], command.env["B"]) == ("1", "2")
    assert command.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert command.env["HF_HUB_OFFLINE"] == command.env["VLLM_NO_USAGE_STATS"] == "1"


def test_the_probe_is_told_what_decides_the_blocks_layout() -> None:
    """Compute type and block size."""
    replica = declared(compute_dtype=ComputeDtype.FLOAT32, engine_config={"block-size": 32})
    assert SPEC.probe(replica, HOST).argv[-2:] == ("float32", "32")


def test_prefill_copies_ask_for_one_token() -> None:
    """U23: max_completion_tokens is bounded too; `min_tokens` over it would be a 400."""
    assert SPEC.prefill_body(LONG_ANSWER, LEG) == {**ONE_TOKEN, "kv_transfer_params": PARAMS}
    assert LONG_ANSWER["stream"] is True


def test_both_legs_are_told_where_nothing_is_to_be_kept() -> None:
    """`pdctl_cache` false: they go past their hosts' page stores."""
    body, params = {"prompt": "x", "pdctl_cache": False}, {**PARAMS, "pdctl_cache": False}
    assert SPEC.prefill_body(body, LEG)["kv_transfer_params"] == params
    assert SPEC.decode_body(body, LEG)["kv_transfer_params"] == params


def test_decode_copies_are_the_clients_own_and_closing_aborts() -> None:
    """The decode engine formats what the user sees."""
    body = {"prompt": "x", "stream": True, "logprobs": 2}
    assert SPEC.decode_body(body, LEG) == {**body, "kv_transfer_params": PARAMS}
    assert SPEC.abort(7) is None
    path, body = SPEC.release(7) or ("", {})
    assert path == "/v1/completions"
    assert (body["max_tokens"], body["kv_transfer_params"]) == (1, {"pdctl": {"release": 7}})


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 3}, "prompt_logprobs"),
        ({"kv_transfer_params": {"pdctl": {}}}, "kv_transfer_params"),
        ({"best_of": 2}, "best_of"),
        ({"messages": [{"content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ],
)
def test_what_a_handoff_cannot_honour_is_refused_by_parameter(
    body: dict[str, object], parameter: str
) -> None:
    """R66: before anything is scheduled."""
    assert [name for name, _ in SPEC.refusals(body, Role.DECODE)] == [parameter]


def test_what_vllm_honours_is_not_refused() -> None:
    """R65: response_format; and a seed, tools, logprobs and stop strings."""
    body = {
        "response_format": {"type": "json_object"},
        "seed": 3,
        "tools": [{"type": "function"}],
        "logprobs": True,
        "stop": ["x"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    assert SPEC.refusals(body, Role.PREFILL) == []


def test_error_bodies_are_understood() -> None:
    """Text and cause survive, in each of the forms that vLLM's server uses."""
    ours = b'{"error": {"message": "gone", "type": "x", "code": "peer_lost"}}'
    assert SPEC.error_message(502, ours) == ("gone", "peer_lost")
    own = b'{"error": {"message": "max_tokens", "type": "BadRequestError", "code": 400}}'
    assert SPEC.error_message(400, own) == ("max_tokens", None)
    assert SPEC.error_message(404, b'{"detail": "Not Found"}') == ("Not Found", None)
    assert SPEC.error_message(500, b"") == ("HTTP 500 without a body", None)
    assert SPEC.error_message(500, b"[1]")[1] is None


def test_memory_counts_the_declared_cache_or_two_contexts() -> None:
    """Float32 compute doubles the weights; a declared cache is taken as it is."""
    plain = SPEC.memory_bytes(planned(declared()), CONTRACT, 1000)
    given = declared(engine_config={"kv_cache_memory_bytes": 5})
    assert SPEC.memory_bytes(planned(given), CONTRACT, 1000) - 5 - 2000 == 2 << 30
    assert plain - (2 << 30) - 2000 == 2 * 2 * 1024 * CONTRACT.token_kv_bytes


def test_the_control_side_never_imports_the_engine() -> None:
    """The CLI, the agent and the router run where no engine is installed."""
    code = (
        "import sys; from pdctl.engines.registry import spec_for;"
        "from pdctl.topology.model import Engine; spec_for(Engine.VLLM);"
        "sys.exit(any(m.split('.')[0] in ('vllm', 'torch') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert spec_for(Engine.VLLM).engine is Engine.VLLM
