"""What a prompt's pages cost the host between its page store and an engine on a GPU.

A store in a process of its own holds a prompt, in the shape of the 0.5b model. It is lent, and its
pages are brought within a GPU's reach; the GPU's own copy is left out. By turns:

    by page, new    each page is a copy of its own, and this process has not touched it before
    by part, new    parts of 16 MiB, and pages that lie next to each other are one copy
    by part         the same of pages that were mapped ahead
    locked          the GPU reads the store's memory where it lies

each beside an idle interpreter and beside a thread that goes on as vLLM's does while nothing can
run: some milliseconds of Python, one of rest. And the question itself: what a miss and a hit cost,
with the messages that they are.

    python bench/store_loading.py

For an environment that has torch and triton, vLLM's say.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from setting import RESULTS, machine, summary, write

from pdctl.engines.cuda.filling import Filler
from pdctl.engines.session import SWITCH_INTERVAL_S
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.store.attached import Attached
from pdctl.handoff.store.client import StoreClient
from pdctl.handoff.store.interface import StoreSeat
from pdctl.handoff.store.local import LocalServer
from pdctl.handoff.store.preparing import touch
from pdctl.handoff.store.shelves import Shelves
from pdctl.topology.contract import Attention

from handoff.store.stores import CONTRACT  # isort: skip

SHAPE = msgspec.structs.replace(
    CONTRACT, attention=Attention(kind="full", layers=24, kv_heads=2, head_dim=64)
)
PAGES = PageGeometry.of(SHAPE)
STEP_S, REST_S = 0.0015, 0.001
"""Of an engine's thread that can run nothing yet."""
SIZE_OF_HALF = PAGES.layer_bytes // 2 // PAGES.page_tokens


class Bus:
    """A kernel and its stream, on a host that has none."""

    def __init__(self, reaches: bool) -> None:
        self._reaches = reaches

    def reaches_at(self, address: int, size: int) -> bool:
        return self._reaches

    def addresses(self, pages: int, positions: Any) -> Any:
        return pages + positions * SIZE_OF_HALF

    def begin(self, pieces: Sequence[Any]) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


def serve(path: str, pages: int, stop: Any) -> None:
    """The store's process."""
    shelves = Shelves(2 * pages * PAGES.page_bytes, PAGES)
    server = LocalServer(path, shelves, SHAPE.digest)
    server.start()
    stop.wait()
    server.close()
    shelves.close()


@contextmanager
def stored(pages: int) -> Iterator[tuple[StoreClient, list[int]]]:
    """A client of a store that has a prompt of that many pages, and its tokens."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path, stop = str(Path(folder) / "s"), context.Event()
        process = context.Process(target=serve, args=(path, pages, stop))
        process.start()
        client = StoreClient(StoreSeat(socket=path), contract=SHAPE, board=CounterBoard())
        assert client.settled(True, 30.0)
        ids = list(range(pages * PAGES.page_tokens))
        written = client.publish(client.prompt(ids).pages, lambda _, page: page.fill(1))
        assert written == pages
        try:
            yield client, ids
        finally:
            client.close()
            stop.set()
            process.join()


@contextmanager
def busy(on: bool) -> Iterator[None]:
    over = threading.Event()

    def step() -> None:
        while not over.is_set():
            until_s = time.perf_counter() + STEP_S
            while time.perf_counter() < until_s:
                pass
            time.sleep(REST_S)

    thread = threading.Thread(target=step)
    if on:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if on:
            thread.join()


def ways() -> dict[str, Callable[[Any, Any], None]]:
    memory = np.zeros(64 << 20, np.uint8)

    def by_page(places: Any, loan: Any) -> None:
        for at, page in enumerate(loan.pages):
            begin = at * PAGES.page_bytes % (memory.nbytes - PAGES.page_bytes)
            near = memory[begin : begin + PAGES.page_bytes]
            near.view(page.dtype).reshape(page.shape)[...] = page

    def part(reaches: bool) -> Callable[[Any, Any], None]:
        bus: Any = Bus(reaches)
        filler = Filler(bus, bus, PAGES, lambda size: np.zeros(size, np.uint8))
        return lambda places, loan: filler.fill(places, 0, loan.pages)

    by_part = part(False)
    ways = {"by page, new": by_page, "by part, new": by_part, "by part": by_part}
    return {**ways, "locked": part(True)}


def loading(client: StoreClient, ids: list[int], rounds: int) -> dict[str, Any]:
    prompt, each = client.prompt(ids), ways()
    places = np.arange(len(ids))
    taken: dict[str, list[float]] = {}
    for turn in range(1 + rounds):
        for beside in (False, True):
            for name, fill in each.items():
                with busy(beside):
                    loan = client.hold(prompt)
                    mapped(client, new=name.endswith("new"))
                    began_s = time.perf_counter()
                    fill(places, loan)
                    took_ms = 1e3 * (time.perf_counter() - began_s)
                    assert loan.release()
                if turn:
                    side = "busy" if beside else "idle"
                    cell = f"{name}; {side} interpreter"
                    taken.setdefault(cell, []).append(took_ms)
    size = len(prompt.pages) * PAGES.page_bytes
    return {
        cell: {"ms": summary(all_ms), "gb_per_s": round(size / 1e6 / summary(all_ms)["median"], 2)}
        for cell, all_ms in taken.items()
    }


def mapped(client: StoreClient, *, new: bool) -> None:
    """The store's memory, as a replica has it that was given time, or that never touched it."""
    attached = client._attached
    assert attached is not None
    memory = attached.memory
    if new:
        memory._map.obj.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    else:
        touch(memory.run(0, memory.slots // 2))


def asking(client: StoreClient, ids: list[int], rounds: int) -> dict[str, Any]:
    """A miss, a hit of every page, and one of all but the last."""
    prompts = {"miss": [7, *ids], "hit": ids, "hit, and a tail is looked for": [*ids, 1, 2, 3]}
    ask, messages = Attached.ask, []

    def counted(*given: Any, **named: Any) -> Any:
        messages.append(given[1])
        return ask(*given, **named)

    found = {}
    Attached.ask = counted  # type: ignore[method-assign]
    for name, tokens in prompts.items():
        prompt, all_ms, counts = client.prompt(tokens), [], []
        for _ in range(rounds):
            messages.clear()
            began_s = time.perf_counter()
            loan = client.hold(prompt)
            all_ms.append(1e3 * (time.perf_counter() - began_s))
            counts.append(len([m for m in messages if type(m).__name__ != "Release"]))
            loan.release()
        found[name] = {"ms": summary(all_ms), "messages": max(counts)}
    Attached.ask = ask  # type: ignore[method-assign]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pages", type=int, default=70, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with stored(options.pages) as (client, ids):
        measured = {
            "asking": asking(client, ids, options.rounds),
            "loading": loading(client, ids, options.rounds),
        }
    setting = {"pages": options.pages, "page_bytes": PAGES.page_bytes, "rounds": options.rounds}
    report = {"method": __doc__, "machine": machine("torch", "numpy"), "setting": setting}
    path = write(RESULTS, "store_loading", {**report, "measured": measured})
    sys.stdout.write(f"{path.read_text()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
