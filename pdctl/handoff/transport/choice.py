"""The transport that a replica's assignment and environment ask for."""

from __future__ import annotations

from collections.abc import Mapping

from pdctl.handoff.device import MemoryKind
from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.nixl import NixlReach
from pdctl.handoff.transport.reach import Reach
from pdctl.handoff.transport.sockets import options_of
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.handoff.transport.tls import Certificate, TlsTransport
from pdctl.topology import model as kinds
from pdctl.topology.addresses import is_loopback


def chosen_transport(certificate: Certificate | None, environ: Mapping[str, str]) -> Transport:
    """TCP, under TLS where the cluster has a certificate.

    Raises:
        UsageError: the environment asks for a pacing that this platform can't do.
    """
    tcp = TcpTransport(options_of(environ))
    return tcp if certificate is None else TlsTransport(tcp, certificate)


def chosen_reach(
    replica: str,
    transports: Mapping[str, kinds.Transport],
    data_host: str,
    kind: MemoryKind = MemoryKind.HOST,
) -> Reach | None:
    """NIXL where any pair of this replica moves its pages that way.

    Raises:
        HandoffError: it does not work here: a pair never takes another way without a word.
    """
    if kinds.Transport.NIXL not in transports.values():
        return None
    return NixlReach(replica, one_host=is_loopback(data_host), kind=kind)
