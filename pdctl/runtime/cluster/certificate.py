"""The cluster's TLS certificate, derived from its key.

Every agent derives the same one, so that nothing but the key has to reach a host, and it dies
with the key. Ed25519 signs deterministically: the same key gives the same bytes. Both ends of a
trial connection derive one of their own from its token.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac

from pdctl.handoff.transport.tls import Certificate

NOT_BEFORE = datetime.datetime(2000, 1, 1)
NOT_AFTER = datetime.datetime(9999, 12, 31)
"""RFC 5280's "no expiry": clocks of hosts may differ, and the key ends with the cluster."""
NAME = "pdctl cluster"


def cluster_certificate(key: str) -> Certificate:
    """Self-signed, with its private key; `key` is the cluster's, 64 hex digits."""
    # only clusters with handoff.encrypt need the library
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = hmac.new(bytes.fromhex(key), b"pdctl.tls.v1", hashlib.sha256).digest()
    private = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, algorithm=None)
    )
    return Certificate(
        certificate_pem=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key_pem=private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )
