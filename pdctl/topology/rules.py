"""Rules that need more than one field: pure functions from a topology to diagnostics."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping

from pdctl.topology import addresses, alone, native, nixl
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.fields import split_address
from pdctl.topology.model import PAGE_TOKENS, Policy, Replica, Role, Topology
from pdctl.topology.sharing import sharing_hosts, sharing_rules
from pdctl.topology.sizes import approximate_size

RESERVED_NAMES = frozenset({"router", "agent"})
"""Names that logs, sockets and messages already use."""
TRIED_PAGES = 2
"""What a canary's prompt takes at least: a page boundary is to be crossed."""


def check(topology: Topology, *, partial: bool = False) -> list[Diagnostic]:
    """Every broken rule.

    Args:
        partial: some replica's role is unknown, so that the absence of a role proves nothing;
            rules about what is missing are then left out.
    """
    found: list[Diagnostic] = []
    for rule in RULES:
        found += rule(topology)
    if not partial:
        found += _roles(topology)
    return found


def check_environment(
    topology: Topology, environ: Mapping[str, str], severity: Severity = Severity.ERROR
) -> list[Diagnostic]:
    """What the file needs from the environment of whoever launches.

    Args:
        severity: of what is missing there.
    """
    name = topology.router.api_key_env
    if name is None or environ.get(name, "").strip():
        return []
    state = "empty" if name in environ else "not set"
    return [
        Diagnostic(
            severity=severity,
            code="topology.api_key_unset",
            summary=f"router: the environment variable {name} is {state}",
            field="router.api_key_env",
            hint=f"export {name}=… before `up`, or leave api_key_env away",
        )
    ]


def check_buffer(topology: Topology, contract: Contract) -> list[Diagnostic]:
    """Warns of a page budget that does not hold one whole context; an error where it does not
    even hold what every pair is tried with at `up`."""
    budget = topology.handoff.buffer_bytes
    pages = -(-topology.model.context_length // PAGE_TOKENS)
    sends = any(r.role is Role.PREFILL for r in topology.replicas)
    if budget is None or not sends or budget >= pages * contract.page_bytes:
        return []
    held = budget // contract.page_bytes
    if held < min(TRIED_PAGES, pages):
        return [
            Diagnostic(
                code="topology.small_buffer",
                summary=f"handoff: buffer_bytes holds {held} pages; the prompt that each pair is "
                f"tried with at `up` takes {TRIED_PAGES}",
                detail=f"one page of {PAGE_TOKENS} tokens takes {contract.page_bytes:,} bytes",
                field="handoff.buffer_bytes",
                hint=f'write buffer_bytes = "{-(-pages * contract.page_bytes >> 20)}MiB", which '
                "holds one whole context, or leave it away",
            )
        ]
    tokens = held * PAGE_TOKENS
    need = approximate_size(pages * contract.page_bytes)
    return [
        Diagnostic(
            severity=Severity.WARNING,
            code="topology.small_buffer",
            summary=f"handoff: buffer_bytes is under one context; the longest prompt that it "
            f"admits has {tokens} tokens",
            detail=f"one context of {topology.model.context_length} tokens takes {need}",
            field="handoff.buffer_bytes",
            hint=f'write buffer_bytes = "{-(-pages * contract.page_bytes >> 20)}MiB" or more',
        )
    ]


def declared_ports(topology: Topology) -> Iterator[tuple[str, int, str, str | None, str]]:
    """(host, port, what it is for, replica, field) of every port that the file names."""
    for i, r in enumerate(topology.replicas):
        for kind in ("http_port", "data_port", "side_port"):
            port = getattr(r, kind)
            if port is not None:
                yield r.host, port, f'replica "{r.name}" {kind}', r.name, f"replicas[{i}].{kind}"
    _, port = split_address(topology.router.bind)
    yield topology.router.host, port, "the router", None, "router.bind"


def _names(topology: Topology) -> Iterable[Diagnostic]:
    first: dict[str, int] = {}
    for i, r in enumerate(topology.replicas):
        if r.name in RESERVED_NAMES:
            yield _error(
                "reserved_name",
                f'replica "{r.name}": this name is taken by pdctl itself',
                f"replicas[{i}].name",
                r.name,
                "give the replica another name",
            )
        if r.name in first:
            yield _error(
                "duplicate_name",
                f'two replicas are named "{r.name}" (replicas[{first[r.name]}] and replicas[{i}])',
                f"replicas[{i}].name",
                r.name,
                "give each replica a name of its own",
            )
        first.setdefault(r.name, i)


def _hosts(topology: Topology) -> Iterable[Diagnostic]:
    named = [(f'replica "{r.name}"', r.host, f"replicas[{i}].host", r.name)
             for i, r in enumerate(topology.replicas)]  # fmt: skip
    uses = [*named, ("router", topology.router.host, "router.host", None)]
    for subject, host, field, replica in uses:
        if host in topology.hosts:
            continue
        near = difflib.get_close_matches(host, topology.hosts, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"add a table [hosts.{host}]"
        summary = f'{subject}: there is no host "{host}"'
        yield _error("unknown_host", summary, field, replica, hint)


def _ports(topology: Topology) -> Iterable[Diagnostic]:
    taken: dict[tuple[str, int], str] = {}
    for host, port, what, replica, field in declared_ports(topology):
        other = taken.setdefault((host, port), what)
        if other is not what:
            yield _error(
                "port_clash",
                f'port {port} on host "{host}" is claimed by {other} and by {what}',
                field,
                replica,
                "give one of them another port, or leave it away: pdctl then assigns one",
            )


def _paths(topology: Topology) -> Iterable[Diagnostic]:
    for i, r in enumerate(topology.replicas):
        if not r.model.startswith(("/", "~")):
            yield _error(
                "relative_path",
                f'replica "{r.name}": model "{r.model}" is not an absolute path',
                f"replicas[{i}].model",
                r.name,
                "write a path that starts with / or ~ and names the checkpoint's directory",
            )
        if r.python is not None and "/" in r.python and not r.python.startswith(("/", "~")):
            yield _relative_python(f'replica "{r.name}"', r.python, f"replicas[{i}].python", r.name)
    for host in topology.hosts.values():
        for kind in ("python", "agent_python"):
            path = getattr(host, kind)
            if path is not None and "/" in path and not path.startswith(("/", "~")):
                field = f"hosts.{host.name}.{kind}"
                yield _relative_python(f'host "{host.name}"', path, field, None)


def _relative_python(subject: str, path: str, field: str, replica: str | None) -> Diagnostic:
    summary = f'{subject}: {field.rpartition(".")[2]} "{path}" is not an absolute path'
    hint = "write a path that starts with / or ~, or a bare command name"
    return _error("relative_path", summary, field, replica, hint)


def _exposure(topology: Topology) -> Iterable[Diagnostic]:
    """R60: says that a router beyond loopback without a key is open to everybody."""
    host, _ = split_address(topology.router.bind)
    if topology.router.api_key_env is None and not addresses.is_loopback(host):
        yield Diagnostic(
            severity=Severity.WARNING,
            code="topology.open_router",
            summary=f"router: {topology.router.bind} is open to the network without an API key",
            field="router.bind",
            hint='add api_key_env = "PDCTL_API_KEY" under [router]',
        )


def _unread(topology: Topology) -> Iterable[Diagnostic]:
    """Prefixes are of token ids, for which the router's host needs a checkpoint's tokenizer."""
    router = topology.router
    here = any(r.host == router.host for r in topology.replicas)
    if router.policy is Policy.PREFIX and not here:
        yield Diagnostic(
            severity=Severity.WARNING,
            code="topology.unread_prefixes",
            summary=f'router: policy = "prefix" goes by load, because no replica of host '
            f'"{router.host}" has a tokenizer to read prompts with',
            field="router.policy",
            hint='run the router where a replica is, or write policy = "least_loaded"',
        )


def _unused(topology: Topology) -> Iterable[Diagnostic]:
    for i, r in enumerate(topology.replicas):
        for kind, why in _unused_ports(topology, r):
            yield Diagnostic(
                severity=Severity.WARNING,
                code="topology.unused_port",
                summary=f'replica "{r.name}": {kind} is unused, because {why}',
                field=f"replicas[{i}].{kind}",
                replica=r.name,
                hint=f"leave {kind} away",
            )
    if topology.sharing is not None and not sharing_hosts(topology):
        yield Diagnostic(
            severity=Severity.WARNING,
            code="topology.sharing_off",
            summary="sharing: it is off, because it needs two ordinary replicas",
            field="sharing",
            hint="leave [sharing] away",
        )


def _unused_ports(topology: Topology, replica: Replica) -> Iterator[tuple[str, str]]:
    """(port, why nobody listens there) of the declared ones."""
    if replica.data_port is not None and replica.role is not Role.PREFILL:
        yield "data_port", "only prefill replicas listen for the data plane"
    elif replica.data_port is not None and native.is_native(topology, replica):
        yield "data_port", 'with transport = "native" its engine\'s own handoff listens instead'
    if replica.side_port is not None and not native.has_side_port(topology, replica):
        yield "side_port", "no native handoff listens on this replica"


def _roles(topology: Topology) -> Iterable[Diagnostic]:
    by_role: dict[Role, list[Replica]] = {role: [] for role in Role}
    for r in topology.replicas:
        by_role[r.role].append(r)
    if not topology.replicas:
        hint = "add a [[replicas]] table with name, engine, role and model"
        yield _error("no_replicas", "the topology has no replicas", "replicas", None, hint)
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if by_role[role] and not by_role[other]:
            first = by_role[role][0]
            yield _error(
                f"no_{other}",
                f'replica "{first.name}": there is no {other} replica for its role {role}',
                f"replicas[{topology.replicas.index(first)}].role",
                first.name,
                f'add a replica with role = "{other}", or write role = "both"',
            )


RULES: tuple[Callable[[Topology], Iterable[Diagnostic]], ...] = (
    _names,
    _hosts,
    _ports,
    _paths,
    addresses.addresses,
    addresses.one_agent,
    addresses.routes,
    native.rules,
    nixl.rules,
    _exposure,
    _unread,
    _unused,
    alone.baseline,
    alone.recompute,
    alone.decisions,
    sharing_rules,
)


def _error(
    code: str, summary: str, field: str, replica: str | None = None, hint: str | None = None
) -> Diagnostic:
    return Diagnostic(
        code=f"topology.{code}", summary=summary, field=field, replica=replica, hint=hint
    )
