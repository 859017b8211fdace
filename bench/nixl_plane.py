"""Handoffs over NIXL between host memories, beside handoffs over TCP and NIXL alone.

Two processes on one host, four ways of moving the same pages by turns in one run:

- tcp: a whole handoff, already computed, as `bench/data_plane.py` does it.
- nixl: the same with `transport = "nixl"`: the receiver reads each piece out of the sender's
  memory; checksums on both ends as with TCP.
- plain read, plain write: NIXL alone, from and into the same memories, one request of one row a
  page; no checksum, no message but the order.

The clock runs in the sending process, from the order until Done, or the answer. The figure is the
median of each over several pairs of processes.

Beside that, what a process with one agent takes of a core while nothing moves: pdctl's, and one as
NIXL's Python layer makes it by itself.

It needs NIXL in its environment (`pip install --no-deps nixl-cu12`).

    python bench/nixl_plane.py [--repetitions 12] [--pairs 3] [--output DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from data_plane import DIGEST, KEY, SHAPES, TIMEOUT_S, WARM_UPS, Discard, report
from setting import RESULTS, machine, write

from pdctl.engines.interface import Leg
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import DeviceMemory, MemoryKind
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.receiver import Receiver
from pdctl.handoff.sender import Outbound, Sender
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.nixl import NixlReach, load

PACKAGES = ("numpy", "msgspec", "xxhash", "nixl-cu12")
WAYS = ("tcp", "nixl", "plain read", "plain write")
IDLE_S = 3.0


class Alone:
    """NIXL without pdctl: one agent, one block of memory, one request at a time."""

    def __init__(self, name: str, memory: Bytes | DeviceMemory) -> None:
        host = isinstance(memory, np.ndarray)
        kind = MemoryKind.HOST if host else memory.kind
        self.reach = NixlReach(name, one_host=True, kind=kind)
        self.memory = memory
        self.reach.expose(memory)
        self._kind = kind.value
        self.address, self.size, self.index = (
            (memory.ctypes.data, memory.nbytes, 0)
            if host
            else (memory.address, memory.size, memory.index)
        )

    def met(self, card: bytes) -> str:
        """The peer that shows this card, as NIXL names it."""
        return self.reach._name_of(card)

    def move(
        self, operation: str, peer: str, theirs: tuple[int, int], page_bytes: int, size: int
    ) -> None:
        """The first bytes of the memory, in rows of a page.

        Args:
            theirs: address and device of the peer's.
        """
        agent = self.reach._agent
        mine, remote = (
            agent.get_xfer_descs(
                [(start + at, page_bytes, device) for at in range(0, size, page_bytes)], self._kind
            )
            for start, device in ((self.address, self.index), theirs)
        )
        handle = agent.initialize_xfer(operation, mine, remote, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a plain {operation} ended as {state}")


def receive(orders: Connection, key: bytes, geometry: PageGeometry, size: int) -> None:
    """The receiving process: obeys (way, leg, tokens) until None."""
    alone = Alone("alone-d", np.ones(size, np.uint8))
    ends = {
        way: Receiver(
            Identity("d0", key, DIGEST),
            geometry,
            timeout_s=TIMEOUT_S,
            board=CounterBoard(),
            on_failed=report,
            reach=NixlReach("d0", one_host=True) if way == "nixl" else None,
        )
        for way in ("tcp", "nixl")
    }
    orders.send((alone.reach.card(), (alone.address, 0)))
    card, theirs = orders.recv()
    peer = alone.met(card)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        way, leg, tokens = order
        if way in ends:
            ends[way].fetch(leg, range(tokens), Discard())
            continue
        alone.move("READ", peer, theirs, geometry.page_bytes, size)
        orders.send("done")
    for each in ends.values():
        each.close()
    alone.reach.close()


class Bench:
    """The sending process."""

    def __init__(self, geometry: PageGeometry, pages: int) -> None:
        self.geometry = geometry
        self.tokens = pages * geometry.page_tokens
        size = pages * geometry.page_bytes
        random = np.random.default_rng(0)
        self.source = random.integers(0, 1 << 16, (pages, *geometry.shape), dtype=np.uint16)
        self.senders = {
            way: Sender(
                Identity("p0", KEY, DIGEST),
                geometry,
                listen=("127.0.0.1", 0),
                budget_bytes=2 * size,
                timeout_s=TIMEOUT_S,
                board=CounterBoard(),
                on_failed=report,
                reach=NixlReach("p0", one_host=True) if way == "nixl" else None,
            )
            for way in ("tcp", "nixl")
        }
        self.ports = {way: sender.start() for way, sender in self.senders.items()}
        self.alone = Alone("alone-p", np.ones(size, np.uint8))
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.child = context.Process(target=receive, args=(theirs, KEY, geometry, size))
        self.child.start()
        card, self.theirs = self.orders.recv()
        self.peer = self.alone.met(card)
        self.orders.send((self.alone.reach.card(), (self.alone.address, 0)))
        assert self.orders.recv() == "ready"

    def close(self) -> None:
        self.orders.send(None)
        self.child.join(TIMEOUT_S)
        for sender in self.senders.values():
            sender.close()
        self.alone.reach.close()

    def seconds(self, way: str) -> float:
        if way in self.senders:
            return self._handoff_s(way)
        began_s = time.perf_counter()
        if way == "plain write":
            page_bytes, size = self.geometry.page_bytes, self.alone.size
            self.alone.move("WRITE", self.peer, self.theirs, page_bytes, size)
        else:
            self.orders.send((way, None, 0))
            assert self.orders.recv() == "done"
        return time.perf_counter() - began_s

    def _handoff_s(self, way: str) -> float:
        leg = Leg(
            room=(room := secrets.randbits(62)),
            ticket=mint(KEY, room, "p0", "d0", DIGEST, time.time() + TIMEOUT_S),
            prefill="p0",
            decode="d0",
            sender=f"127.0.0.1:{self.ports[way]}",
            timeout_s=TIMEOUT_S,
        )
        outbound = self._computed(way, leg)
        began_s = time.perf_counter()
        self.orders.send((way, leg, self.tokens))
        assert outbound.settled.wait(TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        if outbound.error is not None:
            raise outbound.error
        return took_s

    def _computed(self, way: str, leg: Leg) -> Outbound:
        outbound = self.senders[way].admit(
            leg,
            range(self.tokens),
            on_reserved=lambda outbound: None,
            on_settled=lambda outbound: None,
        )
        outbound.pages()[:] = self.source
        outbound.written(self.tokens)
        outbound.finish(0)
        return outbound


def measured(name: str, repetitions: int, pairs: int) -> dict[str, Any]:
    geometry, pages = SHAPES[name]
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(pairs):
        bench = Bench(geometry, pages)
        try:
            for at in range(repetitions + WARM_UPS):
                for way in WAYS[at % len(WAYS) :] + WAYS[: at % len(WAYS)]:
                    taken_s = bench.seconds(way)
                    if at >= WARM_UPS:
                        samples[way].append(taken_s)
        finally:
            bench.close()
    size = pages * geometry.page_bytes
    medians = {way: statistics.median(each) for way, each in samples.items()}
    return {
        "shape": name,
        "page_bytes": geometry.page_bytes,
        "pages": pages,
        "repetitions": len(samples["tcp"]),
        "median_s": medians,
        "gb_per_s": {way: size / each / 1e9 for way, each in medians.items()},
        "nixl_to_tcp": medians["tcp"] / medians["nixl"],
        "nixl_to_plain_write": medians["plain write"] / medians["nixl"],
        "samples_s": samples,
    }


def agent(ours: bool) -> object:
    if ours:
        return NixlReach("idle", one_host=True)
    library = load()
    return library.nixl_agent("idle", library.nixl_agent_config(backends=["UCX"]))


def idle(answer: Connection, ours: bool) -> None:
    kept = agent(ours)
    began_s = time.process_time()
    time.sleep(IDLE_S)
    answer.send((time.process_time() - began_s) / IDLE_S)
    del kept


def share_of_a_core(ours: bool) -> float:
    """What a process with one agent takes of it while nothing moves."""
    context = multiprocessing.get_context("spawn")
    answer, theirs = context.Pipe()
    child = context.Process(target=idle, args=(theirs, ours))
    child.start()
    share = float(answer.recv())
    child.join(TIMEOUT_S)
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = [measured(name, options.repetitions, options.pairs) for name in SHAPES]
    for each in results:
        rates = ", ".join(f"{way} {rate:.2f}" for way, rate in each["gb_per_s"].items())
        print(f"{each['shape']}, {each['pages']} pages of {each['page_bytes']} B, GB/s: {rates}")
    shares = {"pdctl": share_of_a_core(True), "nixl": share_of_a_core(False)}
    print("of a core while idle:", ", ".join(f"{who} {took:.3f}" for who, took in shares.items()))
    described = {"method": __doc__, "machine": machine(*PACKAGES)}
    report_of = {**described, "results": results, "idle_share_of_a_core": shares}
    print(write(options.output, "nixl_plane", report_of))
    return 0


if __name__ == "__main__":
    sys.exit(main())
