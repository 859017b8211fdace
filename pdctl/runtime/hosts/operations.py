"""What a far end can be asked, by name: types of arguments and answer, and errors that travel.

Both ends are of one version (Hello), so the table is all there is to agree on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pdctl import errors
from pdctl.engines.interface import Command
from pdctl.errors import HostError, PdctlError
from pdctl.runtime.hosts.interface import Completed, Mark, Slice
from pdctl.runtime.hosts.survey import Binding, CheckpointRead, Dialled, HostFacts, Listener
from pdctl.runtime.hosts.wire import Failure
from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.fingerprint import Fingerprint, FingerprintError
from pdctl.topology.model import Host


class Operation(NamedTuple):
    arguments: Any
    """A tuple type."""
    answer: Any


_Address = tuple[str, int]

OPERATIONS: dict[str, Operation] = {
    "run": Operation(tuple[Command, bytes, float], Completed),
    "spawn": Operation(tuple[Command, str], Mark),
    "alive": Operation(tuple[Mark], bool),
    "signal": Operation(tuple[Mark, int], None),
    "marked": Operation(tuple[str], list[Mark]),
    "survey.listeners": Operation(tuple[()], list[Listener]),
    "read": Operation(tuple[str, int], bytes | None),
    "slice": Operation(tuple[str, int, int], Slice),
    "write": Operation(tuple[str, bytes], None),
    "remove": Operation(tuple[str], None),
    "make_dir": Operation(tuple[str], None),
    "survey.facts": Operation(tuple[()], HostFacts),
    "survey.checkpoint": Operation(tuple[str], CheckpointRead),
    "survey.fingerprint": Operation(tuple[str, Checkpoint], Fingerprint),
    "survey.bindings": Operation(tuple[tuple[Binding, ...]], list[Diagnostic]),
    "survey.answer": Operation(tuple[_Address, str, float, bool], None),
    "survey.dial": Operation(tuple[_Address, str, float, int, bool], Dialled),
    "relay": Operation(tuple[str, str, list[Any], float], Any),
    "route": Operation(tuple[Host], HostFacts),
}


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(raw: bytes, kind: Any) -> Any:
    """Raises msgspec.MsgspecError where the other end speaks otherwise after all."""
    return msgspec.msgpack.decode(raw, type=kind)


_TRAVELLING: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        HostError,
        errors.UsageError,
        errors.TopologyError,
        FingerprintError,
        errors.ClusterError,
        errors.AgentLost,
        KeyError,
    )
}


def failure(request: int, error: Exception) -> Failure:
    """How an error travels; what is not a PdctlError or a KeyError is described."""
    if isinstance(error, PdctlError):
        return Failure(
            id=request, kind=type(error).__name__, message=error.message, hint=error.hint
        )
    if isinstance(error, KeyError) and error.args:
        return Failure(id=request, kind="KeyError", message=str(error.args[0]))
    kind = type(error).__name__
    return Failure(id=request, kind=kind, message=f"unexpected {kind}: {error}")


def failed(host: str, found: Failure) -> Exception:
    """The same error here; a HostError that names the host where its class does not travel."""
    kind = _TRAVELLING.get(found.kind)
    if kind is None:
        return HostError(f'host "{host}": {found.message}', hint=found.hint)
    if issubclass(kind, PdctlError):
        return kind(found.message, hint=found.hint)
    return kind(found.message)
