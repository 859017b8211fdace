"""What differs between a cluster that runs and its file: what `up` would have to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pdctl.topology.contract import Contract, compare
from pdctl.topology.model import Replica, Role, Topology
from pdctl.topology.plan import Plan, ReplicaPlan

_PORTS = ("http_port", "data_port", "side_port")
UNSETTLED = "not as it should be"
_SECRET = "…"
"""In place of an environment variable's value, which may be a secret."""


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as a file declares it, with what follows from that."""

    topology: Topology
    plan: Plan
    contract: Contract


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One field that is written otherwise; `field` as in the file."""

    field: str
    before: str
    after: str

    @property
    def text(self) -> str:
        if self.before == self.after:
            return self.field
        return f"{self.field}: {self.before} → {self.after}"


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas are in the order of their file. A replica that moves to another host is both
    removed and added."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarted: dict[str, tuple[Change, ...]] = {}
    """Replica → what it must be started again for."""
    routed: tuple[Change, ...] = ()
    """What the router takes over while it serves."""
    rebound: tuple[Change, ...] = ()
    """What the router must be started again for."""
    refused: tuple[Change, ...] = ()
    """What a running cluster can't take over."""

    @property
    def nothing(self) -> bool:
        return self == Changes()

    def lines(self) -> Iterator[str]:
        """`+ p1`, `- p2`, `~ d0: field: before → after`, a line each."""
        for name in self.removed:
            yield f"- {name}"
        for name, found in self.restarted.items():
            yield f"~ {name}: {_joined(found)} (restart)"
        for name in self.added:
            yield f"+ {name}"
        if self.routed:
            yield f"~ router: {_joined(self.routed)} (while it serves)"
        if self.rebound:
            yield f"~ router: {_joined(self.rebound)} (restart)"


def changes(before: Declared, after: Declared, *, unsettled: Iterable[str] = ()) -> Changes:
    """What leads from `before`, which runs, to `after`.

    Args:
        unsettled: replicas that do not run as they should, whatever the file says.
    """
    old = {(r.name, r.host): r for r in before.plan.replicas}
    new = {(r.name, r.host): r for r in after.plan.replicas}
    restarted = {}
    for key, plan in new.items():
        if key in old:
            found = (*_replica(before, after, old[key], plan), *_shared(before, after, plan))
            if plan.name in unsettled:
                found = (*found, Change(field=UNSETTLED, before="", after=""))
            if found:
                restarted[plan.name] = found
    return Changes(
        added=tuple(name for name, host in new if (name, host) not in old),
        removed=tuple(name for name, host in old if (name, host) not in new),
        restarted=restarted,
        routed=_router(before, after, ("policy", "disaggregate")),
        rebound=_router(before, after, ("bind", "api_key_env")),
        refused=tuple(_refused(before, after)),
    )


def _replica(
    before: Declared, after: Declared, old: ReplicaPlan, new: ReplicaPlan
) -> tuple[Change, ...]:
    """What its agent would start, or assign, otherwise."""
    found = list(_differing("", _started(old), _started(new)))
    a, b = (_in_force(d.topology, p.declared) for d, p in ((before, old), (after, new)))
    found += _differing("", {"python": a.python}, {"python": b.python})
    found += _differing("env.", a.env, b.env, secret=True)
    found += _differing("engine_config.", a.engine_config, b.engine_config)
    return tuple(found)


def _started(plan: ReplicaPlan) -> dict[str, object]:
    return {
        "engine": plan.engine.value,
        "role": plan.role.value,
        "model": plan.model,
        "compute_dtype": plan.compute_dtype.value,
        "devices": list(plan.declared.devices),
        "address": plan.data_host,
        **{name: getattr(plan, name) for name in _PORTS},
    }


def _in_force(topology: Topology, replica: Replica) -> Replica:
    """With what its host gives it."""
    host = topology.hosts[replica.host]
    return msgspec.structs.replace(
        replica, python=replica.python or host.python, env={**host.env, **replica.env}
    )


def _shared(before: Declared, after: Declared, plan: ReplicaPlan) -> Iterator[Change]:
    """The cluster's settings that a replica is told at its start."""
    if plan.role is Role.BOTH:
        return
    a, b = before.topology.handoff, after.topology.handoff
    names = ["timeout_s", "on_failure"]
    yield from _differing(
        "handoff.", {n: getattr(a, n) for n in names}, {n: getattr(b, n) for n in names}
    )
    if plan.role is Role.PREFILL:
        yield from _differing(
            "handoff.",
            {"buffer_bytes": before.plan.buffer_bytes},
            {"buffer_bytes": after.plan.buffer_bytes},
        )


def _router(before: Declared, after: Declared, names: Iterable[str]) -> tuple[Change, ...]:
    a, b = before.topology.router, after.topology.router
    return tuple(
        _differing("router.", {n: getattr(a, n) for n in names}, {n: getattr(b, n) for n in names})
    )


def _refused(before: Declared, after: Declared) -> Iterator[Change]:
    a, b = before.topology, after.topology
    yield from _differing(
        "model.", msgspec.structs.asdict(a.model), msgspec.structs.asdict(b.model)
    )
    told = {"dtype"} | ({"positions"} if a.model != b.model else set())
    for one in compare(before.contract, after.contract):
        if one.field not in told:
            yield Change(field=one.field, before=_text(one.left), after=_text(one.right))
    yield from _differing(
        "handoff.", {"encrypt": a.handoff.encrypt}, {"encrypt": b.handoff.encrypt}
    )
    old, new = ({p.path: p.transport for p in d.plan.pairs} for d in (before, after))
    if any(old[path] != new[path] for path in old.keys() & new.keys()):
        yield from _differing(
            "handoff.", {"transport": a.handoff.transport}, {"transport": b.handoff.transport}
        )
    if a.sharing != b.sharing:
        yield Change(field="sharing", before=_text(a.sharing), after=_text(b.sharing))
    elif before.plan.stores != after.plan.stores:
        stores = (" ".join(s.host for s in d.plan.stores) or "off" for d in (before, after))
        yield Change(field="sharing", before=next(stores), after=next(stores))
    yield from _differing("router.", {"host": a.router.host}, {"host": b.router.host})
    yield from _hosts(before, after)


def _hosts(before: Declared, after: Declared) -> Iterator[Change]:
    """Where an agent runs, and how it is reached."""
    a, b = (set(declared.plan.agent_ports) for declared in (before, after))
    for name in sorted(a ^ b):
        words = ("used", "not used")
        yield Change(
            field=f"hosts.{name}",
            before=words[name not in a],
            after=words[name not in b],
        )
    for name in sorted(a & b):
        hosts = (declared.topology.hosts[name] for declared in (before, after))
        left, right = ({"ssh": h.ssh, "agent_python": h.agent_python} for h in hosts)
        yield from _differing(f"hosts.{name}.", left, right)


def _differing(
    prefix: str,
    before: Mapping[str, object],
    after: Mapping[str, object],
    *,
    secret: bool = False,
) -> Iterator[Change]:
    for name in sorted({*before, *after}):
        left, right = before.get(name), after.get(name)
        if left != right:
            shown = (_SECRET, _SECRET) if secret else (_text(left), _text(right))
            yield Change(field=f"{prefix}{name}", before=shown[0], after=shown[1])


def _text(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _joined(found: Iterable[Change]) -> str:
    return ", ".join(change.text for change in found)
