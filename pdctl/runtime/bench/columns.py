"""Which paths through a cluster a sweep compares, and what each request on them must move."""

from __future__ import annotations

import msgspec

from pdctl.runtime.router.policy import SERVES_ALONE
from pdctl.topology.model import PAGE_TOKENS, Engine, Role, Transport
from pdctl.topology.plan import PairPlan, Plan, ReplicaPlan

_IGNORES_EOS = frozenset({Engine.VLLM, Engine.SGLANG})
_IMPORTS_WHOLE_PROMPT = frozenset({Engine.SGLANG})


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One path. `path` is what the router's `x-pdctl-path` header pins."""

    path: str
    engines: tuple[Engine, ...]
    decode: str
    """The replica that writes the answer."""
    prefill: str | None = None
    """None for a replica that serves alone."""
    baseline: str | None = None
    """Path of the column whose greedy text this one's must equal; None where it has none."""
    prefill_alone: str | None = None
    """Path of the column that shows a pair's prefill engine by itself; None where none does."""
    transport: Transport | None = None
    on_device: bool = False
    """As `PairPlan` has it."""

    @property
    def is_pair(self) -> bool:
        return self.prefill is not None

    @property
    def ignores_eos(self) -> bool:
        """Whether the answering engine can be told to go on after its end-of-text token."""
        return self.engines[-1] in _IGNORES_EOS


class Required(msgspec.Struct, frozen=True, kw_only=True):
    """What one request must have moved; None where the path gives no exact figure."""

    imported_tokens: int
    host_bytes: int | None
    gpu_bytes: int | None


def columns(plan: Plan) -> tuple[Column, ...]:
    """Replicas that can serve alone, then every pair, both in the topology's order.

    Alone: ordinary replicas and decode replicas; a prefill replica only where no other column
    shows its engine on its host in its compute dtype.
    """
    alone = [replica for replica in plan.replicas if _serves_alone(replica)]
    chosen = [replica for replica in alone if replica.role is not Role.PREFILL]
    shown = {_kind(replica) for replica in chosen}
    for replica in alone:
        if replica.role is Role.PREFILL and _kind(replica) not in shown:
            chosen.append(replica)
            shown.add(_kind(replica))
    singles = [
        Column(path=replica.name, engines=(replica.engine,), decode=replica.name)
        for replica in chosen
    ]
    return (*singles, *(_pair(plan, pair, chosen) for pair in plan.pairs))


def required(column: Column, tokens: int, page_bytes: int | None) -> Required:
    """What one prompt of `tokens` must move on `column` (DESIGN §6: the tail page is whole)."""
    if not column.is_pair:
        return Required(imported_tokens=0, host_bytes=0, gpu_bytes=0)
    native = column.transport is Transport.NATIVE
    whole = native or column.engines[-1] in _IMPORTS_WHOLE_PROMPT
    imported = tokens if whole else tokens - 1
    pages = -(-imported // PAGE_TOKENS)
    moved = None if page_bytes is None else pages * page_bytes
    if column.transport in (Transport.TCP, Transport.NIXL):
        if column.on_device:
            return Required(imported_tokens=imported, host_bytes=0, gpu_bytes=moved)
        return Required(imported_tokens=imported, host_bytes=moved, gpu_bytes=0)
    return Required(imported_tokens=imported, host_bytes=None, gpu_bytes=None)


def _pair(plan: Plan, pair: PairPlan, alone: list[ReplicaPlan]) -> Column:
    decode, prefill = plan.replica(pair.decode), plan.replica(pair.prefill)
    return Column(
        path=pair.path,
        engines=(prefill.engine, decode.engine),
        decode=decode.name,
        prefill=prefill.name,
        baseline=_baseline(decode, alone),
        prefill_alone=_same(prefill, alone),
        transport=pair.transport,
        on_device=pair.on_device,
    )


def _baseline(decode: ReplicaPlan, alone: list[ReplicaPlan]) -> str | None:
    """The decode replica itself, else one that computes as it does, else its engine."""
    tests = (
        lambda other: other.name == decode.name,
        lambda other: _kind(other) == _kind(decode),
        lambda other: other.engine is decode.engine,
    )
    for test in tests:
        for replica in alone:
            if test(replica):
                return replica.name
    return None


def _same(prefill: ReplicaPlan, alone: list[ReplicaPlan]) -> str | None:
    return next((r.name for r in alone if _kind(r) == _kind(prefill)), None)


def _kind(replica: ReplicaPlan) -> tuple[str, str, str]:
    return (replica.engine, replica.host, replica.compute_dtype)


def _serves_alone(replica: ReplicaPlan) -> bool:
    return replica.role is Role.BOTH or replica.engine in SERVES_ALONE
