"""What a canary compares with where the decode engine can't compute a prompt alone (SGLang)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from runtime.router.cluster import cluster, eventually
from runtime.router.fakes import FakeEngine, answers, whole_of

from pdctl.runtime.router.canary import PROMPT, TOKENS

pytestmark = pytest.mark.anyio

PROMPT_IDS = [5, 6]
UNRANKED = 0.0
"""A decode engine that takes prefill's first token knows no log probability of it."""


def ranks(value: float = -0.1, first: float | None = None) -> Callable[..., Any]:
    """SGLang's form: each token that it generates is 7, this likely; so is the first one,
    unless it has another number."""

    async def answer(engine: FakeEngine, request: web.Request, body: dict) -> web.StreamResponse:
        if "messages" in body or body.get("stream"):
            return await answers(engine, request, body)
        numbers = [value] * body["max_tokens"]
        if first is not None:
            numbers[0] = first
        tops = [{"token_id:7": number, "token_id:8": -9.0} for number in numbers]
        logprobs = {"tokens": ["token_id:7"] * len(tops), "top_logprobs": tops}
        whole = whole_of({**body, "logprobs": None})
        whole["choices"][0] |= {"logprobs": logprobs, "prompt_token_ids": PROMPT_IDS}
        return web.json_response(whole)

    return answer


def behave(**by_name: Callable[..., Any]) -> Callable[[dict[str, FakeEngine]], None]:
    def set_up(engines: dict[str, FakeEngine]) -> None:
        for name, answer in by_name.items():
            kind = {"p": "prefill", "d": "decode"}[name[0]]
            engines[name].on |= {kind: answer, "alone": answer}

    return set_up


def compared(engine: FakeEngine) -> list[tuple[str, dict[str, Any]]]:
    """Its completions of the canary; what follows them, to measure, is streamed."""
    return [(k, b) for k, b in engine.bodies if "prompt" in b and "ignore_eos" not in b]


async def test_prefill_computes_the_same_tokens_one_at_a_time() -> None:
    """S7: each handoff's first token is prefill's own, of all tokens before it; decode is asked
    for one token, and nothing runs on either of them alone."""
    set_up = behave(ps0=ranks(), ds0=ranks(first=UNRANKED))
    async with cluster("ps0 ds0", canaries=False, set_up=set_up) as c:
        await c.ready("ps0>ds0")
        prefills = [body for _, body in compared(c["ps0"])]
        assert {kind for kind, _ in c["ps0"].bodies} == {"prefill"}
        assert [body["prompt"] for body in prefills] == [
            PROMPT,
            PROMPT,
            *([*PROMPT_IDS, *[7] * at] for at in range(1, TOKENS)),
        ]
        assert [body.get("logprobs") for body in prefills] == [None, *[10] * TOKENS]
        decodes = [body["max_tokens"] for _, body in compared(c["ds0"])]
        assert decodes == [TOKENS, *[1] * TOKENS]


@pytest.mark.parametrize("names", ["ps0 ds0", "p0 ds0"])
async def test_wrong_kv_is_told_from_the_first_token_that_decode_computes(names: str) -> None:
    """U13: the first one is prefill's; from the second on decode's own."""
    prefill, decode = names.split()
    engines = {decode: ranks(-1.0, first=UNRANKED), prefill: ranks()}
    async with cluster(names, canaries=False, set_up=behave(**engines)) as c:
        path = c.router.roster.paths[0]
        await eventually(lambda: c.router.roster.state(path)[0] == "failed")
        assert "token 1" in (c.router.roster.state(path)[1] or "")


async def test_a_prefill_engine_that_serves_alone_is_what_decode_is_compared_with() -> None:
    """S11: MLX → SGLang; prefill computes all of it in one request."""
    set_up = behave(p0=ranks(), ds0=ranks(first=UNRANKED))
    async with cluster("p0 ds0", canaries=False, set_up=set_up) as c:
        await c.ready("p0>ds0")
        assert [kind for kind, _ in compared(c["p0"])] == ["alone", "prefill"]


async def test_an_sglang_prefill_needs_no_reference_where_decode_serves_alone() -> None:
    """S10: SGLang → MLX is compared as any pair of MLX is."""
    async with cluster("ps0 d0", canaries=False) as c:
        await c.ready("ps0>d0")
        assert [kind for kind, _ in compared(c["d0"])] == ["alone", "decode"]
