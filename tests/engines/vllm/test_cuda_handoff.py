"""A handoff into blocks on a GPU, whose copies run beside what is received: over TCP through host
memory, and through NIXL from device to device."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from engines.cuda_sides import Late
from engines.vllm.cuda_engine import ON_GPU, PAGES, Engine

from pdctl.engines.device import tensor_of
from pdctl.engines.interface import Leg
from pdctl.handoff import budgets, schedule
from pdctl.handoff.apart.receiving import ApartReceiver
from pdctl.handoff.apart.sending import ApartSender
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.opening import Opening, open_receiver, open_sender
from pdctl.handoff.page import Patterns
from pdctl.handoff.seam import Incoming, Outgoing, ReceivingEnd, SendingEnd
from pdctl.handoff.sink import Piece, Want
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.nixl import installed
from pdctl.topology.model import Transport

KEY, DIGEST = bytes(32), "d" * 64
WAIT_S = 60.0

needs_nixl = pytest.mark.skipif(installed() is None, reason="needs nixl in this environment")


class Sink:
    """Blocks of a decode replica, filled by a handoff."""

    def __init__(self, engine: Engine, blocks: list[int], tokens: int) -> None:
        self._engine, self._blocks, self._tokens = engine, blocks, tokens
        self.error: BaseException | None = None

    def offered(self, tokens: int, deadline: float) -> Want:
        return Want(tokens=self._tokens)

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        stop = min((page + 1) * 64, self._tokens)
        self._engine.blocks.write(self._blocks, page * 64, stop, first_layer, piece)

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        parts = [
            (range(piece.positions.start, min(piece.positions.stop, self._tokens)), piece)
            for piece in pieces
        ]
        return self._engine.blocks.write_from(self._blocks, parts)

    def commit(self, first_token: int | None) -> None:
        self._engine.blocks.flush()

    def abort(self, error: BaseException) -> None:
        self.error = error


@pytest.mark.parametrize("place", ["inside", "apart", pytest.param("device", marks=needs_nixl)])
def test_a_late_copy_still_finds_the_pieces_that_came(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """R10: a piece's memory is received into again only once the copy out of it is over, also in
    the next handoff on the same connection. On a GPU, as late as that is."""
    monkeypatch.setattr(schedule, "PIECE_BYTES", 1)
    monkeypatch.setattr(budgets, "DEVICE_PIECE_BYTES", 1)
    engine = Engine(size=64, side=Late())
    tokens, blocks = 5 * 64 + 7, [4, 0, 3, 1, 5, 2]
    with ends(engine, place) as (sender, receiver):
        for turn in range(50 if ON_GPU else 2):
            outbound, inbound = handed_over(sender, receiver, tokens, Sink(engine, blocks, tokens))
            shape = (PAGES.pages_for(tokens), *PAGES.shape)
            sent = np.random.default_rng(turn).integers(0, 1 << 15, shape).astype(np.uint16)
            into = tensor_of(outbound.pages(), torch.int16, shape)
            into.copy_(torch.from_numpy(sent.view(np.int16)))
            outbound.written(tokens)
            outbound.finish(0)
            assert inbound.settled.wait(WAIT_S)
            assert inbound.error is None
            for layer in range(PAGES.layers):
                wanted = sent[:, layer].transpose(1, 0, 2, 3, 4).reshape(2, -1, 3, 64)[:, :tokens]
                assert np.array_equal(engine.tokens(layer, blocks)[:, :tokens], wanted)


@contextmanager
def ends(engine: Engine, place: str) -> Iterator[tuple[SendingEnd, ReceivingEnd]]:
    """In this process, or in processes of their own; in this one with pages on the device."""

    def report(room: int, cause: str, detail: str) -> None:
        raise AssertionError((room, cause, detail))

    sending, receiving = (
        Opening(
            identity=Identity(name, KEY, DIGEST),
            geometry=PAGES,
            sends=name == "p0",
            timeout_s=WAIT_S,
            buffer_bytes=64 * PAGES.page_bytes,
            transports=dict.fromkeys(("p0", "d0"), Transport.NIXL) if place == "device" else {},
            on_device=place == "device",
        )
        for name in ("p0", "d0")
    )
    sender: SendingEnd
    receiver: ReceivingEnd
    if place == "apart":
        common: Any = {
            "lock": engine.blocks.lock,
            "board": CounterBoard(),
            "on_failed": report,
            "on_lost": lambda error: None,
        }
        sender, receiver = ApartSender(sending, **common), ApartReceiver(receiving, **common)
    else:
        given = (os.environ, CounterBoard(), report)
        memory = engine.blocks.page_memory
        more = {"memory": memory, "device": engine.blocks.device}
        sender = open_sender(sending, *given, **more)
        receiver = open_receiver(receiving, *given, **more)
    sender.port = sender.start()
    receiver.start()
    yield sender, receiver
    receiver.close()
    sender.close()
    engine.blocks.close()


def handed_over(
    sender: SendingEnd, receiver: ReceivingEnd, tokens: int, sink: Sink
) -> tuple[Outgoing, Incoming]:
    room = secrets.randbits(62)
    leg = Leg(
        room=room,
        ticket=mint(KEY, room, "p0", "d0", DIGEST, time.time() + WAIT_S),
        prefill="p0",
        decode="d0",
        sender=f"127.0.0.1:{sender.port}",
        timeout_s=WAIT_S,
    )
    reserved = threading.Event()
    outbound = sender.admit(
        leg, range(tokens), on_reserved=lambda _: reserved.set(), on_settled=lambda _: None
    )
    assert reserved.wait(WAIT_S)
    return outbound, receiver.fetch(leg, range(tokens), sink)
