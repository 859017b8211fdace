"""What goes wrong inside a process of vLLM or SGLang, while a file says so.

The file that `PDCTL_TEST_FAULT` names holds one line: the fault. It is read at each use, so that
one engine serves many tests; what an audit finds is written beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

FAULT = Path(os.environ.get("PDCTL_TEST_FAULT", "/nonexistent"))
SLOW_LAYER_S = 0.06
"""Of one page."""
SGLANG_PAGE_TOKENS = 64


def fault() -> str:
    try:
        return FAULT.read_text().strip()
    except OSError:
        return ""


def patch(module: ModuleType) -> None:
    {
        "layout": break_blocks,
        "legs": break_legs,
        "scheduling": break_scheduler,
        "rotary_embedding": break_positions,
        "pool": break_pool,
        "sending": break_sending,
        "receiving": break_receiving,
    }[module.__name__.rpartition(".")[2]](module)


# -- KV memory: what decode writes, and what prefill reads


def break_blocks(module: ModuleType) -> None:
    blocks = module.CpuBlocks
    write, gather = blocks.write, blocks.gather

    def written(self: Any, ids: Any, start: int, stop: int, first_layer: int, piece: Any) -> None:
        spoil = SPOILED.get(fault())
        if spoil is None:
            write(self, ids, start, stop, first_layer, piece)
            return
        for layer, part in spoil(start, first_layer, piece.copy(), len(self.layers)):
            write(self, ids, start, stop, layer, part)

    def gathered(self: Any, layer: int, landed: Callable[[], None]) -> None:
        if fault() == "gather raises" and layer == 1:
            raise RuntimeError("the copy of a layer broke")
        copies = list(self._copies)

        def zeroed() -> None:
            if fault() == "gather zeroes":
                for copy in copies:
                    copy.pages[copy.page, layer, :, copy.slot] = 0
            landed()

        gather(self, layer, zeroed)

    blocks.write, blocks.gather = written, gathered


def break_pool(module: ModuleType) -> None:
    """SGLang's: what prefill reads."""
    read = module.SlotPool.read

    def gathered(self: Any, blocks: Any, first_page: int, last_slots: int, into: Any) -> None:
        if fault() == "gather raises":
            raise RuntimeError("the copy of a layer broke")
        read(self, blocks, first_page, last_slots, into)
        if fault() == "gather zeroes":
            into[first_page : first_page + len(blocks)] = 0

    module.SlotPool.read = gathered


def zeroed(start: int, first: int, piece: Any, layers: int) -> Any:
    yield first, piece * 0


def swapped(start: int, first: int, piece: Any, layers: int) -> Any:
    yield first, np.ascontiguousarray(piece[:, ::-1])


def page_missing(start: int, first: int, piece: Any, layers: int) -> Any:
    if start >= piece.shape[2]:
        yield first, piece


def layers_shifted(start: int, first: int, piece: Any, layers: int) -> Any:
    for at in range(len(piece)):
        yield (first + at + 1) % layers, piece[at : at + 1]


def rotated(start: int, first: int, piece: Any, layers: int) -> Any:
    """K as if it had been rotated with a theta of 10,000 and not of 100,000."""
    tokens, dim = piece.shape[2], piece.shape[4]
    steps = np.arange(0, dim, 2) / dim
    turn = 10_000.0**-steps - 100_000.0**-steps
    at = start // tokens * tokens + np.arange(tokens)
    angle = (at[:, None] * turn)[:, None, :]
    keys = piece[:, 0].view(np.float16).astype(np.float64)
    low, high = keys[..., : dim // 2], keys[..., dim // 2 :]
    turned = np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)],
        axis=-1,
    )
    piece[:, 0] = turned.astype(np.float16).view(np.uint16)
    yield first, piece


def raises(start: int, first: int, piece: Any, layers: int) -> Any:
    raise RuntimeError("a block could not be written")


def slow(start: int, first: int, piece: Any, layers: int) -> Any:
    time.sleep(SLOW_LAYER_S * len(piece))
    yield first, piece


SPOILED: dict[str, Callable[..., Any]] = {
    "write zeroes": zeroed,
    "write swaps K and V": swapped,
    "write leaves out a page": page_missing,
    "write shifts layers": layers_shifted,
    "write rotates K": rotated,
    "write raises": raises,
    "write is slow": slow,
}


# -- the request's two ends


def break_legs(module: ModuleType) -> None:
    sending, receiving = module.PrefillLeg, module.DecodeLeg
    for leg, method in ((sending, "start"), (receiving, "start"), (sending, "finish")):
        _raising(leg, method, f"{leg.__name__}.{method} raises")
    _audited(receiving, VllmAudit)


def break_sending(module: ModuleType) -> None:
    _raising(module.PrefillLeg, "begin", "PrefillLeg.start raises")


def break_receiving(module: ModuleType) -> None:
    """SGLang's: the leg, and what decode writes."""
    _raising(module.DecodeLeg, "begin", "DecodeLeg.start raises")
    landing, write = module.Landing, module.Landing.write

    def written(self: Any, page: int, first_layer: int, piece: Any) -> None:
        spoil = SPOILED.get(fault())
        if spoil is None:
            write(self, page, first_layer, piece)
            return
        layers = len(self._exchange.pool._keys)
        for layer, part in spoil(page * piece.shape[2], first_layer, piece.copy(), layers):
            write(self, page, layer, part)

    landing.write = written
    _audited(landing, SglangAudit)


def _raising(owner: type, method: str, when: str) -> None:
    whole = getattr(owner, method)

    def broken(self: Any, *args: Any, **named: Any) -> Any:
        if fault() == when:
            raise RuntimeError(f"{method} broke")
        return whole(self, *args, **named)

    setattr(owner, method, broken)


def _audited(leg: Any, audited: Any) -> None:
    """Compares all KV memory from before the first page with that after the last."""
    place, commit = leg.place, leg.commit

    def placed(self: Any, *given: Any) -> None:
        if fault() == "audit":
            self.before = [layer.clone() for layer in audited.layers(self)]
        place(self, *given)

    def committed(self: Any, first_token: int | None) -> None:
        if fault() == "audit":
            _write_audit(self, audited)
        commit(self, first_token)

    leg.place, leg.commit = placed, committed


def _write_audit(leg: Any, audited: Any) -> None:
    audited.flush(leg)
    granted = audited.granted(leg)
    changed: set[int] = set()
    for before, after in zip(leg.before, audited.layers(leg), strict=True):
        for old, new in zip(audited.tokens(leg, before), audited.tokens(leg, after), strict=True):
            changed |= set((old != new).flatten(1).any(1).nonzero().flatten().tolist())
    found = {
        "blocks": len(leg._blocks),
        "filled": len(changed & granted),
        "strays": sorted(changed - granted),
    }
    FAULT.with_suffix(".audit").write_text(json.dumps(found))


class VllmAudit:
    """What a decode leg may fill, and vLLM's memory by token."""

    @staticmethod
    def flush(leg: Any) -> None:
        leg._memory.flush()

    @staticmethod
    def layers(leg: Any) -> Any:
        return leg._memory.layers

    @staticmethod
    def tokens(leg: Any, layer: Any) -> Any:
        if layer.device.type == "cpu":
            return leg._memory._tokens(layer)
        # [blocks, kv_heads, block_tokens, 2 * head_dim], K before V
        halves = layer.unflatten(-1, (2, layer.shape[-1] // 2))
        return halves.permute(3, 0, 2, 1, 4).flatten(1, 2).unbind(0)

    @staticmethod
    def granted(leg: Any) -> set[int]:
        size, filled = leg._memory.block_tokens, range(leg._held, leg._positions)
        return {leg._blocks[at // size] * size + at % size for at in filled}


class SglangAudit:
    """The same of SGLang's, whose memory is by token."""

    @staticmethod
    def flush(landing: Any) -> None:
        landing._exchange.pool.flush()

    @staticmethod
    def layers(landing: Any) -> Any:
        scheduler = landing._exchange._scheduler
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        return [*pool.k_buffer, *pool.v_buffer]

    @staticmethod
    def tokens(landing: Any, layer: Any) -> Any:
        return (layer,)

    @staticmethod
    def granted(landing: Any) -> set[int]:
        size, found = SGLANG_PAGE_TOKENS, set()
        for page in range(landing._held // size, -(-landing._tokens // size)):
            block, slots = landing._place_of(page)
            found |= {block * size + at for at in slots}
        return found


# -- vLLM's scheduler, and what the model was built with


def break_scheduler(module: ModuleType) -> None:
    read, place = module.leg_of, module.Place

    def leg_of(params: Any) -> Any:
        if fault() == "the leg is unreadable":
            raise RuntimeError("the leg broke")
        return read(params)

    def placing(**fields: Any) -> Any:
        if fault() == "blocks are unusable":
            raise RuntimeError("the blocks broke")
        return place(**fields)

    module.leg_of, module.Place = leg_of, placing


def break_positions(module: ModuleType) -> None:
    """The model's rotary embeddings get another theta than its file says."""
    built = module.get_rope

    def get_rope(*args: Any, rope_parameters: dict[str, Any], **named: Any) -> Any:
        if fault() == "theta":
            rope_parameters = {**rope_parameters, "rope_theta": 10_000.0}
        return built(*args, rope_parameters=rope_parameters, **named)

    module.get_rope = get_rope
