"""SGLang's control side: commands, options and bodies as exact values."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import msgspec
import pytest
from engines import specs
from engines.specs import CONTRACT, plan_of, planned

from pdctl.engines.registry import spec_for
from pdctl.engines.sglang.spec import SglangSpec, failure_text, request_id
from pdctl.topology.model import Engine, Host, Replica, Role

SPEC = SglangSpec()
LEG = msgspec.structs.replace(specs.LEG, sender="[fd00::1]:9000")
FIELDS = {
    "bootstrap_host": "fd00::1",
    "bootstrap_port": 9000,
    "bootstrap_room": 7,
    "rid": "pdctl-0000000000000007",
    "custom_params": {"pdctl": msgspec.to_builtins(LEG)},
}
HOST = Host(name="local", python="/venv/bin/python")

declared = partial(specs.declared, Engine.SGLANG)


def argv_of(replica: Replica) -> tuple[str, ...]:
    plan = planned(replica)
    return SPEC.command(plan, HOST, plan_of(plan)).argv


def test_the_server_is_started_with_sglangs_own_options() -> None:
    """R60: golden; on loopback, without a key on the command line; `_` becomes `-`, tables
    become JSON, lists several values, and a switch that is off is left away."""
    config = {
        "device": "cpu",
        "disable_cuda_graph": True,
        "log_requests": False,
        "chunked-prefill-size": 128,
        "cuda_graph_config": {"level": 0},
        "cuda_graph_bs_decode": [1, 2],
    }
    assert argv_of(declared(engine_config=config)) == (
        "/venv/bin/python",
        *("-m", "pdctl.engines.sglang.server"),
        *("--model-path", "/m/qwen"),
        *("--served-model-name", "qwen"),
        *("--host", "127.0.0.1"),
        *("--port", "9100"),
        *("--dtype", "float32"),
        *("--context-length", "2048"),
        *("--page-size", "64"),
        *("--disaggregation-mode", "prefill"),
        *("--disaggregation-transfer-backend", "pdctl"),
        *("--chunked-prefill-size", "128"),
        *("--cuda-graph-bs-decode", "1", "2"),
        *("--cuda-graph-config", '{"level": 0}'),
        *("--device", "cpu"),
        "--disable-cuda-graph",
        "--enable-cache-report",
    )


@pytest.mark.parametrize(
    ("role", "mode"), [(Role.DECODE, "decode"), (Role.PREFILL, "prefill"), (Role.BOTH, "null")]
)
def test_an_ordinary_replica_has_no_transfer_backend(role: Role, mode: str) -> None:
    argv = argv_of(declared(role))
    assert argv[argv.index("--disaggregation-mode") + 1] == mode
    assert ("--disaggregation-transfer-backend" in argv) == (role is not Role.BOTH)


def test_environment_of_a_replica_wins_and_devices_are_chosen() -> None:
    """R37: nothing is looked up on a hub, and no plug-in but pdctl's is loaded."""
    host = Host(name="local", python="/a/python", env={"A": "1", "B": "1"})
    replica = declared(python="/b/python", env={"B": "2"}, devices=(1,))
    command = SPEC.probe(replica, host)
    assert command.argv == ("/b/python", "-m", "pdctl.engines.sglang.probe", "/m/qwen", "auto")
    assert (command.env["A"], command.env["B"]) == ("1", "2")
    assert command.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert (command.env["HF_HUB_OFFLINE"], command.env["SGLANG_PLUGINS"]) == ("1", "pdctl")


def test_prefill_copies_ask_for_one_token_and_keep_what_constrains_it() -> None:
    """U23: max_completion_tokens is bounded too. Decode takes the token as it is."""
    body = {
        "prompt": "x",
        "max_completion_tokens": 900,
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "logprobs": 3,
        "temperature": 0.5,
        "regex": "[a-z]+",
    }
    assert SPEC.prefill_body(body, LEG) == {
        "prompt": "x",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "n": 1,
        "temperature": 0.5,
        "regex": "[a-z]+",
        **FIELDS,
    }
    assert body["stream"] is True


def test_decode_copies_are_the_clients_own() -> None:
    """Parameters of a client's own logit processor stay beside the leg."""
    body = {"prompt": "x", "stream": True, "custom_params": {"mine": 1}}
    assert SPEC.decode_body(body, LEG) == {
        **body,
        **FIELDS,
        "custom_params": {"mine": 1, **FIELDS["custom_params"]},
    }


def test_both_legs_are_told_where_nothing_is_to_be_kept() -> None:
    """`pdctl_cache` false: they go past their hosts' page stores."""
    body = {"prompt": "x", "pdctl_cache": False}
    for asked in (SPEC.prefill_body(body, LEG), SPEC.decode_body(body, LEG)):
        assert asked["custom_params"] == {**FIELDS["custom_params"], "pdctl_cache": False}


def test_aborts_name_an_id_that_begins_no_other() -> None:
    """SGLang ends every request whose id begins so."""
    assert SPEC.abort(7) == ("/abort_request", {"rid": "pdctl-0000000000000007"})
    ids = {request_id(room) for room in (1, 16, 17, (1 << 62) - 1)}
    assert len({len(each) for each in ids}) == 1


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"rid": "mine"}, "rid"),
        ({"messages": [{"content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ],
)
def test_what_a_handoff_cannot_honour_is_refused_by_parameter(
    body: dict[str, object], parameter: str
) -> None:
    """R66: before anything is scheduled."""
    assert [name for name, _ in SPEC.refusals(body, Role.DECODE)] == [parameter]


def test_an_ordinary_replica_and_a_prefill_replica_take_log_probabilities() -> None:
    """They are no business of the KV cache; R65: nor is a format."""
    body = {
        "logprobs": True,
        "top_logprobs": 2,
        "min_tokens": 2,
        "response_format": {"type": "json_object"},
    }
    assert SPEC.refusals(body, Role.BOTH) == []
    assert SPEC.refusals(body, Role.PREFILL) == []
    off = {"logprobs": False, "top_logprobs": 0, "echo": False}
    assert SPEC.refusals(off, Role.DECODE) == []


def test_causes_survive_in_sglangs_own_error_texts() -> None:
    """Its scheduler puts a sentence of its own around what a backend raises."""
    text = failure_text("over_budget", "a prompt of 9 tokens does not fit")
    around = f"Prefill bootstrap failed for request rank=0 with exception {text}"
    said = msgspec.json.encode({"object": "error", "message": around, "code": 500})
    assert SPEC.error_message(500, said) == ("a prompt of 9 tokens does not fit", "over_budget")
    own = b'{"object": "error", "message": "max_tokens must be positive", "code": 400}'
    assert SPEC.error_message(400, own) == ("max_tokens must be positive", None)
    unknown = failure_text("never", "heard of it")
    assert SPEC.error_message(500, msgspec.json.encode({"detail": unknown})) == (unknown, None)
    assert SPEC.error_message(500, b"") == ("HTTP 500 without a body", None)


def test_memory_counts_the_declared_tokens_or_two_contexts() -> None:
    """Float32 compute doubles weights and cache."""
    plain = SPEC.memory_bytes(planned(declared()), CONTRACT, 1000)
    given = declared(engine_config={"max_total_tokens": 5})
    few = SPEC.memory_bytes(planned(given), CONTRACT, 1000)
    assert few - (2 << 30) == 2 * (1000 + 5 * CONTRACT.token_kv_bytes)
    assert plain - few == 2 * (2 * 1024 - 5) * CONTRACT.token_kv_bytes


def test_the_control_side_never_imports_the_engine() -> None:
    """The CLI, the agent and the router run where no engine is installed."""
    code = (
        "import sys; from pdctl.engines.registry import spec_for;"
        "from pdctl.topology.model import Engine; spec_for(Engine.SGLANG);"
        "sys.exit(any(m.split('.')[0] in ('sglang', 'torch') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert spec_for(Engine.SGLANG).engine is Engine.SGLANG
