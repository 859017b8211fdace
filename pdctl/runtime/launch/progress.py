"""From one picture of a launch to the next: what changed, and whether it can still succeed."""

from __future__ import annotations

from typing import NamedTuple

from pdctl.engines.channel import MemberState, PairState
from pdctl.runtime.agent.stores import StoreState
from pdctl.runtime.agent.view import RouterState, Snapshot
from pdctl.runtime.launch.events import Emit, LaunchEvent, Stage

ENDED = frozenset({"backoff", "failed", "stopped"})


class Trouble(NamedTuple):
    """Why a launch cannot succeed any more, and whose log shows it."""

    sentence: str
    log: str
    """A replica's name, "router", "agent-HOST" or "store-HOST"."""
    host: str
    """Where that log lies; "" for the router's host."""


class Progress:
    """Tells every change once."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._seen: dict[tuple[Stage, str], str] = {}

    def show(self, snapshot: Snapshot) -> None:
        for host in snapshot.hosts:
            self._tell(Stage.AGENT, host.name, host.state, host.cause, None)
        for member in snapshot.members:
            self._tell(Stage.REPLICA, member.name, member.state, member.cause, member.pid)
        for store in snapshot.stores:
            self._tell(Stage.STORE, store.name, store.state, store.cause, store.pid)
        router = snapshot.router
        if router is not None and router.state != "stopped":
            self._tell(Stage.ROUTER, "router", router.state, router.cause or router.url, router.pid)
        for path in (*snapshot.pairs, *snapshot.replicas):
            stage = Stage.PATH if path.prefill == path.decode else Stage.PAIR
            self._tell(stage, text_of(path), path.state, path.cause, None)

    def _tell(
        self, stage: Stage, subject: str, state: str, detail: str | None, pid: int | None
    ) -> None:
        if state == "stopped" or self._seen.get((stage, subject)) == state:
            return
        self._seen[(stage, subject)] = state
        self._emit(LaunchEvent(stage=stage, subject=subject, state=state, detail=detail, pid=pid))

    @staticmethod
    def trouble(snapshot: Snapshot) -> Trouble | None:
        """A first launch is not tried again: what fails once is to be seen."""
        for host in snapshot.hosts:
            if host.state == "unreachable":
                cause = host.cause or "it can't be reached"
                sentence = f'host "{host.name}": {cause}'
                return Trouble(sentence, f"agent-{host.name}", host.name)
        for member in snapshot.members:
            if _has_ended(member):
                sentence = f'replica "{member.name}" failed: {_cause(member)}'
                return Trouble(sentence, member.name, member.host)
        for store in snapshot.stores:
            if _has_ended(store):
                sentence = f'the page store of host "{store.host}" failed: {_cause(store)}'
                return Trouble(sentence, store.name, store.host)
        router = snapshot.router
        if router is not None and _has_ended(router):
            return Trouble(f"the router failed: {_cause(router)}", "router", "")
        for path in (*snapshot.pairs, *snapshot.replicas):
            if path.state == "failed":
                what = "replica" if path.prefill == path.decode else "pair"
                sentence = f"{what} {text_of(path)} failed its canary: {path.cause}"
                hosts = {member.name: member.host for member in snapshot.members}
                return Trouble(sentence, path.decode, hosts.get(path.decode, ""))
        return None

    @staticmethod
    def waiting(snapshot: Snapshot) -> str:
        """What is not ready yet, in words."""
        found = [
            f'host "{host.name}" is {host.state}'
            for host in snapshot.hosts
            if host.state != "ready"
        ]
        found += [
            f'replica "{member.name}" is {member.state}'
            for member in snapshot.members
            if member.state != "ready"
        ]
        found += [
            f'the page store of host "{store.host}" is {store.state}'
            for store in snapshot.stores
            if store.state != "ready"
        ]
        router = snapshot.router
        if router is not None and router.state not in ("ready", "stopped"):
            found.append(f"the router is {router.state}")
        found += [
            f"{text_of(path)} is {path.state}" + (f" ({path.cause})" if path.cause else "")
            for path in (*snapshot.pairs, *snapshot.replicas)
            if path.state != "ready"
        ]
        return ", ".join(found) or "the router has announced nothing"


def text_of(path: PairState) -> str:
    """ "p0>d0", or an ordinary replica's name."""
    return path.decode if path.prefill == path.decode else f"{path.prefill}>{path.decode}"


def _has_ended(process: MemberState | RouterState | StoreState) -> bool:
    return process.restarts > 0 or (
        process.state in ENDED and (process.state != "stopped" or process.cause is not None)
    )


def _cause(process: MemberState | RouterState | StoreState) -> str:
    return process.cause or f"it is {process.state} after {process.restarts} restarts"
