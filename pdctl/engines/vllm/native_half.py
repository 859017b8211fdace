"""What is added to vLLM's own handoff in its scheduler's process: counts. It decides nothing
about a request. No I/O, no engine.

A decode end sees each handoff begin and end. A prefill end can't tell a reader from a lease that
ran out, so it counts none. All methods are called by the scheduler's thread; objects of vLLM are
duck-typed: the names are those of 0.28.0 to 0.32.0.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from pdctl.engines.channel import Failed
from pdctl.engines.interface import Leg
from pdctl.engines.vllm.asks import leg_of
from pdctl.engines.vllm.load_count import LoadCount
from pdctl.engines.vllm.steps import Load
from pdctl.errors import PeerLost

log = logging.getLogger("pdctl.engines.vllm")


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What happened with one peer."""

    peer: str
    amounts: dict[str, int]
    """By the names of `Counters`."""


class NativeStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker's half is told with one step."""

    load: Load = Load()
    counted: list[Counted] = []
    failed: list[Failed] = []


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One decode request whose blocks are being filled."""

    room: int
    peer: str
    tokens: int
    blocks: int


class NativeHalf:
    """Args:
    block_bytes: of one of vLLM's blocks, over all layers.
    moved: the counter of bytes that they move under: `host_bytes` or `gpu_bytes`.
    """

    def __init__(self, block_bytes: int, moved: str) -> None:
        self._block_bytes = block_bytes
        self._moved = moved
        self._count = LoadCount()
        self._legs: dict[str, Leg] = {}
        """Of decode requests."""
        self._reading: dict[str, Reading] = {}
        self._awaited: set[str] = set()
        """Requests whose blocks vLLM's scheduler holds until it hears that they were read."""
        self._counted: list[Counted] = []
        self._failed: list[Failed] = []

    def arrived(self, request: Any) -> None:
        self._count.arrived(request)
        params = request.kv_transfer_params
        if not isinstance(params, dict) or "pdctl" not in params:
            return
        leg = leg_of(params)
        if leg is None:
            return
        self._count.follow(request.request_id, leg.room)
        if not params.get("do_remote_decode"):
            self._legs[request.request_id] = leg

    def placed(self, request: Any, blocks: int, external_tokens: int) -> None:
        """The request has blocks.

        Args:
            blocks: how many of them are to be filled.
            external_tokens: how many positions come from its peer.
        """
        name = request.request_id
        if not external_tokens:
            return
        self._awaited.add(name)
        leg = self._legs.get(name)
        if leg is not None:
            self._reading[name] = Reading(
                room=leg.room, peer=leg.prefill, tokens=external_tokens, blocks=blocks
            )
            self._tally(leg.prefill, handoffs_active=1)

    def received(self, names: set[str]) -> set[str]:
        """vLLM's worker is through with these requests.

        Returns:
            Those that vLLM's scheduler waits for. It ends its whole engine over any other: one
            that was aborted before it had blocks, and whose prefill replica is gone (U14).
        """
        awaited = names & self._awaited
        self._awaited -= awaited
        for name in sorted(awaited & self._reading.keys()):
            reading = self._reading.pop(name)
            moved = {self._moved: reading.blocks * self._block_bytes}
            self._tally(
                reading.peer,
                handoffs_active=-1,
                handoffs_completed=1,
                imported_tokens=reading.tokens,
                **moved,
            )
        return awaited

    def finished(self, request: Any) -> None:
        """The request has ended, in whatever way; may be called twice."""
        name = request.request_id
        self._count.finished(request)
        self._legs.pop(name, None)
        reading = self._reading.pop(name, None)
        if reading is not None:
            self._unfinished(reading, failed=request.status.name == "FINISHED_ERROR")

    def step(self, scheduled: Any) -> NativeStep:
        """What the worker's half is to know with the step that was just scheduled."""
        made = NativeStep(
            load=self._count.take(scheduled),
            counted=self._counted,
            failed=self._failed,
        )
        self._counted, self._failed = [], []
        return made

    def _unfinished(self, reading: Reading, *, failed: bool) -> None:
        if not failed:
            self._tally(reading.peer, handoffs_active=-1, handoffs_cancelled=1)
            return
        detail = f"vLLM could not read the KV cache of {reading.peer}; its log has more"
        self._failed.append(
            Failed(room=reading.room, leg="decode", cause=PeerLost.cause, detail=detail)
        )
        self._tally(reading.peer, handoffs_active=-1, handoffs_failed=1)

    def _tally(self, peer: str, **amounts: int) -> None:
        self._counted.append(Counted(peer=peer, amounts=amounts))
