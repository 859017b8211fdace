"""What an engine's process and the router say to their agent, over its Unix socket.

The socket's path is in `PDCTL_SOCKET`, the replica's name in `PDCTL_REPLICA`; nothing secret is
in an environment or on a command line: keys arrive in `Assignment`, over the 0600 socket.

Frames: 4 bytes little-endian length, then one msgpack message of the unions below.

    engine                      agent
      Attach            →
                        ←       Assignment            (or Refused, then the socket closes)
      Ready             →                             once its effective values are known
      Failed            →                             at any time, one per failed handoff
                        ←       Poll
      Report            →                             answers Poll; carries its seq

The router attaches with kind "router" and gets RouterAssignment; then

                        ←       Members               at once, and at every change
      PairStates        →                             at every change
                        ←       Poll
      RouterReport      →                             answers Poll
      Refresh           →                             wants counters as they are now
                        ←       Members               carries its seq, within about 1 s

A host's page store attaches with kind "store" and gets StoreAssignment; then

      StoreReady        →
                        ←       Poll
      StoreReport       →                             answers Poll

Only the standard library, msgspec and `pdctl.{errors,topology,handoff}` may be imported here:
this module runs inside engines' processes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdctl.handoff.counters import Counters
from pdctl.handoff.store.interface import StoreSeat
from pdctl.handoff.store.shelves import StoreCounts
from pdctl.handoff.transport.tls import Certificate
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import ComputeDtype, Disaggregate, Engine, OnFailure, Role, Transport
from pdctl.topology.plan import Plan

SOCKET_ENV = "PDCTL_SOCKET"
REPLICA_ENV = "PDCTL_REPLICA"
RUN_ENV = "PDCTL_RUN"
"""Random id of one `up`, in the environment of everything it started: how `down` finds it."""

MAX_FRAME_BYTES = 16 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Base of all: frozen, tagged with its class's name."""


class Attach(Message, frozen=True, kw_only=True):
    kind: str
    """"engine", "router" or "store"."""
    name: str
    """The replica's name; "router" for the router, "store-HOST" for a store."""
    pid: int
    version: str
    """pdctl's version inside that process."""


class HandoffSettings(msgspec.Struct, frozen=True, kw_only=True):
    timeout_s: float
    on_failure: OnFailure
    buffer_bytes: int
    encrypt: bool


class Assignment(Message, frozen=True, kw_only=True):
    """Everything a replica needs that is not an option of its engine."""

    cluster: str
    replica: str
    role: Role
    key: bytes
    """The cluster's key: tickets, and each end's proof to the other. 32 bytes."""
    contract: Contract
    compute_dtype: ComputeDtype
    data_host: str
    data_port: int | None
    native: bool = False
    """The engine's own handoff moves its KV cache: no sender or receiver is to be opened."""
    transports: dict[str, Transport] = {}
    """Peer → how the pair's pages move."""
    device_pages: bool = False
    """Pages that peers read through NIXL lie in the memory of its device; else in its host's."""
    handoff: HandoffSettings
    certificate: Certificate | None = None
    """The cluster's, where `handoff.encrypt`: both ends of the data plane show and require it."""
    store: StoreSeat | None = None
    """Its host's page store; None where it shares none."""


class StoreAssignment(Message, frozen=True, kw_only=True):
    """Everything a host's page store needs."""

    cluster: str
    host: str
    key: bytes
    """The cluster's, by which the stores of two hosts know each other."""
    contract: Contract
    seat: StoreSeat
    """Where it is to serve its host's replicas."""
    buffer_bytes: int
    data_host: str
    data_port: int | None
    """Where it is to serve other hosts' stores; None where there are none."""
    others: dict[str, tuple[str, int]] = {}
    """Host → where its store is dialled."""
    certificate: Certificate | None = None


class Refused(Message, frozen=True, kw_only=True):
    reason: str


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine really loaded; compared with the contract by the agent."""

    attention: Attention
    positions: Positions
    compute_dtype: ComputeDtype


class Ready(Message, frozen=True, kw_only=True):
    """The engine serves HTTP and, where it sends, its data port listens."""

    engine: Engine
    engine_version: str
    effective: Effective
    http_port: int
    data_port: int | None
    terms: dict[str, Any] = {}
    """What a pair may negotiate: block size, prefill step, transports."""


class Failed(Message, frozen=True, kw_only=True):
    """One handoff failed on this end. `leg` is "prefill" or "decode"."""

    room: int
    leg: str
    cause: str
    detail: str


class Poll(Message, frozen=True, kw_only=True):
    seq: int


class Report(Message, frozen=True, kw_only=True):
    seq: int
    counters: Counters


class StoreReady(Message, frozen=True, kw_only=True):
    """It serves."""

    slots: int
    """Pages that it has room for."""


class StoreReport(Message, frozen=True, kw_only=True):
    seq: int
    counts: StoreCounts


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as its agent sees it.

    state: "starting" | "ready" | "draining" | "backoff" | "stopped" | "failed" |
    "unreachable" (the SSH connection to its host is away)
    """

    name: str
    engine: Engine
    role: Role
    host: str
    state: str
    cause: str | None = None
    """Why it is not ready, a sentence; None while all is well."""
    pid: int | None = None
    started_at: float | None = None
    """Unix seconds of the present process's start."""
    restarts: int = 0
    http_host: str = "127.0.0.1"
    http_port: int = 0
    """As the router reaches it: the near end of the forward where it runs on another host."""
    data_host: str = "127.0.0.1"
    data_port: int | None = None
    """Where it is dialled for its KV cache; a native one's, its side port."""
    clock_offset_s: float = 0.0
    """Its host's clock minus the router's, as last measured: tickets expire on P's clock."""
    incarnation: int = 0
    """Raised at every start: a pair's canary holds for one incarnation of both ends."""
    engine_version: str | None = None
    compute_dtype: ComputeDtype | None = None
    counters: Counters = Counters()


class RouterAssignment(Message, frozen=True, kw_only=True):
    cluster: str
    run: str
    key: bytes
    plan: Plan
    contract: Contract
    api_key: str | None
    policy: str
    on_failure: OnFailure
    model_dir: str
    """A checkpoint on the router's host, for its tokenizer; "" where it has none."""
    disaggregate: Disaggregate = Disaggregate.ALWAYS
    costs_path: str = ""
    """A file of the router's own, on its host: what it measured; "" where nothing is kept."""


class Members(Message, frozen=True, kw_only=True):
    version: int
    """Raised at every change."""
    members: tuple[MemberState, ...]
    seq: int = 0
    """Of the Refresh that this answers; 0 for a push."""
    failures: tuple[Failed, ...] = ()
    """The latest failures, newest last, bounded; the router names causes from them."""
    draining: bool = False
    """The router itself is to take no new request; running ones go on."""


class PairState(msgspec.Struct, frozen=True, kw_only=True):
    """state: "waiting" (an end is not ready) | "canary" | "ready" | "failed" (canary)"""

    prefill: str
    decode: str
    transport: str
    transport_reason: str = ""
    """Why this one, as `plan` says it."""
    state: str
    cause: str | None = None
    incarnations: tuple[int, ...] = ()
    """Of prefill and decode, for which this holds; -1 for one that was never heard of."""


class PairStates(Message, frozen=True, kw_only=True):
    url: str
    """Where the router listens: http://host:port."""
    pairs: tuple[PairState, ...]
    replicas: tuple[PairState, ...] = ()
    """Ordinary replicas' own canaries: prefill and decode both name the replica."""


class Refresh(Message, frozen=True, kw_only=True):
    """The router wants every replica's counters as they are now: the agent polls them, bounded
    to 1 s, and answers with `Members` of that seq."""

    seq: int


class RouterReport(Message, frozen=True, kw_only=True):
    seq: int
    requests_active: int
    requests_total: int
    requests_failed: int
    active: dict[str, int] = {}
    """Requests that run on each replica now, by name; canaries too."""
    draining: tuple[str, ...] = ()
    """Replicas, or "router", that it knows to be draining: no request that it takes from
    now on goes there."""


FromEngine = Attach | Ready | Failed | Report
ToEngine = Assignment | Refused | Poll
FromStore = Attach | StoreReady | StoreReport
ToStore = StoreAssignment | Refused | Poll
FromRouter = Attach | PairStates | RouterReport | Refresh
ToRouter = RouterAssignment | Refused | Members | Poll
ToAgent = FromEngine | FromStore | FromRouter
FromAgent = Assignment | StoreAssignment | RouterAssignment | Refused | Members | Poll

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame: length prefix and body."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body
