"""Whether every pair on two hosts can reach each other, tested the way it will be used."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterable

import msgspec

from pdctl.errors import HostError
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.hosts.ssh import by_hand
from pdctl.runtime.hosts.survey import Dialled
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Host
from pdctl.topology.plan import PairPlan, Plan, ReplicaPlan

DIAL_S = 5.0
ANSWER_MORE_S = 2.0
"""The listener outlives the dialler's patience by so much."""
SELF_DIAL_S = 1.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One pair's link to test."""

    pair: PairPlan
    sender: ReplicaPlan
    receiver: ReplicaPlan
    port: int
    """Where the sender answers: its data port, or one beside it."""

    @property
    def is_far(self) -> bool:
        return self.sender.host != self.receiver.host

    @property
    def address(self) -> tuple[str, int]:
        return self.sender.data_host, self.port


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    trial: Trial
    dialled: Dialled


def trials_of(plan: Plan) -> list[Trial]:
    """One per pair."""
    found = []
    for pair in plan.pairs:
        sender, receiver = plan.replica(pair.prefill), plan.replica(pair.decode)
        if sender.sender_port is not None:
            port = sender.sender_port
            found.append(Trial(pair=pair, sender=sender, receiver=receiver, port=port))
    return found


def check_links(
    ground: Ground, plan: Plan, *, unfit: frozenset[str] = frozenset()
) -> list[Diagnostic]:
    """What keeps pairs apart. Pairs whose sender listens already (this cluster's own), or
    can't listen at all (`unfit`: it was told), are left out."""
    trials = [
        trial
        for trial in trials_of(plan)
        if trial.is_far and not is_own(ground, trial) and trial.sender.name not in unfit
    ]
    return [
        refusal(ground, tried)
        for tried in try_links(ground, trials)
        if tried.dialled.error is not None
    ]


def is_own(ground: Ground, trial: Trial) -> bool:
    """Whether this very cluster, which runs, listens there itself."""
    return trial.port in ground.own_ports(trial.sender.host)


def try_links(ground: Ground, trials: Iterable[Trial]) -> list[Tried]:
    """Dials every sender from every receiver's host; in parallel, but one after another at
    one sender, whose port is one. Pairs with a lost host are left out."""
    by_sender: dict[str, list[Trial]] = {}
    for trial in trials:
        if not {trial.sender.host, trial.receiver.host} & set(ground.lost):
            by_sender.setdefault(trial.sender.name, []).append(trial)

    def one(sender: str) -> list[Tried]:
        return [try_link(ground, trial) for trial in by_sender[sender]]

    return [tried for group in ground.together(one, list(by_sender)) for tried in group]


def try_link(ground: Ground, trial: Trial, *, measure_bytes: int = 0) -> Tried:
    """One pair's sender answers, and its receiver's host dials."""
    ground.watcher.host(trial.receiver.host, f"dialling {trial.sender.host} for {trial.pair.path}")
    token, encrypt = secrets.token_hex(16), ground.topology.handoff.encrypt
    timeout_s = DIAL_S + (ANSWER_MORE_S if measure_bytes else 0.0)
    try:
        near, far = ground.hosts[trial.sender.host], ground.hosts[trial.receiver.host]
        for_s = timeout_s + ANSWER_MORE_S
        near.survey.answer(trial.address, token, for_s=for_s, encrypt=encrypt)
        dialled = far.survey.dial(
            *(trial.address, token),
            timeout_s=timeout_s,
            measure_bytes=measure_bytes,
            encrypt=encrypt,
        )
        if dialled.error is not None:
            # A right dialler ends the listener: its own host is one, whatever stands between.
            near.survey.dial(trial.address, token, timeout_s=SELF_DIAL_S, encrypt=encrypt)
    except HostError as error:
        dialled = Dialled(error=error.message)
    return Tried(trial=trial, dialled=dialled)


def try_own_port(ground: Ground, trial: Trial) -> Tried:
    """Whether a running sender's own port takes connections; it hangs up on us, unharmed."""
    own = msgspec.structs.replace(trial, port=trial.sender.sender_port)
    far = ground.hosts[trial.receiver.host]
    try:
        dialled = far.survey.dial(own.address, secrets.token_hex(16), timeout_s=DIAL_S)
    except HostError as error:
        dialled = Dialled(error=error.message)
    if dialled.connected:
        dialled = msgspec.structs.replace(dialled, error=None)
    return Tried(trial=own, dialled=dialled)


def refusal(ground: Ground, tried: Tried) -> Diagnostic:
    """A pair that can't be used, with what opens it and what tests it by hand."""
    trial = tried.trial
    host, port = trial.address
    sender, receiver = (ground.topology.hosts[r.host] for r in (trial.sender, trial.receiver))
    opening, trying = opens(sender, port), tests(sender, receiver, trial.address)
    return Diagnostic(
        code="host.data_plane",
        summary=f'pair "{trial.pair.prefill}" → "{trial.pair.decode}": host "{receiver.name}" '
        f'can\'t reach host "{sender.name}" at {host} port {port}: {tried.dialled.error}',
        detail=f"open it:  {opening}\nlisten:   {trying[0]}\nthen try: {trying[1]}",
        replica=trial.sender.name,
        field="address",
        hint=f"open the port on {sender.name} (`{opening}`), or give an address that "
        f"{receiver.name} can dial; `{trying[1]}` tests it",
    )


def opens(sender: Host, port: int) -> str:
    """The usual firewalls' command, on the sender's host."""
    return _on(sender, f"sudo ufw allow {port}/tcp || sudo firewall-cmd --add-port={port}/tcp")


def tests(sender: Host, receiver: Host, address: tuple[str, int]) -> tuple[str, str]:
    """(what listens meanwhile on the sender's host, what dials it from the receiver's)."""
    host, port = address
    python = sender.python or "python3"
    listening = f"{python} -m http.server {port} --bind {shlex.quote(host)}"
    return _on(sender, listening), _on(receiver, f"nc -vz -w 5 {shlex.quote(host)} {port}")


def _on(host: Host, command: str) -> str:
    """The command as one types it on this machine."""
    if host.ssh is None:
        return command
    return f"{by_hand(host)} {shlex.quote(command)}"
