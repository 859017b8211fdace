"""Whether the page stores of hosts reach each other. Warnings: what can't be had is a miss."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from pdctl.errors import HostError
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.links import ANSWER_MORE_S, DIAL_S, SELF_DIAL_S, opens
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.plan import Plan
from pdctl.topology.sharing import StorePlan


def check_stores(ground: Ground, plan: Plan) -> list[Diagnostic]:
    """Each store is dialled from every other one's host, in parallel; those of this very
    cluster, which listen already, and those of lost hosts are left out."""
    stores = {
        store.host: store
        for store in plan.stores
        if store.data_port is not None
        and store.host not in ground.lost
        and store.data_port not in ground.own_ports(store.host)
    }

    def one(host: str) -> list[Diagnostic]:
        others = (s.host for s in plan.stores if s.host != host and s.host not in ground.lost)
        return list(_dialled(ground, stores[host], others))

    return [found for group in ground.together(one, list(stores)) for found in group]


def _dialled(ground: Ground, store: StorePlan, others: Iterator[str]) -> Iterator[Diagnostic]:
    assert store.data_port is not None
    address, encrypt = (store.data_host, store.data_port), ground.topology.handoff.encrypt
    near = ground.hosts[store.host]
    for other in others:
        ground.watcher.host(other, f"dialling the page store of {store.host}")
        token = secrets.token_hex(16)
        try:
            near.survey.answer(address, token, for_s=DIAL_S + ANSWER_MORE_S, encrypt=encrypt)
            error = (
                ground.hosts[other]
                .survey.dial(address, token, timeout_s=DIAL_S, encrypt=encrypt)
                .error
            )
            if error is not None:
                # a right dialler ends the listener
                near.survey.dial(address, token, timeout_s=SELF_DIAL_S, encrypt=encrypt)
        except HostError as failed:
            error = failed.message
        if error is not None:
            yield _closed(ground, store, other, error)


def _closed(ground: Ground, store: StorePlan, other: str, error: str) -> Diagnostic:
    opening = opens(ground.topology.hosts[store.host], store.data_port or 0)
    return Diagnostic(
        severity=Severity.WARNING,
        code="host.page_store",
        summary=f'host "{other}" can\'t reach the page store of host "{store.host}" at '
        f"{store.data_host} port {store.data_port}: {error}",
        detail=f"open it: {opening}",
        field="sharing",
        hint=f"open the port on {store.host} (`{opening}`); until then {other} computes what "
        f"{store.host} holds",
    )
