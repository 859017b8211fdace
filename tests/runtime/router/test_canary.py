"""No path takes traffic before a real generation went through it, per incarnation."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from runtime.router.cluster import CHAT, cluster, eventually
from runtime.router.fakes import FakeEngine, answers, fails, says, stalls_then, whole_of

from pdctl.runtime.router import ward
from pdctl.runtime.router.canary import BOUNDS
from pdctl.runtime.router.ranking import CanaryFailed, Step, Token, difference, steps_of
from pdctl.topology.model import Dtype

pytestmark = pytest.mark.anyio

BOUND = BOUNDS[Dtype.FLOAT16]


def step(chosen: int, **logprobs: float) -> Step:
    return Step(chosen, tuple(Token(int(name[1:]), value) for name, value in logprobs.items()))


RIGHT = [step(1, t1=-0.2, t2=-2.0, t3=-3.0), step(2, t2=-0.1, t4=-3.0, t5=-4.0)]


def test_equal_steps_do_not_differ() -> None:
    assert difference(RIGHT, RIGHT, BOUND) is None


def test_rounding_does_not_differ() -> None:
    near = [step(1, t1=-0.3, t2=-1.9, t3=-3.1), step(2, t2=-0.2, t4=-3.1, t6=-4.1)]
    assert difference(RIGHT, near, BOUND) is None


@pytest.mark.parametrize(
    "wrong",
    [
        [step(1, t1=-0.9, t2=-2.0, t3=-3.0)],
        [step(9, t9=-0.2, t8=-2.0, t7=-3.0)],
        [RIGHT[0], step(2, t2=-1.1, t4=-3.0, t5=-4.0)],
        [step(1, t1=float("nan"), t2=-2.0, t3=-3.0)],
        [step(1, t1=float("-inf"), t2=-2.0, t3=-3.0)],
        [],
    ],
)
def test_more_than_rounding_is_told(wrong: list[Step]) -> None:
    """U13, U16: another token far off, a moved log probability, at any step; nan too."""
    assert difference(RIGHT, wrong, BOUND) is not None


def test_a_near_tie_may_part_and_ends_the_comparison() -> None:
    """Two choices within the bound of each other: what follows has another context."""
    tie = [step(1, t1=-0.70, t2=-0.72, t3=-5.0), step(8, t8=-0.1, t9=-3.0)]
    other = [step(2, t1=-0.73, t2=-0.69, t3=-5.0), step(7, t7=-0.1, t6=-3.0)]
    assert difference(tie, other, BOUND) is None


@given(st.lists(st.floats(-20, 0), min_size=5, max_size=5), st.integers(0, 4))
def test_a_shift_over_the_bound_of_a_common_token_is_always_told(
    logprobs: list[float], which: int
) -> None:
    own = Step(0, tuple(Token(i, value) for i, value in enumerate(logprobs)))
    moved = list(logprobs)
    moved[which] -= BOUND + 0.01
    other = Step(0, tuple(Token(i, value) for i, value in enumerate(moved)))
    assert difference([own], [other], BOUND)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices": [{"logprobs": null}]}', b"[]"])
def test_an_answer_without_log_probabilities_fails(body: bytes) -> None:
    with pytest.raises(CanaryFailed):
        steps_of(body)


def test_completions_older_form_is_read_where_tokens_are_named_by_id() -> None:
    """vLLM's form: `return_tokens_as_token_ids`."""
    body = msgspec.json.encode(
        {
            "choices": [
                {
                    "logprobs": {
                        "tokens": ["token_id:7"],
                        "token_logprobs": [-0.1],
                        "top_logprobs": [{"token_id:7": -0.1, "token_id:9": -2.5}],
                    }
                }
            ]
        }
    )
    assert steps_of(body) == (Step(7, (Token(7, -0.1), Token(9, -2.5))),)


def with_logprob(value: float) -> Any:
    """An engine whose tokens are this likely."""

    async def answer(engine: FakeEngine, request: web.Request, body: dict) -> web.StreamResponse:
        whole = copy.deepcopy(whole_of(body))
        for entry in whole["choices"][0].get("logprobs", {}).get("content", []):
            entry["top_logprobs"][0]["logprob"] = value
        return web.json_response(whole)

    return answer


async def test_a_pair_is_tried_over_a_page_and_with_a_template_past_every_cache() -> None:
    """U12, U13: one completion alone, the same prefill → decode, one chat request, then some
    more of each to measure; all with pdctl_cache false; the pair is announced ready afterwards,
    with the router's address."""
    seen: dict[str, list] = {}

    def keep(engines: dict[str, FakeEngine]) -> None:
        seen.update({name: engine.bodies for name, engine in engines.items()})

    async with cluster("p0 d0", canaries=False, set_up=keep) as c:
        await c.ready("p0>d0")
        kinds = [(kind, "messages" in body) for kind, body in seen["d0"]]
        assert kinds[:3] == [("alone", False), ("decode", False), ("decode", True)]
        assert kinds[3:] == sorted(kinds[3:])
        assert set(kinds[3:]) == {("alone", False), ("decode", False)}
        assert all(body["pdctl_cache"] is False for _, body in seen["d0"] + seen["p0"])
        assert {kind for kind, _ in seen["p0"]} == {"prefill"}
        await eventually(lambda: c.keeper.last_states is not None)
        await eventually(lambda: c.keeper.last_states.pairs[0].state == "ready")
        assert c.keeper.last_states.url == c.router.url
        assert c.keeper.last_states.pairs[0].transport == "tcp"


async def test_wrong_kv_keeps_a_pair_out_and_says_why() -> None:
    """U13, U22: the handed-over tokens' log probabilities are off: no traffic, 503 and
    PairStates with the cause."""

    def wrong(engines: dict[str, FakeEngine]) -> None:
        engines["d0"].on["decode"] = with_logprob(-3.0)

    async with cluster("p0 d0", canaries=False, set_up=wrong) as c:
        await eventually(lambda: c.router.roster.state(c.router.roster.paths[0])[0] == "failed")
        answer = await c.ask(CHAT)
        assert answer.status == 503
        assert "differ by 2.90" in json.loads(await answer.read())["error"]["message"]
        await eventually(lambda: c.keeper.last_states.pairs[0].state == "failed")
        assert "token 0" in c.keeper.last_states.pairs[0].cause


async def test_a_template_that_differs_fails_the_chat_request() -> None:
    """The completion passes; the chat request fails on the token digest, named."""

    async def differs(engine: FakeEngine, request: web.Request, body: dict) -> web.StreamResponse:
        if "messages" in body:
            return await fails(502, "the legs tokenised differently", "tokens")(
                engine, request, body
            )
        return await answers(engine, request, body)

    def set_up(engines: dict[str, FakeEngine]) -> None:
        engines["p0"].on["prefill"] = differs

    async with cluster("p0 d0", canaries=False, set_up=set_up) as c:
        await eventually(lambda: c.router.roster.state(c.router.roster.paths[0])[0] == "failed")
        assert "tokenised differently" in c.router.roster.state(c.router.roster.paths[0])[1]


async def test_a_failed_canary_is_tried_again_while_the_ends_stay_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a pause; once it passes the pair takes traffic."""
    monkeypatch.setattr(ward, "PAUSES_S", (0.01,))

    def bad(engines: dict[str, FakeEngine]) -> None:
        engines["d0"].on["decode"] = says(500, b"not yet")

    async with cluster("p0 d0", canaries=False, set_up=bad) as c:
        await eventually(lambda: sum(kind == "decode" for kind, _ in c["d0"].bodies) >= 3)
        assert not c.router.roster.ready()
        c["d0"].on.clear()
        await c.ready("p0>d0")
        assert (await c.ask(CHAT)).status == 200


async def test_a_restarted_replica_takes_traffic_after_its_canary_only() -> None:
    """U12, U14, U22, R62: same name, next incarnation; requests are refused until the canary
    of the new incarnation has passed."""
    async with cluster("p0 d0") as c:
        c["p0"].on["prefill"] = stalls_then()
        c["p0"].incarnation = 2
        c.keeper.push()
        await c["p0"].stalled.wait()
        answer = await c.ask(CHAT)
        assert answer.status == 503
        assert "canary" in json.loads(await answer.read())["error"]["message"]
        c["p0"].release.set()
        c["p0"].on.clear()
        await c.ready("p0>d0")
        assert (await c.ask(CHAT)).status == 200


async def test_one_pairs_canary_does_not_block_another_pair() -> None:
    """d1's canary hangs; p0>d0 serves."""

    def hangs(engines: dict[str, FakeEngine]) -> None:
        engines["d1"].on["alone"] = stalls_then()

    async with cluster("p0 d0 d1", canaries=False, set_up=hangs) as c:
        await c.ready("p0>d0")
        assert (await c.ask(CHAT)).headers["x-pdctl-path"] == "p0>d0"
        c["d1"].release.set()


async def test_canaries_run_one_at_a_time_on_a_replica() -> None:
    """Two pairs share p0: it never runs two canary legs at once."""
    most = 0

    async def counts(engine: FakeEngine, request: web.Request, body: dict) -> web.StreamResponse:
        nonlocal most
        most = max(most, engine.open)
        await asyncio.sleep(0)
        return await answers(engine, request, body)

    def set_up(engines: dict[str, FakeEngine]) -> None:
        engines["p0"].on["prefill"] = counts

    async with cluster("p0 d0 d1", canaries=False, set_up=set_up) as c:
        await c.ready("p0>d0", "p0>d1")
    assert most == 1


async def test_an_end_that_dies_in_its_canary_leaves_no_verdict() -> None:
    """U11: the pair waits for the next incarnation and says for what; nobody hangs meanwhile."""

    def hangs(engines: dict[str, FakeEngine]) -> None:
        engines["p0"].on["prefill"] = stalls_then()

    async with cluster("p0 d0", canaries=False, set_up=hangs) as c:
        await c["p0"].stalled.wait()
        c.keeper.set_state("p0", "backoff", "p0 was killed")
        path = c.router.roster.paths[0]
        cause = 'prefill replica "p0": p0 was killed'
        await eventually(lambda: c.router.roster.state(path) == ("waiting", cause))
        assert (await c.ask(CHAT)).status == 503
        c["p0"].on.clear()
        c["p0"].incarnation = 2
        c.keeper.set_state("p0", "ready")
        await c.ready("p0>d0")


async def test_an_ordinary_replica_has_a_canary_of_its_own() -> None:
    """U12: a replica that cannot generate takes no traffic; it is announced as failed."""

    def bad(engines: dict[str, FakeEngine]) -> None:
        engines["o0"].on["alone"] = says(404, b'{"error": "generation thread died"}')

    async with cluster("o0", canaries=False, set_up=bad) as c:
        await eventually(
            lambda: (
                c.keeper.last_states is not None
                and c.keeper.last_states.replicas[0].state == "failed"
            )
        )
        assert "generation thread died" in c.keeper.last_states.replicas[0].cause
        assert (await c.ask(CHAT)).status == 503
