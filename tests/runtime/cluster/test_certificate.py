"""The cluster's certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec
from handoff.ends import Sink, both_ends
from runtime.clusters import written

from pdctl.engines.channel import Assignment, encode
from pdctl.handoff.transport.choice import chosen_transport
from pdctl.handoff.transport.tls import TlsTransport, make_context
from pdctl.runtime.agent.orders import Orders
from pdctl.runtime.cluster.certificate import cluster_certificate

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


def test_two_agents_replicas_hand_over_under_tls(tmp_path: Path) -> None:
    """From the key to a committed prompt: each end's transport is made from its own agent's
    assignment, as it arrives over the agent's socket."""
    with written(tmp_path) as (state, record):
        handoff = msgspec.structs.replace(record.topology.handoff, encrypt=True)
        topology = msgspec.structs.replace(record.topology, handoff=handoff)
        record = msgspec.structs.replace(record, topology=topology)
        transports = []
        for name in ("p0", "d0"):
            orders = Orders(record, state, "local", environ={})
            sent = encode(orders.assignment(record.plan.replica(name)))
            assigned = msgspec.msgpack.decode(sent[4:], type=Assignment)
            transports.append(chosen_transport(assigned.certificate, {}))
    assert all(isinstance(each, TlsTransport) for each in transports)
    with both_ends(transports[0], receiving=transports[1]) as ends:
        ends.run(130, sink := Sink())
        assert sink.committed
