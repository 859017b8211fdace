"""What leaves SGLang's steps on a GPU, and in which order. For an environment that has SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("sglang")

from engines.sglang.pairs import GEOMETRY, LAYERS, TOKEN, Pair, Side, eventually, until  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402

from pdctl.engines.cuda import reading  # noqa: E402
from pdctl.engines.sglang import joining, stepping  # noqa: E402
from pdctl.engines.sglang.sending import PrefillLeg  # noqa: E402
from pdctl.engines.sglang.stepping import Stepping  # noqa: E402

SOURCE, TARGET = [3, 1, 6, 0, 2, 4, 5], [2, 7, 4, 5, 0, 1, 3]
ROW = 1
"""The request's, in SGLang's table."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BYTES", "GROUP_BYTES", "PIECE_PART_BYTES", "DEVICE_GROUP_BYTES"):
        monkeypatch.setattr(reading, name, 1)


@pytest.fixture(params=["host", "device"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """R56: pages in page-locked memory, and in the device's own."""
    made = Pair(cuda=True, device=request.param == "device")
    yield made
    for side in (made.p, made.d):
        side.side.go.set()
    made.close()


def ready(pair: Pair, tokens: int) -> tuple[PrefillLeg, Any]:
    """Both legs, where prefill may compute and decode has its blocks."""
    sending, receiving = pair.begin(tokens)
    eventually(sending, KVPoll.WaitingForInput)
    eventually(receiving, KVPoll.WaitingForInput)
    pages = -(-tokens // 64)
    receiving.send_metadata(TARGET[:pages], 2, [], decode_prefix_len=0)
    sending.init(pages, 1)
    pair.p.rows.output_ids[1, 0] = TOKEN
    pair.p.give(ROW, SOURCE[:pages])
    return sending, receiving


def batch_of(leg: object, start: int, stop: int, *, extends: bool = True) -> Any:
    """As SGLang hands it to `run_batch`."""
    req = SimpleNamespace(disagg_kv_sender=leg, kv=SimpleNamespace(req_pool_idx=ROW))
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extends),
        reqs=[req],
        prefix_lens=[start],
        extend_lens=[stop - start],
    )


def run(steps: Stepping, batch: Any, layers: Callable[[], None] | None = None) -> None:
    def forward() -> None:
        for layer in range(LAYERS):
            steps.saved(layer)

    steps.run(batch, layers or forward)


def untouched_exporter(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(job: object) -> None:
        raise AssertionError("a thread copies what steps bring out")

    monkeypatch.setattr(side.exchange.exporter, "put", put)


@pytest.mark.parametrize("tokens", [1, 64, 65, 129, 193])
@pytest.mark.parametrize("chunk", [64, 100, 300])
def test_chunks_leave_within_their_steps(
    pair: Pair, tokens: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: `send` tells the first token alone; a chunk may end within a block."""
    untouched_exporter(pair.p, monkeypatch)
    sending, receiving = ready(pair, tokens)
    steps, blocks = Stepping(pair.p.pool), -(-tokens // 64)
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        run(steps, batch_of(sending, start, stop))
        whole = blocks if stop == tokens else stop // 64
        sending.send(SOURCE[sending._given : whole])
    eventually(receiving, KVPoll.Success)
    eventually(sending, KVPoll.Success)
    assert torch.equal(pair.d.tokens(TARGET, tokens), pair.p.tokens(SOURCE, tokens))
    assert pair.d.rows.output_ids[2, 0] == TOKEN


def test_a_cached_prefix_leaves_with_the_first_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's tree had the first two blocks: the step computes the third alone."""
    untouched_exporter(pair.p, monkeypatch)
    sending, receiving = ready(pair, 150)
    run(Stepping(pair.p.pool), batch_of(sending, 128, 150))
    sending.send(SOURCE[:3])
    eventually(receiving, KVPoll.Success)
    assert torch.equal(pair.d.tokens(TARGET, 150), pair.p.tokens(SOURCE, 150))


def test_layers_that_no_backend_names_leave_after_the_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a whole graph computes; the log says so."""
    untouched_exporter(pair.p, monkeypatch)
    sending, receiving = ready(pair, 100)
    run(Stepping(pair.p.pool), batch_of(sending, 0, 100), layers=lambda: None)
    sending.send(SOURCE[:2])
    eventually(receiving, KVPoll.Success)
    assert torch.equal(pair.d.tokens(TARGET, 100), pair.p.tokens(SOURCE, 100))
    assert "they leave after the forward" in caplog.text


def test_what_no_step_brought_out_is_copied_when_it_is_sent(pair: Pair) -> None:
    """By the exporter's thread, as on a CPU."""
    sending, receiving = ready(pair, 100)
    run(Stepping(pair.p.pool), batch_of(None, 0, 100))
    sending.send(SOURCE[:2])
    eventually(receiving, KVPoll.Success)
    assert torch.equal(pair.d.tokens(TARGET, 100), pair.p.tokens(SOURCE, 100))


def test_nothing_is_said_to_be_written_before_it_has_landed(pair: Pair) -> None:
    """R10: the launch is enqueued inside the step, and its pages are sent after its event."""
    pair.p.side.go.clear()
    sending, receiving = ready(pair, 100)
    told: list[int] = []
    written = sending._outbound.written
    sending._outbound.written = lambda tokens, **more: (
        told.append(more["layers"]),
        written(tokens, **more),
    )
    run(Stepping(pair.p.pool), batch_of(sending, 0, 100))
    sending.send(SOURCE[:2])
    assert (told, sending.poll(), len(pair.p.side.waiting)) == ([], KVPoll.Transferring, LAYERS)
    pair.p.side.go.set()
    eventually(receiving, KVPoll.Success)
    assert told == [1, 2]


def test_an_abort_does_not_wait_but_the_next_step_does(pair: Pair) -> None:
    """R10, R19: SGLang gives the blocks away when `abort` has returned; on the GPU, whatever
    writes them comes behind the copies that still read them."""
    pair.p.side.go.clear()
    steps = Stepping(pair.p.pool)
    sending, _ = ready(pair, 100)
    run(steps, batch_of(sending, 0, 100))
    sending.abort()
    assert pair.p.side.held == []
    order: list[int] = []
    run(steps, batch_of(None, 0, 1), layers=lambda: order.append(len(pair.p.side.held)))
    run(steps, batch_of(None, 0, 1), layers=lambda: order.append(len(pair.p.side.held)))
    assert order == [1, 1]
    pair.p.side.go.set()
    pair.p.side.held[0].synchronize()
    assert pair.p.side.waiting == []
    eventually(sending, KVPoll.Failed)


def test_an_aborted_prompt_leaves_no_more_steps(pair: Pair) -> None:
    """Its blocks may be another's."""
    sending, _ = ready(pair, 100)
    sending.abort()
    run(Stepping(pair.p.pool), batch_of(sending, 0, 100))
    assert pair.p.side.waiting == []


def test_a_position_that_is_not_wanted_is_not_copied() -> None:
    """An engine that computes the prompt's last token itself."""
    pages = GEOMETRY.empty(129)
    leg = PrefillLeg(None, "p0:1", 1)  # type: ignore[arg-type]
    leg._tokens = 129
    finished: list[int] = []
    leg._outbound = SimpleNamespace(  # type: ignore[assignment]
        begin_last=lambda: False, pages=lambda: pages, finish=finished.append
    )
    span = leg.span(ROW, 129)
    assert span is not None
    assert (span.start, span.stop, span.pages is pages) == (0, 128, True)
    leg.taken(span)
    assert leg.span(ROW, 129) is None
    assert leg._stepped == 129


@pytest.mark.parametrize("within", [True, False])
def test_a_copy_that_fails_ends_its_own_handoff_alone(
    pair: Pair, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R34: within the step or after it; the step itself goes on, and the next one's leave."""
    steps = Stepping(pair.p.pool)
    sending, receiving = ready(pair, 64)
    with monkeypatch.context() as broken:
        broken.setattr(pair.p.side, "run", lambda work: 1 / 0)
        run(steps, batch_of(sending, 0, 64), layers=None if within else lambda: None)
    sending.send(SOURCE[:1])
    eventually(sending, KVPoll.Failed)
    eventually(receiving, KVPoll.Failed)
    sending, receiving = ready(pair, 64)
    run(steps, batch_of(sending, 0, 64))
    sending.send(SOURCE[:1])
    eventually(receiving, KVPoll.Success)


def test_a_prompt_that_can_not_leave_ends_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R34: SGLang's step goes on."""
    sending, receiving = ready(pair, 64)
    with monkeypatch.context() as broken:
        broken.setattr(sending._outbound, "pages", lambda: 1 / 0)
        run(Stepping(pair.p.pool), batch_of(sending, 0, 64))
    eventually(sending, KVPoll.Failed)
    eventually(receiving, KVPoll.Failed)


def test_the_room_is_named_after_the_last_copy(pair: Pair) -> None:
    """R31: SGLang runs the request once its row names the room: all of it stands in its slots."""
    pair.d.side.go.clear()
    sending, receiving = ready(pair, 193)
    assert pair.d.side.fenced == 1
    run(Stepping(pair.p.pool), batch_of(sending, 0, 193))
    sending.send(SOURCE[:4])
    until(lambda: len(pair.d.side.waiting) > 0)
    assert (receiving.poll(), pair.d.rows.bootstrap_room[2, 0]) == (KVPoll.Transferring, 0)
    pair.d.side.go.set()
    eventually(receiving, KVPoll.Success)
    assert (pair.d.side.waiting, int(pair.d.rows.bootstrap_room[2, 0])) == ([], receiving._room)
    assert torch.equal(pair.d.tokens(TARGET, 193), pair.p.tokens(SOURCE, 193))


def test_decode_says_failed_only_when_no_copy_is_under_way(pair: Pair) -> None:
    """R10, U1: SGLang takes the blocks back at that word."""
    pair.d.side.go.clear()
    sending, receiving = ready(pair, 448)
    # what is being committed can't be aborted any more
    run(Stepping(pair.p.pool), batch_of(sending, 0, 384))
    sending.send(SOURCE[:6])
    until(lambda: len(pair.d.side.waiting) > 0)
    receiving.abort()
    until(lambda: receiving._inbound.error is not None)
    assert receiving.poll() == KVPoll.Transferring
    pair.d.side.go.set()
    eventually(receiving, KVPoll.Failed)
    assert pair.d.side.waiting == []
    assert pair.d.rows.bootstrap_room[2, 0] == 0


def test_hooks_do_nothing_where_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode replica's, an ordinary one's, and any on a CPU."""
    seen: list[tuple[Any, ...]] = []

    def original(*given: Any, **named: Any) -> str:
        seen.append((given, named))
        return "result"

    assert stepping.ran(original, "scheduler", "batch", pp_proxy_tensors=None) == "result"
    assert stepping.attended(original, "backend", 1, 2, 3, layer=None, sinks=4) == "result"
    assert seen == [
        (("scheduler", "batch"), {"pp_proxy_tensors": None}),
        (("backend", 1, 2, 3, None), {"sinks": 4}),
    ]


def test_hooks_tell_of_layers_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer once its attention has returned; a step around all of it."""
    said: list[object] = []
    steps = SimpleNamespace(
        run=lambda batch, forward: (said.append(batch), forward())[1], saved=said.append
    )
    monkeypatch.setattr(joining, "stepping", lambda: steps)
    layer = SimpleNamespace(layer_id=5)
    attention = lambda *given, **named: said.append("attention")  # noqa: E731
    forward = lambda *given: stepping.attended(attention, None, 1, 2, 3, layer=layer)  # noqa: E731
    stepping.ran(forward, "scheduler", "batch")
    assert said == ["batch", "attention", 5]


def test_spans_are_of_prompts_alone() -> None:
    """A step that decodes, and a request of SGLang's own, bring out nothing."""
    leg = PrefillLeg(None, "p0:1", 1)  # type: ignore[arg-type]
    assert list(stepping._spans(batch_of(leg, 0, 9, extends=False))) == []
    assert list(stepping._spans(batch_of(object(), 0, 9))) == []
