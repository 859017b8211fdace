"""Every key of a topology file, table by table: how it is read, and whether it must be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pdctl.topology import fields
from pdctl.topology.fields import Unacceptable
from pdctl.topology.model import (
    ComputeDtype,
    Disaggregate,
    Dtype,
    Engine,
    OnFailure,
    Policy,
    Role,
    Transport,
)


class Field(NamedTuple):
    """How one key is read; `read` raises Unacceptable."""

    read: Callable[[object], Any]
    required: bool = False


Table = Mapping[str, Field]

MODEL: Table = {
    "name": Field(fields.text, required=True),
    "dtype": Field(fields.choice(Dtype)),
    "context_length": Field(fields.count, required=True),
}
HANDOFF: Table = {
    "transport": Field(fields.choice(Transport)),
    "timeout_s": Field(fields.seconds),
    "on_failure": Field(fields.choice(OnFailure)),
    "buffer_bytes": Field(fields.size),
    "encrypt": Field(fields.flag),
}
SHARING: Table = {"buffer_bytes": Field(fields.size)}
ROUTER: Table = {
    "host": Field(fields.name),
    "bind": Field(fields.bind),
    "policy": Field(fields.choice(Policy)),
    "disaggregate": Field(fields.choice(Disaggregate)),
    "api_key_env": Field(fields.variable),
}
HOST: Table = {
    "ssh": Field(fields.destination),
    "address": Field(fields.address),
    "python": Field(fields.text),
    "agent_python": Field(fields.text),
    "env": Field(fields.environment),
}
REPLICA: Table = {
    "name": Field(fields.name, required=True),
    "host": Field(fields.name),
    "engine": Field(fields.choice(Engine), required=True),
    "role": Field(fields.choice(Role), required=True),
    "model": Field(fields.text, required=True),
    "devices": Field(fields.devices),
    "python": Field(fields.text),
    "address": Field(fields.address),
    "env": Field(fields.environment),
    "http_port": Field(fields.port),
    "data_port": Field(fields.port),
    "side_port": Field(fields.port),
    "compute_dtype": Field(fields.choice(ComputeDtype)),
    "engine_config": Field(fields.table),
}


def _list_of_tables(value: object) -> list[Any]:
    if type(value) is not list:
        hint = "write each replica under [[replicas]], with two brackets"
        raise Unacceptable("wrong_type", f"is {fields.kind_of(value)}, not a list of tables", hint)
    return list(value)


TOP: Table = {
    "schema": Field(fields.schema, required=True),
    "name": Field(fields.name, required=True),
    "model": Field(fields.table, required=True),
    "handoff": Field(fields.table),
    "sharing": Field(fields.table),
    "router": Field(fields.table),
    "hosts": Field(fields.table),
    "replicas": Field(_list_of_tables),
}
