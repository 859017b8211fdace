"""What the tests of every engine's control side start from."""

from __future__ import annotations

import msgspec

from pdctl.engines.interface import Leg
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import ComputeDtype, Dtype, Engine, OnFailure, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan

LEG = Leg(
    room=7,
    ticket="v1.1.x",
    prefill="p0",
    decode="d0",
    sender="127.0.0.1:9000",
    timeout_s=60.0,
)

CONTRACT = Contract(
    weights="w",
    tokenizer="t",
    chat_template="c",
    attention=Attention(kind="full", layers=2, kv_heads=2, head_dim=64),
    positions=Positions(rope_theta=1e4, max_positions=2048, context_length=1024),
    dtype=Dtype.FLOAT16,
)

LONG_ANSWER = {
    "prompt": "x",
    "max_completion_tokens": 900,
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 5,
    "logprobs": True,
    "top_logprobs": 3,
    "echo": True,
    "temperature": 0.5,
}
"""A client's body with whatever a prefill copy may not keep."""
ONE_TOKEN = {
    "prompt": "x",
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "stream": False,
    "n": 1,
    "temperature": 0.5,
}
"""Its prefill copy, but for the engine's own fields of the handoff."""


def declared(engine: Engine, role: Role = Role.PREFILL, **fields: object) -> Replica:
    return Replica(name="p0", engine=engine, role=role, model="/m/qwen", **fields)


def planned(replica: Replica) -> ReplicaPlan:
    return ReplicaPlan(
        name="p0",
        host="local",
        engine=replica.engine,
        role=replica.role,
        model=replica.model,
        dtype=Dtype.FLOAT16,
        compute_dtype=ComputeDtype.FLOAT32,
        http_port=9100,
        declared=replica,
    )


def native(engine: Engine, role: Role, data_host: str = "127.0.0.1") -> ReplicaPlan:
    """With the engine's own handoff; its side port is 9200 where it has one."""
    side_port = 9200 if engine is Engine.VLLM or role is Role.PREFILL else None
    return msgspec.structs.replace(
        planned(declared(engine, role)), native=True, side_port=side_port, data_host=data_host
    )


def plan_of(replica: ReplicaPlan, on_failure: OnFailure = OnFailure.ERROR) -> Plan:
    return Plan(
        cluster="c",
        model="qwen",
        dtype=Dtype.FLOAT16,
        context_length=2048,
        contract_digest=None,
        token_kv_bytes=None,
        page_bytes=None,
        buffer_bytes=None,
        timeout_s=60.0,
        on_failure=on_failure,
        router_host="local",
        router_bind="127.0.0.1:8000",
        agent_ports={},
        replicas=(replica,),
        pairs=(),
    )
