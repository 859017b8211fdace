"""The cluster's certificate."""

from __future__ import annotations

import ssl

from pdctl.handoff.transport.tls import make_context
from pdctl.runtime.certificate import cluster_certificate

ONE, OTHER = "ab" * 32, "cd" * 32


def test_a_key_has_one_certificate() -> None:
    """The same bytes wherever it is derived; another key's differs in both parts."""
    made = cluster_certificate(ONE)
    assert made == cluster_certificate(ONE)
    other = cluster_certificate(OTHER)
    assert made.certificate_pem != other.certificate_pem
    assert made.key_pem != other.key_pem


def test_the_key_can_be_read_from_neither_certificate_nor_repr() -> None:
    made = cluster_certificate(ONE)
    assert ONE not in made.key_pem + made.certificate_pem
    assert made.key_pem.splitlines()[1] not in repr(made)


def test_openssl_takes_it_for_both_ends() -> None:
    """TLS 1.3 only, and a peer without a certificate is refused on either side."""
    for server in (True, False):
        context = make_context(cluster_certificate(ONE), server=server)
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) + len(context.cert_store_stats()) > 0
