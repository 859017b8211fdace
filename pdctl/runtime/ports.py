"""Whether this machine can listen where a plan says; nothing is left listening."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator

import psutil

from pdctl.runtime.hosts.interface import Listener
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.fields import split_address
from pdctl.topology.plan import Plan


def check_ports(
    plan: Plan, listeners: Iterable[Listener], *, own_ports: frozenset[int] = frozenset()
) -> list[Diagnostic]:
    """Tries every address that a plan listens on, but the ports that its cluster has itself."""
    known = tuple(listeners)
    return [
        found
        for subject, address, field, replica in _addresses(plan)
        if address[1] not in own_ports
        for found in check_bind(subject, address, field=field, replica=replica, listeners=known)
    ]


def _addresses(plan: Plan) -> Iterator[tuple[str, tuple[str, int], str | None, str | None]]:
    """(who, where, field, replica)."""
    yield "router", split_address(plan.router_bind), "router.bind", None
    for host, port in plan.agent_ports.items():
        yield f'agent of host "{host}"', ("127.0.0.1", port), None, None
    for i, r in enumerate(plan.replicas):
        subject, place = f'replica "{r.name}"', f"replicas[{i}]"
        http = (r.http_host, r.http_port)
        yield f"{subject} http_port", http, f"{place}.http_port", r.name
        if r.data_port is not None:
            data = (r.data_host, r.data_port)
            yield f"{subject} data_port", data, f"{place}.data_port", r.name


def check_bind(
    subject: str,
    address: tuple[str, int],
    *,
    field: str | None,
    replica: str | None = None,
    listeners: Iterable[Listener] = (),
) -> list[Diagnostic]:
    """Tries to bind `address` for a moment; what prevents it, in words.

    Args:
        subject: who wants to listen, as a sentence starts: `replica "p0" http_port`.
        listeners: what is known about listening ports, to name who has this one.
    """
    host, port = address
    code: str
    hint: str | None
    try:
        _bind(host, port)
    except socket.gaierror:
        summary = f"{subject}: {host} does not resolve on this machine"
        code, hint = "address", "give an address of this machine"
    except OSError as error:
        summary, code, hint = _reason(subject, address, error, listeners)
    else:
        return []
    return [
        Diagnostic(code=f"host.{code}", summary=summary, field=field, replica=replica, hint=hint)
    ]


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(where)
        trial.listen(1)


def _reason(
    subject: str, address: tuple[str, int], error: OSError, listeners: Iterable[Listener]
) -> tuple[str, str, str | None]:
    """(summary, code, hint) of a failed bind."""
    host, port = address
    if error.errno == errno.EADDRINUSE:
        owner = next((one for one in listeners if one.port == port), None)
        used_by = f" by {describe(owner)}" if owner is not None and owner.pid else ""
        hint = "stop it, choose another port, or leave the port away where pdctl may assign it"
        return f"{subject}: port {port} is in use{used_by}", "port_busy", hint
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "give an address of this machine"
        return f"{subject}: {host} is no address of this machine", "address", hint
    return f"{subject}: can't listen on {host} port {port}: {error.strerror}", "port", None


def describe(listener: Listener) -> str:
    """`python3 (pid 4711)`, as far as the system tells."""
    try:
        return f"{psutil.Process(listener.pid).name()} (pid {listener.pid})"
    except psutil.Error:
        return f"pid {listener.pid}"
