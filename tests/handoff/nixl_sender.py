"""A sender in a process of its own, whose memory is read through NIXL: `nixl_sender.py TOKENS…`

Each line on stdin is a leg, as JSON; the prompt of the first has the first number of tokens, and
so on, in turn. It prints its port first, then a line for each handoff that is over. Ends with
stdin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from handoff.ends import DIGEST, KEY, WAIT_S, Leg, Prefill, kv
from handoff.test_nixl import GEOMETRY

from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.sender import Sender
from pdctl.handoff.transport.nixl import NixlReach


def main(tokens: list[int]) -> None:
    sender = Sender(
        Identity("p0", KEY, DIGEST),
        GEOMETRY,
        listen=("127.0.0.1", 0),
        budget_bytes=64 << 20,
        timeout_s=WAIT_S,
        board=CounterBoard(),
        on_failed=lambda room, cause, detail: None,
        clock=time.monotonic,
        reach=NixlReach("p0", one_host=True),
    )
    run(sender, tokens, fill)


def fill(prefill: Prefill, count: int) -> None:
    assert prefill.outbound is not None
    prefill.outbound.pages()[:] = kv(count, GEOMETRY)


def run(sender: Sender, tokens: list[int], fill: Callable[[Prefill, int], None]) -> None:
    """Until stdin ends."""
    say(sender.start())
    for at, line in enumerate(sys.stdin):
        leg, count = msgspec.json.decode(line, type=Leg), tokens[at % len(tokens)]
        prefill = Prefill()
        outbound = sender.admit(
            leg,
            list(range(count)),
            on_reserved=prefill.on_reserved,
            on_settled=lambda over: say("done" if over.done else str(over.error)),
        )
        assert prefill.reserved.wait(WAIT_S)
        fill(prefill, count)
        outbound.written(count)
        outbound.finish(7)
    sender.close()


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
