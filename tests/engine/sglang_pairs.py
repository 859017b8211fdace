"""Pairs of SGLang with itself and with other engines on the tiny Llama, and what is asked of
them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from agreement import NEAR_TIE_NATS, Agreement, lead_where_parted, ranking
from engine.vllm_pairs import (
    CHAT,
    COMPLETIONS,
    alone,
    answered_alone,
    chat,
    check_at_rest,
    completion,
)
from engines.replicas import Pair, Process, text_of
from engines.vllm_replicas import VllmProcess

from pdctl.topology.model import PAGE_TOKENS, Transport

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

    @property
    def processes(self) -> list[Process]:
        return [self.o, *(process for pair in self._ends.values() for process in pair)]

    def pair(self, name: str) -> Pair:
        """Of "sglang>mlx" and its like."""
        prefill, decode = name.split(">")
        return Pair(self._ends[prefill][0], self._ends[decode][1])


def over_nixl(process: VllmProcess, *peers: str, device: bool = False) -> VllmProcess:
    """Pages to or from these peers go as where the file says so, and lie on a device where it names
    some, to others over TCP; before the process is started."""
    agent = process.agent
    transports = dict.fromkeys(peers, Transport.NIXL)
    changed = {"transports": transports, "device_pages": device}
    agent.assignment = msgspec.structs.replace(agent.assignment, **changed)
    return process


def check_text(fleet: Fleet, name: str, tokens: int, path: str, agreement: Agreement) -> None:
    """One prompt through a pair, whole and streamed: the text of an engine that computes alone
    (the decode engine where it can), the positions that decode must import and no other, and
    nothing left."""
    pair = fleet.pair(name)
    make = chat if path == CHAT else completion
    # each engine hides special tokens as it likes
    body = {**make(tokens, 5, salt=f"{name} {tokens} {path}"), "skip_special_tokens": False}
    serves_alone = pair.decode.spec.recomputes_last_token
    ranked = {**body, **ranking(path)}
    own = answered_alone(pair.decode if serves_alone else fleet.o, path, ranked)
    asked = ranked if serves_alone else body
    before = pair.decode.counters()
    (prefilled, answer), (decoded, whole) = pair.post(path, asked)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    count = whole["usage"]["prompt_tokens"]
    if serves_alone:
        agreement.check(name, f"{path}, {count} tokens", own, whole)
    else:
        lead = lead_where_parted(own, text_of(whole))
        assert lead <= NEAR_TIE_NATS, (text_of(own), text_of(whole))
    wanted = count - serves_alone
    after = pair.decode.counters()
    assert after.imported_tokens - before.imported_tokens == wanted
    size = -(-wanted // PAGE_TOKENS) * pair.decode.contract.page_bytes
    moved = (after.gpu_bytes - before.gpu_bytes, after.host_bytes - before.host_bytes)
    assert moved == ((size, 0) if pair.decode.agent.assignment.device_pages else (0, size))
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == wanted
    events = pair.events(path, {**body, "cache_salt": f"{name} {tokens} streamed"})
    assert "".join(map(text_of, events)) == text_of(whole)
    check_at_rest(pair.prefill, pair.decode)


def check_next_is_right(pair: Pair, fleet: Fleet, **fields: Any) -> None:
    """Nothing is left, and the pair goes on."""
    check_at_rest(pair.prefill, pair.decode)
    body = completion(130, 77, salt="next", **fields)
    (prefilled, answer), (decoded, whole) = pair.post("/v1/completions", body)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    assert text_of(whole).strip() == alone(fleet.o, "/v1/completions", body).strip()


def check_held_prefix_is_sent(fleet: Fleet, name: str) -> None:
    """The second time, prefill computes a prompt's end alone, and all of it travels."""
    pair = fleet.pair(name)
    body = completion(400, 9, salt=f"warm {name}")
    expected = alone(fleet.o, COMPLETIONS, body)
    for _ in range(2):
        (prefilled, answer), (decoded, whole) = pair.post(COMPLETIONS, body)
        assert (prefilled, decoded) == (200, 200)
        assert text_of(whole).strip() == expected.strip()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 384


def check_many_at_once(fleet: Fleet, name: str, count: int) -> None:
    pair = fleet.pair(name)
    bodies = [completion(40 + 29 * i, i, salt=f"many {name}") for i in range(count)]
    expected = [alone(fleet.o, COMPLETIONS, body).strip() for body in bodies]
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda body: pair.post(COMPLETIONS, body), bodies))
    assert [(a[0], b[0]) for a, b in answers] == [(200, 200)] * count
    assert [text_of(b[1]).strip() for _, b in answers] == expected
    check_at_rest(pair.prefill, pair.decode)


def check_one_contract(fleet: Fleet) -> None:
    """What each replica says at its start, KV memory and rotary embeddings included."""
    for process in fleet.processes:
        ready = process.agent.ready
        assert ready is not None
        loaded = msgspec.structs.replace(
            process.contract,
            attention=ready.effective.attention,
            positions=ready.effective.positions,
        )
        assert loaded.digest == process.contract.digest, process.name
