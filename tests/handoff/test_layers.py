"""Whole handoffs of an engine that writes layer by layer."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from handoff.ends import WAIT_S, Clock, Prefill, Sink, both_ends, kv

from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.sender import Outbound
from pdctl.handoff.transport.memory import MemoryTransport
from pdctl.handoff.transport.tcp import TcpTransport

GEOMETRY = PageGeometry(layers=5, kv_heads=1, head_dim=4)
IDS = list(range(200))


class Layers:
    """An engine that computes `source`, one layer of one chunk after the other."""

    def __init__(self, outbound: Outbound) -> None:
        self.outbound = outbound
        self.source = kv(outbound.tokens, GEOMETRY)
        self.at = 0

    def chunk(self, positions: int) -> None:
        """A whole forward up to there."""
        stop = self.begin(positions)
        for layer in range(GEOMETRY.layers):
            self.layer(layer, stop)
        self.at = stop

    def begin(self, positions: int) -> int:
        """Where the chunk ends: before the last position if nobody wants that."""
        last = positions == self.outbound.tokens
        return positions - 1 if last and not self.outbound.begin_last() else positions

    def layer(self, layer: int, stop: int) -> None:
        if stop > self.at:  # else the handoff may be over, and its pages gone
            copy_layer(self.source, self.outbound.pages(), layer, self.at, stop)
        self.outbound.written(stop, layers=layer + 1)


def copy_layer(source: Patterns, pages: Patterns, layer: int, start: int, stop: int) -> None:
    at = np.arange(start, stop)
    pages[at // 64, layer, :, at % 64] = source[at // 64, layer, :, at % 64]


def wanted(sink: Sink, tokens: int) -> Patterns:
    """What that sink has to hold at the end."""
    positions = tokens - sink.spare
    pages = kv(tokens, GEOMETRY)[: GEOMETRY.pages_for(positions)]
    pages[-1, :, :, positions - (len(pages) - 1) * 64 :] = 0
    pages[: sink.held_tokens // 64] = 0
    return pages


@pytest.mark.parametrize("transport", [MemoryTransport, TcpTransport])
@pytest.mark.parametrize("seed", range(8))
def test_any_chunks_land_bit_by_bit(transport, seed):
    """R25, R26, R28, R30: no byte leaves before it is written, whatever the chunks, the moment of
    the grant, the held prefix and the count of positions wanted."""
    chance = random.Random(seed)
    with both_ends(transport(), geometry=GEOMETRY) as ends:
        for tokens in (1, 2, 64, 65, 129, 200, chance.randint(2, 400)):
            spare = min(chance.randint(0, 1), tokens - 1)
            held = chance.choice((0, chance.randint(0, tokens - spare)))
            sink, prefill = Sink(GEOMETRY, spare=spare, held_tokens=held), Prefill()
            leg, ids = ends.leg(), list(range(tokens))
            outbound = ends.admit(leg, ids, prefill)
            engine = Layers(outbound)
            stops = sorted({chance.randint(1, tokens), chance.randint(1, tokens), tokens})
            fetched_at = chance.choice(stops)
            for stop in stops:
                if stop == fetched_at:
                    inbound = ends.receiver.fetch(leg, ids, sink)
                engine.chunk(stop)
            outbound.finish(7)
            assert inbound.settled.wait(WAIT_S)
            assert outbound.settled.wait(WAIT_S)
            assert outbound.error is None
            np.testing.assert_array_equal(sink.pages, wanted(sink, tokens))


def test_the_first_layer_leaves_before_the_last_is_written():
    """Pages travel inside a forward: layer 0 has landed at the receiver while layer 1 is not
    computed yet."""
    landed = threading.Event()

    class Landing(Sink):
        def write(self, page, first_layer, piece):
            super().write(page, first_layer, piece)
            if page == 3:
                landed.set()

    sink = Landing(GEOMETRY)
    with both_ends(geometry=GEOMETRY) as ends:
        leg, prefill = ends.leg(), Prefill()
        inbound = ends.receiver.fetch(leg, IDS, sink)
        engine = Layers(ends.admit(leg, IDS, prefill))
        assert sink.returned["offered"].wait(WAIT_S)
        stop = engine.begin(200)
        for layer in range(GEOMETRY.layers):
            landed.clear()
            engine.layer(layer, stop)
            assert landed.wait(WAIT_S)
            got = wanted(sink, 200)
            got[:, layer + 1 :] = 0
            np.testing.assert_array_equal(sink.pages, got)
        engine.outbound.finish(7)
        assert inbound.settled.wait(WAIT_S)
        assert sink.committed
        assert engine.outbound.settled.wait(WAIT_S)


def test_a_layer_that_lands_is_progress():
    """R5: a forward that is longer than the deadline, but moves from layer to layer, is never
    late."""
    clock = Clock()
    with both_ends(MemoryTransport(), geometry=GEOMETRY, clock=clock, timeout_s=60) as ends:
        outbound = ends.admit(ends.leg(timeout_s=60.0), IDS, Prefill())
        engine = Layers(outbound)
        for layer in range(GEOMETRY.layers):
            clock.now += 50
            engine.layer(layer, 199)
            ends.sender.check()
            assert not outbound.over
        assert outbound.positions == 199
        clock.now += 61
        ends.sender.check()
        assert outbound.settled.wait(WAIT_S)
        assert outbound.error is not None


def test_the_transfer_phase_counts_from_the_last_layer():
    """What the grant needs is written when its last layer is."""
    clock = Clock()
    with both_ends(MemoryTransport(), geometry=GEOMETRY, clock=clock) as ends:
        leg, prefill, sink = ends.leg(), Prefill(), Sink(GEOMETRY)
        inbound = ends.receiver.fetch(leg, IDS, sink)
        engine = Layers(ends.admit(leg, IDS, prefill))
        assert sink.returned["offered"].wait(WAIT_S)
        began_at, stop = clock.now, engine.begin(200)
        for layer in range(GEOMETRY.layers):
            clock.now += 0.5
            engine.layer(layer, stop)
        engine.outbound.finish(7)
        assert engine.outbound.settled.wait(WAIT_S)
        assert inbound.settled.wait(WAIT_S)
        assert engine.outbound.needed_at == began_at + 0.5 * GEOMETRY.layers


def test_more_layers_than_a_page_has_are_the_callers_error():
    """A producer that counts wrongly hears of it before anything is sent."""
    with both_ends(geometry=GEOMETRY) as ends:
        outbound = ends.admit(ends.leg(), IDS, Prefill())
        with pytest.raises(ValueError, match="6 layers"):
            outbound.written(3, layers=6)
        outbound.cancel()
