"""Transports under TLS, with certificates as a cluster's agents derive them."""

from __future__ import annotations

from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.handoff.transport.tls import Certificate, TlsTransport
from pdctl.runtime.cluster.certificate import cluster_certificate

OURS = cluster_certificate("ab" * 32)
OTHER = cluster_certificate("cd" * 32)


def encrypted(inner: Transport | None = None, certificate: Certificate = OURS) -> TlsTransport:
    return TlsTransport(inner or TcpTransport(), certificate)
