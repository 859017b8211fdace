"""The handoff's data plane beside an interpreter that is busy, as an engine's is.

Two processes on loopback, as in `data_plane.py`, and whole handoffs of prompts of 8000 tokens,
in the order in which vLLM's pages leave: each layer is written once the one before it is
(`layers`), or everything at once (`whole`). The clock runs in the sending process, from the first
`written` until Done.

Beside the data plane runs a load, in the sender's process, the receiver's, both or neither:

- python: a loop of plain Python that never gives the interpreter away by itself;
- launches: short plain Python, then a call that gives it away for some microseconds, as an
  engine's thread does that launches kernels.

Each load runs as a thread of the engine's process (`thread`), and, as the control, in a
process of its own (`beside`): where processor cores are few, the control says what the cores alone
cost, and the difference is the interpreter's. `kept` is the load's own speed while pages travel, as
a part of its speed while none do; `engine_s_per_gb`, where there is no load, the processor time
that a handoff takes of the engine's own processes, the data plane's own apart.

The data plane itself is

- inside: threads of the engine's process, which switches threads every 5 ms, as Python does;
- inside, quick: the same, every 0.5 ms;
- apart: a process of its own, and the engine's switches every 0.5 ms: what vLLM and SGLang have.

    python bench/busy_interpreter.py [--repetitions 9] [--shape 0.5b] [--output DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data_plane import DIGEST, KEY, TIMEOUT_S, Discard, report
from setting import RESULTS, machine, write

from pdctl.engines.interface import Leg
from pdctl.engines.session import SWITCH_INTERVAL_S
from pdctl.handoff.apart.plane import ApartCommon
from pdctl.handoff.apart.receiving import ApartReceiver
from pdctl.handoff.apart.sending import ApartSender
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.opening import Opening, open_receiver, open_sender
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.seam import Outgoing, ReceivingEnd, SendingEnd
from pdctl.handoff.sink import Want
from pdctl.handoff.ticket import mint

WARM_UPS = 2
QUIET_S = 0.4
"""How long a load's own speed is taken without a handoff."""
GRANT_S = 0.05
"""After the receiver's engine has answered, until its Grant is here, however busy."""
PACKAGES = ("numpy", "msgspec", "xxhash")
SHAPES = {"0.5b": (PageGeometry(24, 2, 64), 125), "7b": (PageGeometry(28, 4, 128), 125)}
SWITCH_S = {"inside": 0.005, "inside, quick": SWITCH_INTERVAL_S, "apart": SWITCH_INTERVAL_S}
WHERE = ("sender", "receiver", "both")
CONTEXT = multiprocessing.get_context("spawn")


class Setting(NamedTuple):
    order: str
    """`layers` or `whole`."""
    load: str = ""
    """`python`, `launches`, or none."""
    where: str = ""
    how: str = ""
    """`thread` or `beside`."""
    plane: str = "inside"
    """Of `SWITCH_S`."""

    @property
    def name(self) -> str:
        return ", ".join(part for part in self if part)

    def beside(self, end: str) -> bool:
        return bool(self.load) and self.where in (end, "both")


def settings() -> list[Setting]:
    idle = [Setting(order, plane=plane) for order in ("whole", "layers") for plane in SWITCH_S]
    loads = [(load, where) for load in ("python", "launches") for where in WHERE]
    return [
        *idle,
        *(Setting("layers", *each, "thread", plane) for each in loads for plane in SWITCH_S),
        *(Setting("layers", *each, "beside") for each in loads),
    ]


def opened(plane: str, opening: Opening) -> tuple[SendingEnd | None, ReceivingEnd | None]:
    board = CounterBoard()
    if plane == "apart":
        common: ApartCommon = {"lock": None, "board": board, "on_failed": report, "on_lost": print}
        if opening.sends:
            return ApartSender(opening, **common), None
        return None, ApartReceiver(opening, **common)
    if opening.sends:
        return open_sender(opening, os.environ, board, report), None
    return None, open_receiver(opening, os.environ, board, report)


class Told(Discard):
    """Says that the prompt was offered."""

    def __init__(self, orders: Connection) -> None:
        super().__init__()
        self._orders = orders

    def offered(self, tokens: int, deadline: float) -> Want:
        self._orders.send("offered")
        return super().offered(tokens, deadline)


class Load:
    """Counts its own turns, on a thread of this process."""

    def __init__(self, kind: str) -> None:
        self.turns = 0
        self._stopped = False
        turn = {"python": self._python, "launches": self._launches()}[kind]
        self._thread = threading.Thread(target=self._run, args=(turn,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self, turn: Callable[[], None]) -> None:
        while not self._stopped:
            turn()
            self.turns += 1

    def _python(self) -> None:
        total = 0
        for i in range(200):
            total += i * i

    def _launches(self) -> Callable[[], None]:
        left, right = np.ones(1 << 14, np.float32), np.ones(1 << 14, np.float32)

        def turn() -> None:
            total = 0
            for i in range(200):
                total += i * i
            np.multiply(left, right, out=left)

        return turn


def bear(orders: Connection, kind: str) -> None:
    """A process that is nothing but a load; answers each order with its turns until None."""
    load = Load(kind)
    orders.send("ready")
    while orders.recv() is not None:
        orders.send(load.turns)
    load.stop()


class Beside:
    """A load in a process of its own, with `Load`'s interface."""

    def __init__(self, kind: str) -> None:
        self._orders, theirs = CONTEXT.Pipe()
        self._child = CONTEXT.Process(target=bear, args=(theirs, kind))
        self._child.start()
        assert self._orders.recv() == "ready"

    @property
    def turns(self) -> int:
        self._orders.send("turns")
        turns: int = self._orders.recv()
        return turns

    def stop(self) -> None:
        self._orders.send(None)
        self._child.join(TIMEOUT_S)


def loaded(setting: Setting, end: str) -> Load | Beside | None:
    if not setting.beside(end):
        return None
    return Load(setting.load) if setting.how == "thread" else Beside(setting.load)


def receive(orders: Connection, key: bytes, geometry: PageGeometry, setting: Setting) -> None:
    """The receiving process: obeys ("handoff", leg, tokens) and ("turns",) until None."""
    sys.setswitchinterval(SWITCH_S[setting.plane])
    identity = Identity("d0", key, DIGEST)
    opening = Opening(identity=identity, geometry=geometry, sends=False, timeout_s=TIMEOUT_S)
    _, receiver = opened(setting.plane, opening)
    assert receiver is not None
    receiver.start()
    load = loaded(setting, "receiver")
    orders.send("ready")
    while (order := orders.recv()) is not None:
        if order[0] == "handoff":
            receiver.fetch(order[1], range(order[2]), Told(orders))
        else:
            orders.send((load.turns if load is not None else 0, time.process_time()))
    if load is not None:
        load.stop()
    receiver.close()


class Turns(NamedTuple):
    """Of the load beside one end, and processor seconds of its engine's process; so far, or
    per second."""

    turns: float
    cpu_s: float


Both = tuple[Turns, Turns]
"""Of the sender's engine and of the receiver's."""


def between(before: Both, after: Both, took_s: float) -> Both:
    """Per second."""
    sender, receiver = (
        Turns((b.turns - a.turns) / took_s, (b.cpu_s - a.cpu_s) / took_s)
        for a, b in zip(before, after, strict=True)
    )
    return sender, receiver


class Bench:
    """The sending process."""

    def __init__(self, geometry: PageGeometry, pages: int, setting: Setting) -> None:
        self.geometry = geometry
        self.setting = setting
        self.speeds: list[tuple[Both, float]] = []
        """During each handoff, and its seconds."""
        self.tokens = pages * geometry.page_tokens
        random = np.random.default_rng(0)
        self.source = random.integers(0, 1 << 16, (pages, *geometry.shape), dtype=np.uint16)
        sys.setswitchinterval(SWITCH_S[setting.plane])
        opening = Opening(
            identity=Identity("p0", KEY, DIGEST),
            geometry=geometry,
            sends=True,
            timeout_s=TIMEOUT_S,
            buffer_bytes=2 * self.source.nbytes,
        )
        sender, _ = opened(setting.plane, opening)
        assert sender is not None
        self.sender = sender
        self.port = self.sender.start()
        self.orders, theirs = CONTEXT.Pipe()
        self.child = CONTEXT.Process(target=receive, args=(theirs, KEY, geometry, setting))
        self.child.start()
        assert self.orders.recv() == "ready"
        self.load = loaded(setting, "sender")

    def close(self) -> None:
        if self.load is not None:
            self.load.stop()
        self.orders.send(None)
        self.child.join(TIMEOUT_S)
        self.sender.close()

    def turns(self) -> tuple[Turns, Turns]:
        """Of the loads beside the sender and beside the receiver, so far."""
        self.orders.send(("turns",))
        there = Turns(*self.orders.recv())
        own = self.load.turns if self.load is not None else 0
        return Turns(own, time.process_time()), there

    def handoff_s(self) -> float:
        leg = self._leg()
        reserved = threading.Event()
        outbound = self.sender.admit(
            leg,
            range(self.tokens),
            on_reserved=lambda outbound: reserved.set(),
            on_settled=lambda outbound: None,
        )
        assert reserved.wait(TIMEOUT_S)
        outbound.pages()[:] = self.source
        self.orders.send(("handoff", leg, self.tokens))
        assert self.orders.recv() == "offered"
        time.sleep(GRANT_S)
        before, looked_s = self.turns(), time.perf_counter()
        began_s = time.perf_counter()
        self._write(outbound)
        outbound.finish(0)
        assert outbound.settled.wait(TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        after, during_s = self.turns(), time.perf_counter() - looked_s
        self.speeds.append((between(before, after, during_s), during_s))
        if outbound.error is not None:
            raise outbound.error
        return took_s

    def _leg(self) -> Leg:
        room = secrets.randbits(62)
        return Leg(
            room=room,
            ticket=mint(KEY, room, "p0", "d0", DIGEST, time.time() + TIMEOUT_S),
            prefill="p0",
            decode="d0",
            sender=f"127.0.0.1:{self.port}",
            timeout_s=TIMEOUT_S,
        )

    def _write(self, outbound: Outgoing) -> None:
        if self.setting.order == "whole":
            outbound.written(self.tokens)
            return
        for layer in range(self.geometry.layers):
            outbound.written(self.tokens, layers=layer + 1)


def measured(shape: str, setting: Setting, repetitions: int) -> dict[str, Any]:
    geometry, pages = SHAPES[shape]
    bench = Bench(geometry, pages, setting)
    try:
        for _ in range(WARM_UPS):
            bench.handoff_s()
        before, began_s = bench.turns(), time.perf_counter()
        time.sleep(QUIET_S)
        alone = between(before, bench.turns(), time.perf_counter() - began_s)
        taken = [bench.handoff_s() for _ in range(repetitions)]
    finally:
        bench.close()
    size = pages * geometry.page_bytes
    took_s = statistics.median(taken)
    during = bench.speeds[WARM_UPS:]
    ends = list(enumerate(("sender", "receiver")))
    return {
        "shape": shape,
        "bytes": size,
        "setting": setting.name,
        "gb_per_s": size / took_s / 1e9,
        "kept": {
            end: round(statistics.median(each[i].turns for each, _ in during) / alone[i].turns, 3)
            for i, end in ends
            if alone[i].turns
        },
        "engine_s_per_gb": None
        if setting.load
        else {
            end: round(statistics.fmean(each[i].cpu_s * s for each, s in during) / size * 1e9, 4)
            for i, end in ends
        },
        "samples_s": taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    parser.add_argument("--only", action="append", help="settings whose name has such a part")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = []
    for shape in options.shape or SHAPES:
        for setting in settings():
            if not any(part in setting.name for part in options.only or [""]):
                continue
            each = measured(shape, setting, options.repetitions)
            results.append(each)
            print(
                f"{shape}: {setting.name}: {each['gb_per_s']:.2f} GB/s, "
                f"kept {each['kept']}, engine {each['engine_s_per_gb']}",
                flush=True,
            )
    whole = {"method": __doc__, "machine": machine(*PACKAGES), "results": results}
    print(write(options.output, "busy_interpreter", whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
