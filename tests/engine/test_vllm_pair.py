"""vLLM to vLLM, vLLM to MLX, MLX to vLLM: real processes, text equal to one that serves alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from agreement import Agreement, ranking
from engine.vllm_pairs import (
    CHAT,
    COMPLETIONS,
    LENGTHS,
    OUTPUT_TOKENS,
    Four,
    alone,
    answered_alone,
    chat,
    check_at_rest,
    completion,
)
from engines.replicas import text_of
from engines.vllm_replicas import needs_vllm

from pdctl.topology.model import PAGE_TOKENS

pytestmark = [pytest.mark.engine, needs_vllm]

PAIRS = ("vllm>vllm", "vllm>mlx", "mlx>vllm")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_text_through_a_pair_equals_text_of_one(
    four: Four, name: str, tokens: int, path: str, agreement: Agreement
) -> None:
    """R25, U8, U13: at every length around a page's end and beyond a chunk, streamed and not, with
    either number of destination blocks: n - 1 positions travel in whole pages. Both engines
    choose the same tokens alone, too."""
    pair = four.pair(name)
    make = chat if path == CHAT else completion
    body = make(tokens, 5, salt=f"{name} {tokens}")
    ranked = {**body, **ranking(path)}
    own = answered_alone(pair.decode, path, ranked)
    before = pair.decode.counters()
    (prefilled, answer), (decoded, whole) = pair.post(path, ranked)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    count = whole["usage"]["prompt_tokens"]
    label = f"{path}, {count} tokens"
    agreement.check(name, label, own, whole)
    if pair.decode is not four.vd:
        agreement.check("mlx beside vllm", label, answered_alone(four.vd, path, ranked), own)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == count - 1
    after = pair.decode.counters()
    assert after.imported_tokens - before.imported_tokens == count - 1
    pages = -(-(count - 1) // PAGE_TOKENS)
    assert after.host_bytes - before.host_bytes == pages * pair.decode.contract.page_bytes
    events = pair.events(path, {**body, "cache_salt": f"{name} {tokens} streamed"})
    assert "".join(map(text_of, events)) == text_of(whole)
    check_at_rest(pair.prefill, pair.decode)


@pytest.mark.parametrize("name", ["vllm>vllm", "mlx>vllm"])
def test_only_what_decode_does_not_hold_travels(four: Four, name: str) -> None:
    """The second time, decode's prefix cache holds every whole block of the prompt; whole pages
    from the first missing position on travel, and the held blocks stay as they are."""
    pair, body = four.pair(name), completion(200, 6, salt=f"prefix {name}")
    expected = alone(four.vd, COMPLETIONS, body)
    for round_ in range(2):
        before = pair.decode.counters()
        _, (status, answer) = pair.post(COMPLETIONS, body)
        assert status == 200, answer
        assert text_of(answer) == expected
        after = pair.decode.counters()
        held = 192 if round_ else 0
        assert after.imported_tokens - before.imported_tokens == 199 - held
        assert after.reused_pages - before.reused_pages == held // PAGE_TOKENS
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 199


def test_a_prompt_that_decode_holds_whole_moves_nothing(four: Four) -> None:
    """U16: n - 1 positions are a whole number of blocks, all of them cached: the text is right,
    and the handoff still ends in Done on both ends."""
    pair, body = four.pair("vllm>vllm"), completion(129, 7, salt="held")
    texts, moved = [], []
    for _ in range(2):
        before = pair.decode.counters()
        (prefilled, _), (decoded, answer) = pair.post(COMPLETIONS, body)
        assert (prefilled, decoded) == (200, 200)
        texts.append(text_of(answer))
        moved.append(pair.decode.counters().host_bytes - before.host_bytes)
    assert texts == [alone(four.vd, COMPLETIONS, body)] * 2
    assert moved == [2 * pair.decode.contract.page_bytes, 0]
    check_at_rest(pair.prefill, pair.decode)


@pytest.mark.parametrize("name", ["vllm>vllm", "vllm>mlx"])
def test_what_prefill_holds_already_is_sent_all_the_same(four: Four, name: str) -> None:
    """Prefill's own prefix cache spares it the computing, not the sending."""
    pair = four.pair(name)
    body = completion(400, 9, salt=f"warm {name}")
    expected = alone(pair.decode, COMPLETIONS, body)
    status, warmed = four.vp.post(COMPLETIONS, {**body, "max_tokens": 1})
    assert status == 200, warmed
    (prefilled, answer), (decoded, whole) = pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
    assert text_of(whole) == expected


def test_a_prompt_of_one_token_needs_no_page(four: Four) -> None:
    """R27: zero positions travel, and both engines go on."""
    pair, body = four.pair("vllm>vllm"), completion(1, 9, salt="one")
    (prefilled, _), (decoded, answer) = pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200)
    assert text_of(answer) == alone(four.vd, COMPLETIONS, body)
    check_at_rest(pair.prefill, pair.decode)


@pytest.mark.parametrize("name", PAIRS)
def test_sixteen_at_once_are_all_right(four: Four, name: str) -> None:
    """More than either engine runs at a time (eight): the rest waits, in order."""
    pair = four.pair(name)
    bodies = [completion(40 + 29 * i, i, salt=f"many {name}") for i in range(16)]
    expected = [alone(pair.decode, COMPLETIONS, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: pair.post(COMPLETIONS, body), bodies))
    assert [(a[0], b[0]) for a, b in answers] == [(200, 200)] * 16
    assert [text_of(b[1]) for _, b in answers] == expected
    check_at_rest(pair.prefill, pair.decode)


def test_every_phase_of_a_handoff_is_observed(four: Four) -> None:
    """What lies between prefill's last forward and decode's first is transfer and import."""
    four.pair("vllm>vllm").post(COMPLETIONS, completion(51, 10, salt="phases"))
    sent, received = four.vp.counters(), four.vd.counters()
    assert set(sent.phases) == {"queue", "prefill", "transfer"}
    assert set(received.phases) == {"import", "first_token"}
    assert sent.output_tokens > 0
    assert received.output_tokens >= OUTPUT_TOKENS
