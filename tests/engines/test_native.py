"""The engines' own handoffs, control side: commands and bodies as exact values."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from engines.specs import CONTRACT, LEG, ONE_TOKEN, native, plan_of

from pdctl.engines.channel import Assignment, HandoffSettings
from pdctl.engines.ends import open_ends
from pdctl.engines.readiness import terms_of
from pdctl.engines.registry import spec_for
from pdctl.errors import ProtocolViolation
from pdctl.handoff.counters import CounterBoard
from pdctl.topology.model import ComputeDtype, Engine, Host, OnFailure, Role

NATIVE_LEG = msgspec.structs.replace(LEG, native=True)
HOST = Host(name="local", python="/venv/bin/python")
WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 9200}


def command(engine: Engine, role: Role, data_host: str = "127.0.0.1") -> tuple[str, dict[str, str]]:
    """Its argv as one text, and its environment."""
    replica = native(engine, role, data_host)
    made = spec_for(engine).command(replica, HOST, plan_of(replica))
    return " ".join(made.argv), made.env


@pytest.mark.parametrize(
    ("role", "kind"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")]
)
def test_vllm_loads_its_own_connector_and_meets_peers_at_the_side_port(
    role: Role, kind: str
) -> None:
    """R60, R72: at the address of the plan; a load that fails is an error."""
    argv, env = command(Engine.VLLM, role)
    config = json.loads(argv.partition("--kv-transfer-config ")[2].partition(" --")[0])
    assert config == {
        "kv_connector": "NativeConnector",
        "kv_connector_module_path": "pdctl.engines.vllm.native",
        "kv_role": kind,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"http_port": 9100},
    }
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9200"


@pytest.mark.parametrize(
    ("role", "backend"),
    [
        (
            Role.PREFILL,
            "--disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 9200",
        ),
        (Role.DECODE, "--disaggregation-transfer-backend nixl"),
    ],
)
def test_sglang_takes_its_own_backend_and_the_cluster_s_deadline(role: Role, backend: str) -> None:
    """R3, R60."""
    argv, env = command(Engine.SGLANG, role)
    assert backend in argv
    assert ("bootstrap-port" in argv) == (role is Role.PREFILL)
    assert env["SGLANG_HOST_IP"] == "127.0.0.1"
    assert env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "60"
    assert env["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "60"


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_ucx_keeps_to_loopback_where_all_peers_are_here(engine: Engine) -> None:
    """R60: it would listen on every interface."""
    assert command(engine, Role.PREFILL)[1]["UCX_NET_DEVICES"] == "lo"
    env = command(engine, Role.PREFILL, "10.0.0.1")[1]
    assert "UCX_NET_DEVICES" not in env
    assert "10.0.0.1" in env.values()


def test_vllm_s_decode_is_told_where_prefill_said_that_its_blocks_are() -> None:
    spec = spec_for(Engine.VLLM)
    assert spec.prefills_first
    leg: dict[str, Any] = {"pdctl": msgspec.to_builtins(NATIVE_LEG)}
    sent = spec.prefill_body({"prompt": "x", "temperature": 0.5, "min_tokens": 2}, NATIVE_LEG)
    params = sent.pop("kv_transfer_params")
    assert sent == ONE_TOKEN
    assert params["do_remote_decode"] is True
    assert params["pdctl"] == leg["pdctl"]
    answer = json.dumps({"choices": [], "kv_transfer_params": WHERE}).encode()
    assert spec.decode_body({"prompt": "x"}, NATIVE_LEG, answer) == {
        "prompt": "x",
        "kv_transfer_params": {**WHERE, **leg},
    }


@pytest.mark.parametrize(
    "answer",
    [b"{}", b"[]", b"x", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {"a": 1}}'],
)
def test_an_answer_without_blocks_is_never_computed_in_silence(answer: bytes) -> None:
    """R72: vLLM's decode would compute the whole prompt."""
    with pytest.raises(ProtocolViolation, match="does not say where"):
        spec_for(Engine.VLLM).decode_body({"prompt": "x"}, NATIVE_LEG, answer)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_native_replica_opens_no_end_of_pdctl_s_own(role: Role) -> None:
    """Nothing listens for pages, and no budget is set aside."""
    assigned = Assignment(
        cluster="c",
        replica="p0",
        role=role,
        key=bytes(32),
        contract=CONTRACT,
        compute_dtype=ComputeDtype.FLOAT32,
        data_host="127.0.0.1",
        data_port=None,
        native=True,
        handoff=HandoffSettings(
            timeout_s=60.0, on_failure=OnFailure.ERROR, buffer_bytes=1 << 40, encrypt=False
        ),
    )
    ends = open_ends(assigned, CounterBoard(), lambda failed: None, {})
    assert (ends.sender, ends.receiver, ends.listen()) == (None, None, None)
    assert terms_of(CONTRACT, native=True)["transports"] == ["native"]


def test_sglang_s_own_handoff_carries_the_first_token_s_log_probability() -> None:
    """Decode shows prefill's, which must have been asked for it; pdctl's own carries none."""
    asked = {"logprobs": 10, "top_logprobs": 2, "echo": True}
    own, other = (spec_for(Engine.SGLANG).prefill_body(asked, leg) for leg in (NATIVE_LEG, LEG))
    assert {"logprobs", "top_logprobs"} <= own.keys()
    assert not {"logprobs", "top_logprobs", "echo"} & other.keys()
    assert "echo" not in own


def test_sglang_s_legs_meet_at_its_bootstrap_server() -> None:
    """Both at once, as with pdctl's own handoff."""
    spec = spec_for(Engine.SGLANG)
    assert not spec.prefills_first
    bodies = (spec.prefill_body({}, NATIVE_LEG), spec.decode_body({}, NATIVE_LEG))
    for body in bodies:
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 9000)
        assert body["bootstrap_room"] == LEG.room
