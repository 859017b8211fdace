"""SGLang to SGLang, SGLang to MLX, MLX to SGLang: real processes, text equal to one that serves
alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from agreement import Agreement
from engine import held, witness
from engine.held import MlxWitness
from engine.sglang_pairs import (
    CHUNK_TOKENS,
    Fleet,
    check_held_prefix_is_sent,
    check_many_at_once,
    check_one_contract,
    check_text,
)
from engine.vllm_pairs import CHAT, COMPLETIONS, LENGTHS, alone, check_at_rest, completion
from engines.replicas import contract_of, text_of
from engines.sglang_replicas import SglangProcess, needs_sglang

from pdctl.topology.model import PAGE_TOKENS, Role

pytestmark = [pytest.mark.engine, needs_sglang]

PAIRS = ("sglang>sglang", "sglang>mlx", "mlx>sglang")


@pytest.fixture(scope="module")
def fleet(folder: Path, llama_dir: Path) -> Iterator[Fleet]:
    """SGLang computes prompts in chunks of 128 tokens; its decode keeps prefixes. What each holds
    can be asked for."""
    contract, env = contract_of(llama_dir), witness.environment(folder)
    with ExitStack() as stack:

        def sglang(name: str, role: Role, **options: object) -> SglangProcess:
            made = SglangProcess(folder, name, role, llama_dir, contract, env=env, **options)
            return stack.enter_context(made)

        so = sglang("so0", Role.BOTH)
        sp = sglang("sp0", Role.PREFILL, chunked_prefill_size=CHUNK_TOKENS)
        sd = sglang("sd0", Role.DECODE, disaggregation_decode_enable_radix_cache=True)
        mp, md = (
            stack.enter_context(MlxWitness(folder, name, role, llama_dir, contract, env=env))
            for name, role in (("mp0", Role.PREFILL), ("md0", Role.DECODE))
        )
        for process in (so, sp, sd):
            process.await_ready()
        yield Fleet(so, {"sglang": (sp, sd), "mlx": (mp, md)})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_text_through_a_pair_equals_text_of_one(
    fleet: Fleet, name: str, tokens: int, path: str, agreement: Agreement
) -> None:
    """R25, R31, U8: at every length around a page's end and beyond a chunk, streamed and not; all
    n positions and the first token travel to SGLang, n - 1 positions to MLX."""
    check_text(fleet, name, tokens, path, agreement)


@pytest.mark.parametrize("tokens", held.LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_decode_holds_prefills_numbers_rounded_once(
    folder: Path, llama_dir: Path, fleet: Fleet, name: str, tokens: int
) -> None:
    """R25: an SGLang decode's all n positions, read from its own slots."""
    held.check_rounded_once(folder, llama_dir, fleet.pair(name), name, tokens)


@pytest.mark.parametrize("name", ["sglang>sglang", "mlx>sglang"])
def test_only_what_decode_does_not_hold_travels(fleet: Fleet, name: str) -> None:
    """R45: the second time, decode's prefix cache holds the prompt's whole blocks."""
    pair, body = fleet.pair(name), completion(200, 6, salt=f"prefix {name}")
    expected = alone(fleet.o, COMPLETIONS, body)
    moved = []
    for _ in range(2):
        before = pair.decode.counters()
        _, (status, answer) = pair.post(COMPLETIONS, body)
        assert status == 200, answer
        assert text_of(answer) == expected
        after = pair.decode.counters()
        moved.append(after.imported_tokens - before.imported_tokens)
    assert moved == [200, 200 - 192]
    assert after.reused_pages - before.reused_pages == 192 // PAGE_TOKENS


@pytest.mark.parametrize("name", ["sglang>sglang", "sglang>mlx"])
def test_what_prefill_holds_already_is_sent_all_the_same(fleet: Fleet, name: str) -> None:
    """Prefill's own prefix cache spares it the computing, not the sending."""
    check_held_prefix_is_sent(fleet, name)


@pytest.mark.parametrize("name", PAIRS)
def test_one_token_of_output_is_the_first(fleet: Fleet, name: str) -> None:
    """On an SGLang decode it is prefill's, and no forward runs there."""
    pair, body = fleet.pair(name), completion(100, 3, salt=f"one {name}", max_tokens=1)
    own = fleet.o.post(COMPLETIONS, {**body, "cache_salt": "alone"})[1]
    (prefilled, _), (decoded, answer) = pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200)
    assert text_of(answer).strip() == text_of(own).strip()
    assert answer["choices"][0]["finish_reason"] == "length"
    check_at_rest(pair.prefill, pair.decode)


def test_a_format_holds_from_the_first_token_on(fleet: Fleet) -> None:
    """R66: SGLang's prefill applies the constraint that its decode goes on with."""
    pair = fleet.pair("sglang>sglang")
    body = completion(80, 4, salt="format", regex="[0-9]{3}x", max_tokens=8)
    (prefilled, answer), (decoded, whole) = pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    assert text_of(whole) == text_of(fleet.o.post(COMPLETIONS, body)[1])
    assert text_of(whole)[:3].isdigit()
    assert text_of(whole)[3:] == "x"


@pytest.mark.parametrize("name", PAIRS)
def test_sixteen_at_once_are_all_right(fleet: Fleet, name: str) -> None:
    """More than either engine runs at a time (eight): the rest waits, in order."""
    check_many_at_once(fleet, name, 16)


def test_nothing_listens_beyond_loopback(fleet: Fleet) -> None:
    """R60: neither HTTP nor anything between an engine's own processes."""
    pair = fleet.pair("sglang>sglang")
    for process in (fleet.o, pair.prefill, pair.decode):
        top = psutil.Process(process.process.pid)
        family = [top, *top.children(recursive=True)]
        listening = [
            connection.laddr.ip
            for each in family
            for connection in each.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(listening) > 1
        assert set(listening) == {"127.0.0.1"}


def test_every_phase_of_a_handoff_is_observed(fleet: Fleet) -> None:
    """What lies between prefill's last forward and the scheduler's next look is transfer and
    import; the first token came with it."""
    pair = fleet.pair("sglang>sglang")
    pair.post(COMPLETIONS, completion(51, 10, salt="phases"))
    sent, received = pair.prefill.counters(), pair.decode.counters()
    assert set(sent.phases) == {"queue", "prefill", "transfer"}
    assert set(received.phases) == {"import"}
    assert sent.output_tokens > 0
    assert received.output_tokens >= 16


def test_one_checkpoint_is_one_contract(fleet: Fleet) -> None:
    """R56: in every role, SGLang and MLX have loaded the same."""
    check_one_contract(fleet)
