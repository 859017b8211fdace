"""The handoff's data plane on loopback against a plain copy of the same pages.

Two processes, one TCP connection each way of doing it, by turns in one run:

- plain: `sendall` of each page from the prompt's page memory, `recv_into` one page-sized
  buffer, then one byte back. No header, no checksum.
- handoff: a whole handoff of the same pages, already computed, from the receiver's Hello to its
  Done: checksums on both ends, the same page memory, the same kind of buffer; the engine's sink
  takes each piece and does nothing with it.

The clock runs in the sending process, from the order to receive until the byte, or Done: the
handoff's fixed cost is in. The figure is the median of each over several pairs of processes, and
their ratio. Each shape is measured

- as pdctl runs on a near link (cubic, or reno where that is not allowed) against a plain copy
  under the same congestion control: the claim, target at least 0.8;
- the same against a plain copy under the system's default, where that is another one;
- with pdctl held to the system's default too: what it would be without choosing;
- as pdctl runs with `handoff.encrypt`, against the plain copy in the clear: no target.

    python bench/data_plane.py [--repetitions 12] [--pairs 4] [--output DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from setting import RESULTS, machine, write

from pdctl.engines.interface import Leg
from pdctl.errors import HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.receiver import Receiver, Want
from pdctl.handoff.sender import Outbound, Sender
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.sockets import SocketOptions, congestion_of
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.handoff.transport.tls import Certificate, TlsTransport
from pdctl.runtime.cluster.certificate import cluster_certificate

TARGET_RATIO = 0.8
KEY = secrets.token_bytes(32)
DIGEST = "0" * 64
TIMEOUT_S = 60.0
WARM_UPS = 3
PACKAGES = ("numpy", "msgspec", "xxhash", "cryptography")
SHAPES = {
    "smollm2-135m": (PageGeometry(30, 3, 64), 64),
    "qwen2.5-7b": (PageGeometry(28, 4, 128), 32),
}


class Discard:
    """A sink that only counts; the page has been received and checked when it gets here."""

    def __init__(self) -> None:
        self.error: HandoffError | None = None

    def offered(self, tokens: int, deadline: float) -> Want:
        return Want(tokens=tokens)

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        return

    def commit(self, first_token: int | None) -> None:
        return

    def abort(self, error: HandoffError) -> None:
        self.error = error


def report(room: int, cause: str, detail: str) -> None:
    print(f"room {room}: {cause}: {detail}", file=sys.stderr)


def prepare(connected: socket.socket, congestion: str) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


class Setting(NamedTuple):
    """One comparison."""

    name: str
    plain: str
    """Congestion control of the plain copy; "": the system's."""
    options: SocketOptions
    """Of the handoff."""
    certificate: Certificate | None = None

    @property
    def transport(self) -> Transport:
        tcp = TcpTransport(self.options)
        return tcp if self.certificate is None else TlsTransport(tcp, self.certificate)


def settings() -> list[Setting]:
    ours, systems = SocketOptions(), SocketOptions(near_congestion=())
    default, chosen = congestion_under(systems), congestion_under(ours)
    found = [Setting("pdctl, same congestion control", chosen, ours)]
    if default != chosen:
        found.append(Setting("pdctl, plain copy under the default", "", ours))
        found.append(Setting("both under the default", "", systems))
    certificate = cluster_certificate(KEY.hex())
    return [*found, Setting("pdctl encrypted, plain copy in the clear", chosen, ours, certificate)]


def congestion_under(options: SocketOptions) -> str:
    """What a connection on loopback has; cubic where Python can't ask, as on macOS."""
    if not sys.platform.startswith("linux"):
        return "cubic"
    with socket.create_server(("127.0.0.1", 0)) as one:
        options.listening(one)
        return congestion_of(one)


def receive(
    orders: Connection, key: bytes, geometry: PageGeometry, plain_port: int, setting: Setting
) -> None:
    """The receiving process: obeys ("plain", pages) and ("handoff", leg, tokens) until None."""
    plain = socket.create_connection(("127.0.0.1", plain_port))
    prepare(plain, setting.plain)
    scratch = memoryview(bytearray(geometry.page_bytes))
    receiver = Receiver(
        Identity("d0", key, DIGEST),
        geometry,
        timeout_s=TIMEOUT_S,
        board=CounterBoard(),
        on_failed=report,
        transport=setting.transport,
    )
    orders.send("ready")
    while (order := orders.recv()) is not None:
        if order[0] == "handoff":
            receiver.fetch(order[1], range(order[2]), Discard())
            continue
        for _ in range(order[1]):
            got = 0
            while got < geometry.page_bytes:
                got += plain.recv_into(scratch[got:])
        plain.sendall(b"k")
    receiver.close()
    plain.close()


class Bench:
    """The sending process."""

    def __init__(self, geometry: PageGeometry, pages: int, setting: Setting) -> None:
        self.geometry = geometry
        self.pages = pages
        self.tokens = pages * geometry.page_tokens
        random = np.random.default_rng(0)
        self.source = random.integers(0, 1 << 16, (pages, *geometry.shape), dtype=np.uint16)
        self.sender = Sender(
            Identity("p0", KEY, DIGEST),
            geometry,
            listen=("127.0.0.1", 0),
            budget_bytes=2 * self.source.nbytes,
            timeout_s=TIMEOUT_S,
            board=CounterBoard(),
            on_failed=report,
            transport=setting.transport,
        )
        self.port = self.sender.start()
        listener = socket.create_server(("127.0.0.1", 0))
        # accepted connections inherit it
        prepare(listener, setting.plain)
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        arguments = (theirs, KEY, geometry, listener.getsockname()[1], setting)
        self.child = context.Process(target=receive, args=arguments)
        self.child.start()
        self.plain, _ = listener.accept()
        listener.close()
        assert self.orders.recv() == "ready"

    def close(self) -> None:
        self.orders.send(None)
        self.child.join(TIMEOUT_S)
        self.sender.close()
        self.plain.close()

    def both_s(self, *, plain_first: bool) -> tuple[float, float]:
        """Seconds of a plain copy and of a handoff, from one and the same page memory."""
        outbound = self._prepared()
        if plain_first:
            plain_s = self._plain_s(outbound.pages())
            return plain_s, self._handoff_s(outbound)
        # the pages are freed at the end of the handoff: keep them for the plain copy
        pages = outbound.pages()
        handoff_s = self._handoff_s(outbound)
        return self._plain_s(pages), handoff_s

    def _prepared(self) -> Outbound:
        room = secrets.randbits(62)
        ticket = mint(KEY, room, "p0", "d0", DIGEST, time.time() + TIMEOUT_S)
        address = f"127.0.0.1:{self.port}"
        self.leg = Leg(
            room=room,
            ticket=ticket,
            prefill="p0",
            decode="d0",
            sender=address,
            timeout_s=TIMEOUT_S,
        )
        outbound = self.sender.admit(
            self.leg,
            range(self.tokens),
            on_reserved=lambda outbound: None,
            on_settled=lambda outbound: None,
        )
        outbound.pages()[:] = self.source
        return outbound

    def _plain_s(self, pages: Patterns) -> float:
        views = [memoryview(page.reshape(-1).view(np.uint8)) for page in pages]
        began_s = time.perf_counter()
        self.orders.send(("plain", self.pages))
        for view in views:
            self.plain.sendall(view)
        assert self.plain.recv(1) == b"k"
        return time.perf_counter() - began_s

    def _handoff_s(self, outbound: Outbound) -> float:
        outbound.written(self.tokens)
        outbound.finish(0)
        began_s = time.perf_counter()
        self.orders.send(("handoff", self.leg, self.tokens))
        assert outbound.settled.wait(TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        if outbound.error is not None:
            raise outbound.error
        return took_s


def measured(name: str, setting: Setting, repetitions: int, pairs: int) -> dict[str, Any]:
    geometry, pages = SHAPES[name]
    samples: list[tuple[float, float]] = []
    for _ in range(pairs):
        bench = Bench(geometry, pages, setting)
        try:
            taken = [bench.both_s(plain_first=i % 2 == 0) for i in range(repetitions + WARM_UPS)]
        finally:
            bench.close()
        samples += taken[WARM_UPS:]
    size = pages * geometry.page_bytes
    plain_s = statistics.median(plain for plain, _ in samples)
    handoff_s = statistics.median(handoff for _, handoff in samples)
    return {
        "shape": name,
        "page_bytes": geometry.page_bytes,
        "pages": pages,
        "setting": setting.name,
        "plain_congestion": setting.plain or congestion_under(SocketOptions(near_congestion=())),
        "handoff_congestion": congestion_under(setting.options),
        "encrypted": setting.certificate is not None,
        "repetitions": len(samples),
        "plain_s": plain_s,
        "handoff_s": handoff_s,
        "plain_gb_per_s": size / plain_s / 1e9,
        "handoff_gb_per_s": size / handoff_s / 1e9,
        "ratio": plain_s / handoff_s,
        "paired_ratio": statistics.median(plain / handoff for plain, handoff in samples),
        "samples_s": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of processes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    options = parser.parse_args()
    results = [
        measured(name, setting, options.repetitions, options.pairs)
        for name in options.shape or SHAPES
        for setting in settings()
    ]
    for each in results:
        print(
            f"{each['shape']}, {each['setting']}: "
            f"{each['pages']} pages of {each['page_bytes']} B: "
            f"plain ({each['plain_congestion']}) {each['plain_gb_per_s']:.2f} GB/s, "
            f"handoff ({each['handoff_congestion']}) {each['handoff_gb_per_s']:.2f} GB/s, "
            f"ratio {each['ratio']:.2f} (paired {each['paired_ratio']:.2f}, "
            f"target {TARGET_RATIO})"
        )
    report = {
        "method": __doc__,
        "target_ratio": TARGET_RATIO,
        "machine": machine(*PACKAGES),
        "results": results,
    }
    print(write(options.output, "data_plane", report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
