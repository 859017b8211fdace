"""One replica's worker half with numpy for vLLM's blocks, as the connector drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from pdctl.engines.vllm.interface import Span
from pdctl.engines.vllm.steps import News, Notice, Step
from pdctl.engines.vllm.working import WorkerHalf
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.page import PageGeometry, Patterns

GEOMETRY = PageGeometry(layers=2, kv_heads=1, head_dim=4)
BLOCK = 32
WAIT_S = 30.0


class Memory:
    """Blocks of 32 tokens, as bit patterns; `[block][layer][K, V][token][head][dim]`."""

    block_tokens = BLOCK
    page_memory: Any = None
    names: ClassVar = ["model.layers.0.attn", "model.layers.1.attn"]

    def __init__(self, seed: int) -> None:
        self.spans: Sequence[Span] = ()
        self.flushed = self.fenced = 0
        self.breaks = False
        shape = (32, GEOMETRY.layers, 2, BLOCK, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.cells = np.random.default_rng(seed).integers(1, 9999, shape).astype(np.uint16)

    def begin_step(self, spans: Sequence[Span]) -> None:
        self.spans = spans

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        for span in self.spans:
            for at in range(span.start, span.stop):
                cell = self.cells[span.blocks[at // BLOCK], layer, :, at % BLOCK]
                span.pages[at // 64, layer, :, at % 64] = cell
        landed()

    def flush(self) -> None:
        self.flushed += 1
        if self.breaks:
            raise RuntimeError("the device is gone")

    def fence(self) -> None:
        self.fenced += 1

    def close(self) -> None:
        return

    def write(
        self, blocks: Sequence[int], start: int, stop: int, first_layer: int, piece: Patterns
    ) -> None:
        last = first_layer + len(piece)
        for at in range(start, stop):
            cell = self.cells[blocks[at // BLOCK], first_layer:last, :, at % BLOCK]
            cell[:] = piece[:, :, at % 64]

    def write_pages(
        self, blocks: Sequence[int], start: int, stop: int, pages: Sequence[Patterns]
    ) -> None:
        for page in range(start // 64, -(-stop // 64)):
            at = max(start, page * 64), min(stop, page * 64 + 64)
            self.write(blocks, *at, 0, pages[page])
        self.flush()


class Side:
    """One replica: its worker half, memory, counters and what it reported."""

    def __init__(
        self, replica: str, seed: int, memory: Memory | None = None, **session: Any
    ) -> None:
        self.memory = memory or Memory(seed)
        self.failures: list[Any] = []
        self.session = SimpleNamespace(
            replica=replica,
            board=CounterBoard(),
            count=lambda load: None,
            report=self.failures.append,
            **{"sender": None, "receiver": None, "store": None, **session},
        )
        self.half = WorkerHalf(self.session, self.memory, step_tokens=128)
        self.loaded: set[str] = set()
        self.lost: set[int] = set()
        self.notices: list[Notice] = []

    def step(self, *, saves: Sequence[str] = Memory.names, **orders: Any) -> None:
        """One step of vLLM, whose forward names these layers."""
        step = Step(**orders)
        self.half.obey(step)
        for name in saves:
            self.half.saved(name)
        self.half.forwarded(step)
        self.collect()

    def collect(self) -> None:
        notices, loaded, lost = self.half.collect()
        assert not self.loaded & loaded, "reported twice"
        self.notices += notices
        self.loaded |= loaded
        self.lost |= lost

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, (self.notices, self.loaded)
            self.collect()

    def told(self, news: News) -> bool:
        return Notice(request_id="r", news=news) in self.notices
