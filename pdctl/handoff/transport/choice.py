"""The transport that a replica's assignment and environment ask for."""

from __future__ import annotations

from collections.abc import Mapping

from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.sockets import options_of
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.handoff.transport.tls import Certificate, TlsTransport


def chosen_transport(certificate: Certificate | None, environ: Mapping[str, str]) -> Transport:
    """TCP, under TLS where the cluster has a certificate.

    Raises:
        UsageError: the environment asks for a pacing that this platform can't do.
    """
    tcp = TcpTransport(options_of(environ))
    return tcp if certificate is None else TlsTransport(tcp, certificate)
