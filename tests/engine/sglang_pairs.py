"""Pairs of SGLang with itself and with other engines on the tiny Llama, and what is asked of
them."""

from __future__ import annotations

from typing import Any

from engine.vllm_pairs import CHAT, alone, chat, check_at_rest, completion
from engines.replicas import Pair, Process, text_of

from pdctl.topology.model import PAGE_TOKENS

LENGTHS = (51, 64, 65, 66, 128, 129, 130, 193, 700)
CHUNK_TOKENS = 128
CONTEXT_TOKENS = 2048


class Fleet:
    """Replicas by engine and role; `o` computes alone what all others are compared with.

    Args:
        ends: engine name → (prefill replica, decode replica).
    """

    def __init__(self, o: Process, ends: dict[str, tuple[Process, Process]]) -> None:
        self.o = o
        self._ends = ends

    def pair(self, name: str) -> Pair:
        """Of "sglang>mlx" and its like."""
        prefill, decode = name.split(">")
        return Pair(self._ends[prefill][0], self._ends[decode][1])


def check_text(fleet: Fleet, name: str, tokens: int, path: str) -> None:
    """One prompt through a pair, whole and streamed: the text of an engine that computes alone,
    the positions that decode must import and no other, and nothing left."""
    pair = fleet.pair(name)
    make = chat if path == CHAT else completion
    body = make(tokens, 5, salt=f"{name} {tokens} {path}")
    expected = alone(fleet.o, path, body)
    before = pair.decode.counters()
    (prefilled, answer), (decoded, whole) = pair.post(path, body)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    # mlx-lm leaves out the space that a text begins with
    assert text_of(whole).strip() == expected.strip()
    count = whole["usage"]["prompt_tokens"]
    wanted = count - pair.decode.spec.recomputes_last_token
    after = pair.decode.counters()
    assert after.imported_tokens - before.imported_tokens == wanted
    pages = -(-wanted // PAGE_TOKENS)
    assert after.host_bytes - before.host_bytes == pages * pair.decode.contract.page_bytes
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == wanted
    events = pair.events(path, {**body, "cache_salt": f"{name} {tokens} streamed"})
    assert "".join(map(text_of, events)).strip() == expected.strip()
    check_at_rest(pair.prefill, pair.decode)


def check_next_is_right(pair: Pair, fleet: Fleet, **fields: Any) -> None:
    """Nothing is left, and the pair goes on."""
    check_at_rest(pair.prefill, pair.decode)
    body = completion(130, 77, salt="next", **fields)
    (prefilled, answer), (decoded, whole) = pair.post("/v1/completions", body)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    assert text_of(whole).strip() == alone(fleet.o, "/v1/completions", body).strip()
