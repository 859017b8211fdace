"""Both legs as SGLang's scheduler drives them, over a real handoff and two pools in memory. Run
by an environment that has SGLang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("sglang")

from engines.sglang.pairs import (  # noqa: E402
    DIM,
    HEADS,
    LAYERS,
    TOKEN,
    Pair,
    eventually,
    until,
)
from handoff.ends import WAIT_S  # noqa: E402
from handoff.store.stores import CONTRACT, clients, host  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402

from pdctl.engines.interface import Leg  # noqa: E402
from pdctl.engines.sglang import sending as prefill_side  # noqa: E402
from pdctl.engines.sglang.pool import SlotPool  # noqa: E402
from pdctl.engines.sglang.sending import PrefillLeg  # noqa: E402
from pdctl.topology.contract import Attention  # noqa: E402

ONES = 0x3C00
"""1 as a half-precision float."""


@pytest.fixture(params=["cpu", "cuda", "cpu device"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(cuda=request.param == "cuda", device=request.param == "cpu device")
    yield made
    made.close()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 129, 193, 300])
def test_chunks_of_a_prompt_land_whole_with_the_first_token(pair: Pair, tokens: int) -> None:
    """R25, R31, U8: chunks smaller than the prompt; all positions, then token, then room."""
    pages = -(-tokens // 64)
    source, target = [3, 1, 6, 0, 5][:pages], [2, 7, 4, 1, 0][:pages]
    sending, receiving = pair.begin(tokens)
    eventually(sending, KVPoll.WaitingForInput)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.send_metadata(target, 2, [], decode_prefix_len=0)
    sending.init(pages, 1)
    for at in range(0, pages, 2):
        assert sending.poll() == KVPoll.WaitingForInput
        assert pair.d.rows.bootstrap_room[2, 0] == 0
        if at + 2 >= pages:
            pair.p.rows.output_ids[1, 0] = TOKEN
        sending.send(source[at : at + 2])
    eventually(receiving, KVPoll.Success)
    eventually(sending, KVPoll.Success)
    assert torch.equal(pair.d.tokens(target, tokens), pair.p.tokens(source, tokens))
    assert pair.d.rows.output_ids[2, 0] == TOKEN
    assert pair.d.rows.cached_tokens[2, 0] == tokens
    assert int(pair.d.rows.bootstrap_room[2, 0]) == receiving._room


def test_blocks_that_decode_holds_are_neither_sent_nor_touched(pair: Pair) -> None:
    """R26, R45: a prefix of whole blocks from decode's own cache."""
    sending, receiving = pair.begin(200)
    eventually(receiving, KVPoll.WaitingForInput)
    before = [layer.clone() for layer in pair.d.keys]
    receiving.send_metadata([4, 5], 0, [], decode_prefix_len=128)
    sending.init(4, 0)
    sending.send([0, 1, 2, 3])
    eventually(receiving, KVPoll.Success)
    assert torch.equal(pair.d.tokens([4, 5], 72), pair.p.tokens([2, 3], 72))
    for layer, old in zip(pair.d.keys, before, strict=True):
        assert torch.equal(layer[: 4 * 64], old[: 4 * 64])
        assert torch.equal(layer[5 * 64 + 8 :], old[5 * 64 + 8 :])


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("held", [0, 64])
def test_full_pages_of_decodes_store_are_not_sent(tmp_path: Path, held: int, cuda: bool) -> None:
    """They are placed in its blocks, after what its own cache holds; prefill sends the rest."""
    attention = Attention(kind="full", layers=LAYERS, kv_heads=HEADS, head_dim=DIM)
    contract = msgspec.structs.replace(CONTRACT, attention=attention)
    with ExitStack() as stack:
        store = stack.enter_context(host(tmp_path / "s", contract=contract))
        (client,) = stack.enter_context(clients(store.path, 1, contract))
        prompt = client.store.prompt(range(200))
        assert client.store.publish(prompt.pages, lambda _, page: page.fill(ONES)) == 3
        pair = Pair(cuda=cuda, device=False, store=client.store)
        stack.callback(pair.close)
        sending, receiving = pair.begin(200, salt="")
        eventually(receiving, KVPoll.WaitingForInput)
        target = [4, 5, 7, 2][held // 64 :]
        receiving.send_metadata(target, 0, [], decode_prefix_len=held)
        sending.init(4, 0)
        sending.send([0, 1, 2, 3])
        eventually(receiving, KVPoll.Success)
        assert bool((pair.d.tokens(target[:-1], 192 - held) == 1).all())
        assert torch.equal(pair.d.tokens([2], 8), pair.p.tokens([3], 8))
        assert client.board.read().reused_tokens == 192 - held
        assert store.returned()


class Held:
    """A pool whose copies stand still until they are let go."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.page_bytes = prefill_side.PART_BYTES
        self.begun, self.go = threading.Event(), threading.Event()
        self.copies = 0

    def read(self, *arguments: Any) -> None:
        self.copies += 1
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.pool.read(*arguments)

    def write(self, *arguments: Any) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.pool.write(*arguments)

    def write_from(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        return self.pool.write_from(*arguments)

    def fence(self) -> None:
        return

    def flush(self) -> None:
        self.pool.flush()


def test_an_abort_of_prefill_waits_for_the_copy_under_way_and_no_other_begins(pair: Pair) -> None:
    """R10, R19: SGLang takes the blocks back when `abort` has returned."""
    held = pair.p.exchange._pool = Held(pair.p.exchange.pool)
    sending, receiving = pair.begin(300)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.send_metadata([0, 1, 2, 3, 4], 0, [], decode_prefix_len=0)
    sending.init(5, 0)
    sending.send([0, 1, 2, 3, 4])
    assert held.begun.wait(WAIT_S)
    aborting = threading.Thread(target=sending.abort)
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive()
    held.go.set()
    aborting.join(WAIT_S)
    assert not aborting.is_alive()
    copied = held.copies
    eventually(sending, KVPoll.Failed)
    eventually(receiving, KVPoll.Failed)
    assert held.copies == copied == 1


def test_decode_says_failed_only_when_nothing_is_written_any_more(pair: Pair) -> None:
    """R10, U1: an abort asks, and the scheduler goes on meanwhile."""
    held = pair.d.exchange._pool = Held(pair.d.exchange.pool)
    sending, receiving = pair.begin(100)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.send_metadata([0, 1], 0, [], decode_prefix_len=0)
    sending.init(2, 0)
    sending.send([0, 1])
    assert held.begun.wait(WAIT_S)
    receiving.abort()
    until(lambda: receiving._inbound.error is not None)
    assert receiving.poll() == KVPoll.Transferring
    held.go.set()
    eventually(receiving, KVPoll.Failed)
    eventually(sending, KVPoll.Failed)
    assert pair.d.rows.bootstrap_room[0, 0] == 0
    with pytest.raises(RuntimeError, match=r"\[pdctl:cancelled\]"):
        receiving.failure_exception()


def test_an_abort_that_comes_after_the_last_page_still_ends_the_request(pair: Pair) -> None:
    """The handoff is done on both ends; the request that nobody waits for is not run."""
    sending, receiving = pair.begin(64)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.send_metadata([0], 0, [], decode_prefix_len=0)
    sending.init(1, 0)
    sending.send([0])
    eventually(sending, KVPoll.Success)
    receiving.abort()
    assert receiving.poll() == KVPoll.Failed


def test_an_abort_before_there_are_blocks_frees_the_sender(pair: Pair) -> None:
    """U2: while decode has no memory; no wait outlasts it."""
    sending, receiving = pair.begin(64)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.abort()
    eventually(receiving, KVPoll.Failed)
    eventually(sending, KVPoll.Failed)


def test_a_leg_that_cannot_begin_fails_and_is_told(pair: Pair) -> None:
    """R67: a ticket of somebody else's; the cause travels in SGLang's own error text."""
    leg = pair.leg()
    sending = PrefillLeg(pair.p.exchange, "p0:1", leg.room)
    forged = Leg(**{**{f: getattr(leg, f) for f in leg.__struct_fields__}, "ticket": "v1.1.x"})
    sending.begin(forged, [1, 2, 3])
    assert sending.poll() == KVPoll.Failed
    assert [(f.room, f.leg, f.cause) for f in pair.p.failed] == [(leg.room, "prefill", "ticket")]
    with pytest.raises(RuntimeError, match=r"\[pdctl:ticket\]"):
        sending.failure_exception()


def test_a_copy_that_fails_ends_its_own_handoff_alone(pair: Pair) -> None:
    """R34: the exporter's thread goes on with others."""
    pool = pair.p.exchange.pool
    pair.p.exchange._pool = None
    sending, receiving = pair.begin(64)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.send_metadata([0], 0, [], decode_prefix_len=0)
    sending.init(1, 0)
    sending.send([0])
    eventually(receiving, KVPoll.Failed)
    eventually(sending, KVPoll.Failed)
    pair.p.exchange._pool = pool
    sending, receiving = pair.begin(64)
    eventually(receiving, KVPoll.WaitingForInput)
    receiving.send_metadata([1], 1, [], decode_prefix_len=0)
    sending.init(1, 0)
    sending.send([0])
    eventually(receiving, KVPoll.Success)
