"""What a topology file declares: frozen structs, no I/O, no derived values.

`load.py` builds these from TOML with every problem collected; `rules.py` checks what needs
more than one field; `plan.py` derives the rest.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

PAGE_TOKENS = 64
"""Tokens per canonical page (DESIGN §6)."""

SCHEMA = 1


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every declared value: immutable, named, closed."""


class Engine(enum.StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    MLX = "mlx"


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Dtype(enum.StrEnum):
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class ComputeDtype(enum.StrEnum):
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Transport(enum.StrEnum):
    AUTO = "auto"
    TCP = "tcp"
    NIXL = "nixl"
    NATIVE = "native"


class OnFailure(enum.StrEnum):
    ERROR = "error"
    RECOMPUTE = "recompute"


class Policy(enum.StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    PREFIX = "prefix"


class Disaggregate(enum.StrEnum):
    ALWAYS = "always"
    AUTO = "auto"


class Model(Struct, frozen=True, kw_only=True):
    name: str
    dtype: Dtype = Dtype.FLOAT16
    context_length: int


class Handoff(Struct, frozen=True, kw_only=True):
    transport: Transport = Transport.AUTO
    timeout_s: float = 600.0
    on_failure: OnFailure = OnFailure.ERROR
    buffer_bytes: int | None = None
    """In-flight pages per prefill replica; None: two whole contexts, at least 512 MiB."""
    encrypt: bool = False


class Sharing(Struct, frozen=True, kw_only=True):
    buffer_bytes: int = 4 << 30


class Router(Struct, frozen=True, kw_only=True):
    host: str = "local"
    bind: str = "127.0.0.1:8000"
    policy: Policy = Policy.LEAST_LOADED
    disaggregate: Disaggregate = Disaggregate.ALWAYS
    api_key_env: str | None = None


class Host(Struct, frozen=True, kw_only=True):
    name: str
    ssh: str | None = None
    """Any OpenSSH destination; None is this machine."""
    address: str | None = None
    python: str | None = None
    agent_python: str | None = None
    env: dict[str, str] = {}


class Replica(Struct, frozen=True, kw_only=True):
    name: str
    host: str = "local"
    engine: Engine
    role: Role
    model: str
    """The checkpoint's directory on its host; `~` is that host's home."""
    devices: tuple[int, ...] = ()
    python: str | None = None
    address: str | None = None
    env: dict[str, str] = {}
    http_port: int | None = None
    data_port: int | None = None
    side_port: int | None = None
    compute_dtype: ComputeDtype | None = None
    engine_config: dict[str, Any] = {}


class Topology(Struct, frozen=True, kw_only=True):
    """One file, checked field by field and across fields.

    `hosts` always holds "local" (this machine); `replicas` keeps the file's order.
    """

    schema: int = SCHEMA
    name: str
    model: Model
    handoff: Handoff = Handoff()
    sharing: Sharing | None = None
    router: Router = Router()
    hosts: dict[str, Host]
    replicas: tuple[Replica, ...]

    def replica(self, name: str) -> Replica:
        """The replica of that name; KeyError where the topology has none."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise KeyError(name)
