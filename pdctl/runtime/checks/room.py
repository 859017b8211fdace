"""Whether what runs on one machine fits into its memory, by estimate: warnings, no refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdctl.engines.registry import spec_for
from pdctl.handoff.slots import DEVICE_SLOT_BYTES, DEVICE_SLOTS
from pdctl.runtime.checks.machines import Seen
from pdctl.runtime.checks.outcome import ModelFacts
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.model import Engine, Role
from pdctl.topology.plan import Plan, ReplicaPlan
from pdctl.topology.sizes import approximate_size

GPU_ENGINES = frozenset({Engine.VLLM, Engine.SGLANG})


def check_room(
    plan: Plan,
    models: Mapping[str, ModelFacts],
    seen: Mapping[str, Seen],
    *,
    kept: Plan | None = None,
) -> list[Diagnostic]:
    """Host memory per machine and NVIDIA memory per device, against what is free now.

    Args:
        kept: what runs already: its replicas have their memory.
    """
    running = {(r.name, r.host) for r in kept.replicas} if kept else set()
    kept_stores = kept.stores if kept else ()
    starting = [r for r in plan.replicas if (r.name, r.host) not in running]
    needs = {r.name: _need(r, models.get(r.name)) for r in starting}
    on_devices = {r.name: needs[r.name] + _handed_over(r, plan) for r in starting}
    found: list[Diagnostic] = []
    for names in _machines(seen):
        here = [r for r in starting if r.host in names]
        found += _devices(names, here, on_devices, seen[names[0]])
        need = sum(_on_host(r, needs[r.name], plan, seen[names[0]]) for r in here)
        need += sum(s.buffer_bytes for s in plan.stores if s.host in names and s not in kept_stores)
        free = seen[names[0]].facts.memory_free_bytes
        if need > free:
            found.append(_too_much(_subject(names), "memory", need, free))
    return found


def _machines(seen: Mapping[str, Seen]) -> Iterator[list[str]]:
    """Hosts that are one machine (one boot) share its memory."""
    by_boot: dict[str, list[str]] = {}
    for name, one in seen.items():
        by_boot.setdefault(one.facts.boot, []).append(name)
    yield from by_boot.values()


def _need(replica: ReplicaPlan, facts: ModelFacts | None) -> int:
    """Weights, KV and process of its engine; 0 where nothing is known."""
    if facts is None or facts.contract is None or facts.content is None:
        return 0
    spec = spec_for(replica.engine)
    return spec.memory_bytes(replica, facts.contract, facts.content.total_bytes)


def _budget(replica: ReplicaPlan, plan: Plan) -> int:
    """Host pages in flight, which a prefill replica holds besides."""
    own = [pair for pair in plan.pairs if pair.prefill == replica.name]
    return (plan.buffer_bytes or 0) if any(not pair.on_device for pair in own) else 0


def _handed_over(replica: ReplicaPlan, plan: Plan) -> int:
    """Pages in flight on its device: sent from there, or read into it."""
    if not plan.on_device(replica.name):
        return 0
    if replica.role is Role.PREFILL:
        return plan.buffer_bytes or 0
    return DEVICE_SLOTS * DEVICE_SLOT_BYTES


def _device(replica: ReplicaPlan, seen: Seen) -> int | None:
    """The device that holds its weights and KV; None: the machine's own memory does."""
    if not seen.facts.devices or replica.engine not in GPU_ENGINES:
        return None
    return next(iter(replica.declared.devices), 0)


def _on_host(replica: ReplicaPlan, need: int, plan: Plan, seen: Seen) -> int:
    own = need if _device(replica, seen) is None else 0
    return own + _budget(replica, plan)


def _devices(
    names: list[str], replicas: list[ReplicaPlan], needs: Mapping[str, int], seen: Seen
) -> Iterator[Diagnostic]:
    devices = {device.index: device for device in seen.facts.devices}
    wanted: dict[int, int] = {}
    for r in replicas:
        for index in r.declared.devices if devices else ():
            if index not in devices:
                has = ", ".join(map(str, devices))
                yield Diagnostic(
                    code="host.device",
                    summary=f'replica "{r.name}": host "{r.host}" has no device {index}; it has '
                    f"{has}",
                    replica=r.name,
                    field="devices",
                    hint="nvidia-smi -L lists them",
                )
        device = _device(r, seen)
        if device is not None:
            wanted[device] = wanted.get(device, 0) + needs[r.name]
    for index, need in wanted.items():
        if index in devices and need > devices[index].free_bytes:
            what = f"memory of device {index} ({devices[index].name})"
            yield _too_much(_subject(names), what, need, devices[index].free_bytes)


def _subject(names: list[str]) -> str:
    if len(names) == 1:
        return f'host "{names[0]}"'
    return f"hosts {', '.join(names[:-1])} and {names[-1]}, which are one machine"


def _too_much(subject: str, what: str, need: int, free: int) -> Diagnostic:
    return Diagnostic(
        severity=Severity.WARNING,
        code="host.memory",
        summary=f"{subject}: the replicas need about {approximate_size(need)} of {what}, and "
        f"{approximate_size(free)} is free",
        hint="take a smaller context_length or buffer_bytes, or fewer replicas per host",
    )
