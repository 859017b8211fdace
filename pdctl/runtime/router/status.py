"""What `/status`, `/ready` and `/` show of the roster. Pure."""

from __future__ import annotations

import html
import time
from typing import Any

import msgspec

from pdctl.engines.channel import PairState
from pdctl.runtime.router.endpoints import HEALTH, METRICS, MODELS, READY, STATUS
from pdctl.runtime.router.members import Roster, Seat
from pdctl.runtime.router.metrics import pair_counters


def status(roster: Roster, *, fresh: bool) -> dict[str, Any]:
    """The cluster as JSON (DESIGN §7). `fresh`: counters are of this moment."""
    return {
        "cluster": roster.plan.cluster,
        "model": roster.plan.model,
        "page_bytes": roster.plan.page_bytes,
        "fresh": fresh,
        "replicas": [_replica(seat, roster) for seat in roster.seats()],
        "pairs": [_pair(state, roster) for state in roster.pair_states()],
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
        **_counters(state.counters),
    }


def _pair(state: PairState, roster: Roster) -> dict[str, Any]:
    ends = roster.seat(state.prefill), roster.seat(state.decode)
    return {**msgspec.to_builtins(state), **_counters(pair_counters(*ends))}


def _counters(counters: msgspec.Struct) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(counters)
    built.pop("pairs", None)
    built.pop("rooms", None)
    return built


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


def page(roster: Roster) -> str:
    """A plain page with links; the live one is yet to come."""
    links = "".join(
        f'<li><a href="{path}">{path}</a></li>' for path in (STATUS, METRICS, READY, HEALTH, MODELS)
    )
    name, model_id = html.escape(roster.plan.cluster), html.escape(roster.plan.model)
    return (
        f"<!doctype html><html lang=en><title>pdctl {name}</title>"
        f"<h1>{name}</h1><p>serves {model_id}</p><ul>{links}</ul></html>"
    )
