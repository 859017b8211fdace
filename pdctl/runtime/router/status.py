"""What `/status` and `/ready` show of the roster. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from pdctl import __version__
from pdctl.engines.channel import PairState
from pdctl.handoff.counters import BUCKETS_S, shown_counters
from pdctl.runtime.router.members import Roster, Seat
from pdctl.runtime.router.metrics import Meter, pair_counters
from pdctl.runtime.router.recent import Flight


def status(
    roster: Roster, meter: Meter, flights: Iterable[Flight], *, fresh: bool
) -> dict[str, Any]:
    """The cluster as JSON (docs/status.md). `fresh`: counters are of this moment."""
    return {
        "cluster": roster.plan.cluster,
        "model": roster.plan.model,
        "page_bytes": roster.plan.page_bytes,
        "fresh": fresh,
        "replicas": [_replica(seat, roster) for seat in roster.seats()],
        "pairs": [_pair(state, roster) for state in roster.pair_states()],
        "state": readiness(roster)[1]["status"],
        "router": _router(roster, meter),
        "handoffs": [_handoff(f, f.room, roster) for f in flights if f.room is not None],
        "failures": msgspec.to_builtins(meter.recent.newest_first()),
        "phase_buckets_s": BUCKETS_S,
    }


def _router(roster: Roster, meter: Meter) -> dict[str, Any]:
    return {
        "version": __version__,
        "uptime_s": round(meter.uptime_s, 3),
        "draining": roster.draining,
        "requests_active": meter.active,
        "requests_total": meter.total,
        "requests_refused": meter.refused,
        "requests_failed": meter.failures,
    }


def _handoff(flight: Flight, room: int, roster: Roster) -> dict[str, Any]:
    """`stage`: "start", then "handoff" while either end has the room open, then "decode"."""
    seats = [seat for seat in map(roster.seat, flight.path.replicas) if seat is not None]
    idle = [s.state.counters.rooms[room] for s in seats if room in s.state.counters.rooms]
    stage = "handoff" if idle else "decode" if flight.tried.prefilled else "start"
    return {
        "room": str(room),
        "path": flight.path.text,
        "stage": stage,
        "age_s": round(flight.age_s, 3),
        "idle_s": round(min(idle), 3) if idle else None,
    }


def _replica(seat: Seat, roster: Roster) -> dict[str, Any]:
    state = seat.state
    alone = {s.decode: s for s in roster.replica_states()}.get(seat.name)
    up = state.started_at is not None and state.pid is not None
    return {
        "name": state.name,
        "engine": state.engine.value,
        "role": state.role.value,
        "host": state.host,
        "state": state.state,
        "cause": state.cause or seat.suspect or (alone.cause if alone else None),
        "canary": alone.state if alone else None,
        "pid": state.pid,
        "uptime_s": round(time.time() - (state.started_at or 0.0), 3) if up else None,
        "restarts": state.restarts,
        "engine_version": state.engine_version,
        "compute_dtype": state.compute_dtype.value if state.compute_dtype else None,
        "routed_active": seat.active,
        **shown_counters(state.counters),
    }


def _pair(state: PairState, roster: Roster) -> dict[str, Any]:
    ends = roster.seat(state.prefill), roster.seat(state.decode)
    return {**msgspec.to_builtins(state), **pair_counters(*ends)}


def readiness(roster: Roster) -> tuple[bool, dict[str, Any]]:
    """Whether any path serves, and what is missing from the rest."""
    ready = [] if roster.draining else [path.text for path in roster.ready()]
    missing = {"router": "it is being restarted"} if roster.draining else {}
    for path in roster.paths:
        state, cause = roster.state(path)
        if state != "ready":
            missing[path.text] = cause or state
    status = "ready" if ready and not missing else "degraded" if ready else "unavailable"
    return bool(ready), {"status": status, "ready": ready, "missing": missing}


def models(roster: Roster, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(roster, created)]}


def model(roster: Roster, created: int) -> dict[str, Any]:
    return {
        "id": roster.plan.model,
        "object": "model",
        "created": created,
        "owned_by": "pdctl",
        "max_model_len": roster.plan.context_length,
    }
