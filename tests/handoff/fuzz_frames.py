"""Broken sequences of frames against a live sender and a live receiver, in one process.

Each session is a valid exchange, up to a random point; from there on its frames are mutated
(bits flipped, cut short, duplicated, reordered, left out, oversized, with other fields under a
right checksum, garbage between them) and sent whether or not the other end still reads. What is
counted as fed is every frame from that point on that the other end took off the link, whole or
in part. Then:

- nothing crashed: no thread of a handoff raised, nothing was logged as an error;
- whatever was committed is bit by bit the prompt's pages, unless a frame was given a right
  checksum over changed bytes, which no receiver could tell;
- each handoff ended on either end, exactly once, and no room, byte of the budget, thread or
  connection is left;
- memory is flat once the warm-up (a tenth) is over. Closed rooms are remembered by design, up
  to a bound, which is lowered to 1,024 here so that it is reached at once.

    python tests/handoff/fuzz_frames.py [FRAMES] [--seed 0] [--output bench/results]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import logging
import os
import platform
import random
import sys
import threading
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from handoff.ends import SMALL, WAIT_S, Ends, Leg, Prefill, Sink, both_ends, kv  # noqa: E402
from handoff.mutations import mutated  # noqa: E402
from handoff.peers import FakeSender, hear, hear_hello, proved_link, say_hello  # noqa: E402

from pdctl.errors import PeerLost  # noqa: E402
from pdctl.handoff import rooms, wire  # noqa: E402
from pdctl.handoff.identity import tokens_digest  # noqa: E402
from pdctl.handoff.link import Link  # noqa: E402
from pdctl.handoff.transport.memory import MemoryConnection, MemoryTransport, Pipe  # noqa: E402

MAX_TOKENS = 150
CLOSED_ROOMS = 1024
MAX_GROWTH_BYTES = 8 << 20
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Faults(logging.Handler):
    """Whatever must not happen: errors in the log, and threads that raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())

    def raised(self, args: threading.ExceptHookArgs) -> None:
        self.seen.append(f"{args.thread}: {args.exc_value!r}")

    def __enter__(self) -> Faults:
        logging.getLogger("pdctl.handoff").addHandler(self)
        self._before, threading.excepthook = threading.excepthook, self.raised
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("pdctl.handoff").removeHandler(self)
        threading.excepthook = self._before


class Fed(NamedTuple):
    """What was put on a link, and how much the other end had read before."""

    pipe: Pipe
    before: int
    sizes: list[int]
    sealed: bool

    @property
    def frames(self) -> int:
        """Of which the other end has read at least the first byte by now."""
        starts = itertools.accumulate(self.sizes[:-1], initial=0)
        taken = self.pipe.taken - self.before
        return sum(start < taken for start in starts) if self.sizes else 0


class Fuzz:
    """One run; both ends live through all of it."""

    def __init__(self, ends: Ends, transport: MemoryTransport, seed: int) -> None:
        self.fed: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()
        self.committed = 0
        self._ends = ends
        self._transport = transport
        self._chance = random.Random(seed)
        self._fake = FakeSender(transport)
        self._pages = {tokens: kv(tokens) for tokens in range(1, MAX_TOKENS + 1)}

    def close(self) -> None:
        self._fake.close()

    @property
    def frames(self) -> int:
        return self.fed.total()

    def session(self) -> None:
        if self._chance.random() < 0.5:
            self._against_the_sender()
        else:
            self._against_the_receiver()
        # kept for tests that look at them
        self._transport.links.clear()
        self._ends.failed.clear()

    def _against_the_sender(self) -> None:
        leg, prefill = self._ends.leg(), Prefill()
        tokens = self._chance.randint(1, MAX_TOKENS)
        outbound = self._ends.admit(leg, list(range(tokens)), prefill)
        outbound.pages()[:] = self._pages[tokens]
        outbound.written(tokens)
        outbound.finish(7)
        with proved_link(self._transport, self._ends.port) as link:
            frames = self._of_a_receiver(leg, tokens)
            if self._chance.random() < 0.8:
                say_hello(link, leg)
                assert isinstance(hear(link), wire.Offer)
                frames = frames[1:]
            fed = self._feed("sender", link, frames)
            changed = self._transport.links[0].changed
            with changed:
                assert changed.wait_for(lambda: fed.pipe.abandoned, WAIT_S)
        self.fed["sender"] += fed.frames
        outbound.cancel()
        assert outbound.settled.wait(WAIT_S)
        assert prefill.told_once()
        self.sessions["sender done" if outbound.done else "sender failed"] += 1

    def _of_a_receiver(self, leg: Leg, tokens: int) -> list[bytes]:
        hello = wire.Hello(decode=leg.decode, ticket=leg.ticket)
        wanted = tokens - self._chance.randint(0, 1)
        grant = wire.Grant(
            tokens=wanted,
            held_tokens=self._chance.randint(0, wanted),
            first_token=self._chance.random() < 0.5,
        )
        frames = [wire.frame(hello, leg.room, fingerprint=self._ends.sender._identity.digest)]
        frames += self._renewals(leg.room)
        frames += [wire.frame(grant, leg.room)]
        frames += self._renewals(leg.room)
        return [*frames, wire.frame(wire.Done(), leg.room)]

    def _against_the_receiver(self) -> None:
        leg = self._ends.leg(sender=f"127.0.0.1:{self._fake.port}")
        tokens, spare = self._chance.randint(1, MAX_TOKENS), self._chance.randint(0, 1)
        ids, sink = list(range(tokens)), Sink(spare=spare)
        inbound = self._ends.receiver.fetch(leg, ids, sink)
        with self._fake.accept() as link:
            room = hear_hello(link)
            frames = self._of_a_sender(room, ids, tokens - spare)
            if self._chance.random() < 0.8:
                link.connection.send([memoryview(frames.pop(0))])
                assert isinstance(hear(link), wire.Grant)
            fed = self._feed("receiver", link, frames)
            assert inbound.settled.wait(WAIT_S)
        self.fed["receiver"] += fed.frames
        assert sink.calls.count("commit") + sink.calls.count("abort") == 1
        if sink.committed and not fed.sealed:
            self._check_pages(sink, tokens, tokens - spare)
        self.sessions["receiver committed" if sink.committed else "receiver aborted"] += 1

    def _check_pages(self, sink: Sink, tokens: int, wanted: int) -> None:
        expected = self._pages[tokens][: SMALL.pages_for(wanted)]
        np.testing.assert_array_equal(sink.pages[:, :, :, :], expected)
        self.committed += 1

    def _of_a_sender(self, room: int, ids: list[int], wanted: int) -> list[bytes]:
        digest, pages = tokens_digest(ids), SMALL.pages_for(len(ids))
        frames = [wire.frame(wire.Offer(tokens=len(ids), token_sha256=digest, pages=pages), room)]
        frames += self._renewals(room)
        sent = SMALL.pages_for(wanted)
        order = [(page, layer) for page in range(sent) for layer in range(SMALL.layers)]
        if self._chance.random() < 0.5:
            order.sort(key=lambda piece: piece[1])
        for page, first in order:
            piece = memoryview(self._pages[len(ids)][page, first : first + 1].tobytes())
            frames.append(wire.piece_header(room, page, first, 1, piece) + bytes(piece))
            frames += self._renewals(room)
        return [*frames, wire.frame(wire.End(pages=sent, first_token=None), room)]

    def _renewals(self, room: int) -> list[bytes]:
        count = self._chance.randint(0, 3)
        return [wire.frame(wire.Renew(tokens=i), room) for i in range(count)]

    def _feed(self, end: str, link: Link, frames: list[bytes]) -> Fed:
        sent, sealed = mutated(self._chance, frames)
        connection = link.connection
        assert isinstance(connection, MemoryConnection)
        pipe = connection._writes
        fed = Fed(pipe, pipe.taken, [len(frame) for frame in sent], sealed)
        try:
            left = memoryview(b"".join(sent))
            while left:
                left = left[connection.send([left]) :]
        except PeerLost:
            # it has seen enough
            self.sessions[f"{end} cut the link"] += 1
        # what was sent still arrives, and the other end reads on to the end of the stream
        connection.unblock()
        return fed


def resident_bytes() -> int:
    """Of this process; 0 where /proc does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * PAGE_SIZE if path.exists() else 0


def run(frames: int, seed: int) -> dict[str, Any]:
    """Feeds at least that many; raises AssertionError where anything but the frames broke."""
    transport = MemoryTransport()
    began_s, marks = time.monotonic(), []
    with (
        mock.patch.object(rooms, "MAX_CLOSED", CLOSED_ROOMS),
        Faults() as faults,
        both_ends(transport) as ends,
    ):
        fuzz = Fuzz(ends, transport, seed)
        while fuzz.frames < frames:
            fuzz.session()
            assert not faults.seen, faults.seen
            while fuzz.frames * 10 >= frames * (len(marks) + 1) and len(marks) < 10:
                marks.append(resident_bytes())
        ends.run(70, sink := Sink())
        assert sink.committed
        assert not ends.sender._rooms._open
        assert not ends.sender._rooms._awaited
        fuzz.close()
    growth_bytes = marks[-1] - marks[0]
    assert growth_bytes < MAX_GROWTH_BYTES, marks
    return {
        "frames": fuzz.frames,
        "frames_by_end": dict(fuzz.fed),
        "sessions": dict(sorted(fuzz.sessions.items())),
        "commits_compared": fuzz.committed,
        "crashes": len(faults.seen),
        "resident_mib_by_tenth": [round(mark / (1 << 20), 1) for mark in marks],
        "seed": seed,
        "took_s": round(time.monotonic() - began_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("frames", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    today = datetime.date.today().isoformat()
    report = {
        "benchmark": "fuzz_frames",
        "date": today,
        "method": __doc__,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("pdctl", "msgspec", "numpy", "xxhash")},
        **run(options.frames, options.seed),
    }
    text = json.dumps(report, indent=2)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"{today}-fuzz-frames.json"
        path.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
