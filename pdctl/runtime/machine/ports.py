"""Whether this machine can listen where a plan says; nothing is left listening."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator, Sequence

import psutil

from pdctl.runtime.hosts.survey import Binding, Listener
from pdctl.runtime.machine.listening import listeners
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.fields import split_address
from pdctl.topology.plan import Plan


def wanted_bindings(
    plan: Plan, host: str, *, own_ports: frozenset[int] = frozenset()
) -> tuple[Binding, ...]:
    """Every address that a plan listens on at one host, but the ports that its cluster has
    itself."""
    return tuple(b for b in _bindings(plan, host) if b.address[1] not in own_ports)


def _bindings(plan: Plan, host: str) -> Iterator[Binding]:
    if plan.router_host == host:
        where = split_address(plan.router_bind)
        yield Binding(subject="router", address=where, field="router.bind")
    if host in plan.agent_ports:
        where = ("127.0.0.1", plan.agent_ports[host])
        yield Binding(subject=f'agent of host "{host}"', address=where, field=None)
    for store in plan.stores:
        if store.host == host and store.data_port is not None:
            where = (store.data_host, store.data_port)
            yield Binding(subject=f'page store of host "{host}"', address=where, field=None)
    for i, r in enumerate(plan.replicas):
        if r.route_port is not None and plan.router_host == host:
            where = ("127.0.0.1", r.route_port)
            yield Binding(subject=f'the route to replica "{r.name}"', address=where, field=None)
        if r.host != host:
            continue
        ports = [("http_port", (r.http_host, r.http_port))]
        if r.data_port is not None:
            ports.append(("data_port", (r.data_host, r.data_port)))
        if r.side_port is not None:
            ports.append(("side_port", (r.data_host, r.side_port)))
        for kind, where in ports:
            subject, field = f'replica "{r.name}" {kind}', f"replicas[{i}].{kind}"
            yield Binding(subject=subject, address=where, field=field, replica=r.name)


def check_bindings(wanted: Sequence[Binding]) -> list[Diagnostic]:
    """Tries each for a moment; what prevents it, in words."""
    known: list[Listener] | None = None
    found = []
    for binding in wanted:
        try:
            _bind(*binding.address)
        except OSError as error:
            if known is None:
                known = listeners()
            found.append(_diagnostic(binding, error, known))
    return found


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(where)
        trial.listen(1)


def _diagnostic(binding: Binding, error: OSError, known: Iterable[Listener]) -> Diagnostic:
    code, hint = "port", None
    reason = failed_bind(binding.address, error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        code, hint = "address", "give an address of that host's own, as its interfaces have it"
    elif error.errno == errno.EADDRINUSE:
        port = binding.address[1]
        owner = next((one for one in known if one.port == port and one.pid), None)
        reason += f" by {describe(owner)}" if owner is not None else ""
        code = "port_busy"
        hint = "stop it, choose another port, or leave the port away where pdctl may assign it"
    return Diagnostic(
        code=f"host.{code}",
        summary=f"{binding.subject}: {reason}",
        field=binding.field,
        replica=binding.replica,
        hint=hint,
    )


def failed_bind(address: tuple[str, int], error: OSError) -> str:
    """Why listening there failed, as a sentence goes on."""
    host, port = address
    if isinstance(error, socket.gaierror):
        return f"{host} does not resolve there"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of its host"
    return f"can't listen on {host} port {port}: {error.strerror}"


def describe(listener: Listener) -> str:
    """`python3 (pid 4711)`, as far as the system tells."""
    try:
        return f"{psutil.Process(listener.pid).name()} (pid {listener.pid})"
    except psutil.Error:
        return f"pid {listener.pid}"
