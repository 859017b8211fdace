"""What the checks of a GPU box call well, and what not."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web
from ports import free_port

from pdctl.runtime.bench.prompts import Prompt
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS, COMPLETIONS

PROMPT = Prompt(text="three words here", tokens=3)


def ranked(*steps: tuple[str, float]) -> dict[str, Any]:
    """A whole answer; each token with its lead over the next likeliest."""
    ranking = [{token: -1.0, "other": -1.0 - lead} for token, lead in steps]
    names = [token for token, _ in steps]
    logprobs = {"tokens": names, "token_logprobs": [-1.0] * len(names), "top_logprobs": ranking}
    return {"choices": [{"text": "".join(names), "logprobs": logprobs}]}


def own(*steps: tuple[str, float]) -> Any:
    from gpu_answers import Answer

    whole = ranked(*steps)
    return Answer(whole["choices"][0]["text"], 3, whole=whole)


@pytest.mark.parametrize(
    ("text", "lead"),
    [
        (" one two", 0.0),
        ("one two", 0.0),
        (" one tea", 0.5),
        ("one tea", 0.5),
        ("won two", 2.0),
        (" one two three", 1000.0),
    ],
)
def test_a_difference_is_as_grave_as_the_lead_that_was_lost(text: str, lead: float) -> None:
    """At its first place, whether a decode engine shows the space in front or not."""
    from gpu_answers import Answer, compared

    found = compared("vp>sd", 3, "completion", own((" one", 2.0), (" two", 0.5)), Answer(text))
    assert math.isclose(found.lead_nats, lead, abs_tol=1e-6)
    assert found.holds(0.6) is (lead <= 0.6)


def test_an_answer_that_failed_holds_nothing() -> None:
    from gpu_answers import Answer, compared

    found = compared("vp>sd", 3, "completion", own(("a", 1.0)), Answer(error="502: gone"))
    assert not found.holds(math.inf)
    assert found.error == "502: gone"


def test_two_engines_that_differ_alone_widen_the_bound() -> None:
    """To twice their difference, and never below what 16-bit pages move."""
    from agreement import NEAR_TIE_NATS
    from gpu_answers import bound_of

    one, other = own(("a", 1.0)), own(("a", 1.2))

    def given(answer: Any) -> dict[str, Any]:
        return dict.fromkeys((COMPLETIONS, CHAT_COMPLETIONS), answer)

    assert bound_of([{"vllm": given(one)}]) == NEAR_TIE_NATS
    both = [{"vllm": given(one), "sglang": given(other)}]
    assert bound_of(both) == pytest.approx(0.4)


def test_each_step_of_a_pair_has_its_verdict() -> None:
    from gpu_answers import Answer, compared
    from gpu_verdicts import Found

    found = Found()
    same = compared("vp>vd nixl", 3, "completion", own(("a", 1.0)), Answer("a"))
    found.texts = [same, compared("sp>sd nixl", 3, "chat", own(("a", 1.0)), Answer("b"))]
    found.bytes = {"vp>vd nixl": [], "sp>sd nixl": ["3 tokens: host_bytes 8, not 0"]}
    found.bits = [
        {"path": "vp>vd", "tokens": 65, "wrong": []},
        {"path": "vp>sd", "tokens": 65, "wrong": ["strays: [7] where [] was due"]},
    ]
    left = {"requests": 8, "left_early": 4, "handoffs_failed": 0, "same_processes": True}
    found.leavers = {"vp>vd": {**left, "held": {}, "compared": [same]}}
    found.leavers["sp>vd"] = {**found.leavers["vp>vd"], "held": {"sp waiters": 1}}
    found.killed = {
        "answers": {"vp>sd": "whole"},
        "meanwhile": "503: no prefill",
        "back_s": None,
        "decode_lives": True,
    }
    good = {name for name, (well, _) in found.verdicts().items() if well}
    assert good == {"vp>vd nixl, text", "vp>vd nixl, bytes", "vp>vd, bits", "vp>vd, leavers"}
    assert len(found.verdicts()) == 9
    page = "\n".join(found.table("tiny"))
    assert "| sp>sd nixl, bytes | NO | 3 tokens: host_bytes 8, not 0 |" in page
    assert "- sp>sd nixl, 3 tokens, chat: 'a' → 'b', 1.0 nats" in page


async def served(request: web.Request) -> web.StreamResponse:
    """As an engine does: " fine" by either route, whole or in two events; "break" breaks off."""
    body = await request.json()
    if body["model"] == "gone":
        error = {"error": {"message": "no such model", "code": "model"}}
        return web.json_response(error, status=404, headers={"x-pdctl-room": "7"})
    chat = request.path == CHAT_COMPLETIONS
    if not body.get("stream"):
        said = {"message": {"content": " fine"}} if chat else {"text": " fine"}
        return web.json_response({"choices": [said], "usage": {"prompt_tokens": 3}})
    response = web.StreamResponse(headers={"x-pdctl-path": "vp>vd"})
    await response.prepare(request)
    for part in (" fi", "ne"):
        said = {"delta": {"content": part}} if chat else {"text": part}
        await response.write(b"data: " + web.json_response({"choices": [said]}).body + b"\n\n")
    if body["model"] != "break":
        await response.write(b"data: [DONE]\n\n")
    return response


def test_answers_are_read_by_either_route_whole_and_streamed() -> None:
    """An error, and a stream that only ends, are answers with a cause."""
    from gpu_answers import End, answer, body_of, session

    async def asked() -> list[Any]:
        app = web.Application()
        app.add_routes([web.post(route, served) for route in (COMPLETIONS, CHAT_COMPLETIONS)])
        runner, port = web.AppRunner(app), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        found = []
        async with session() as http:
            for model in ("m", "break", "gone"):
                end = End(f"http://127.0.0.1:{port}", model, {})
                for route in (COMPLETIONS, CHAT_COMPLETIONS):
                    for stream in (False, True):
                        body = body_of(end, route, PROMPT, stream=stream)
                        found.append(await answer(http, end, route, body))
        await runner.cleanup()
        return found

    found = asyncio.run(asked())
    good, broken, gone = found[:4], found[4:8], found[8:]
    assert [(each.text, each.error) for each in good] == [(" fine", "")] * 4
    assert [each.prompt_tokens for each in good] == [3, 0, 3, 0]
    assert [each.error for each in broken[1::2]] == ["the stream ended before [DONE]"] * 2
    assert {(each.error, each.room) for each in gone} == {("404: no such model (model)", "7")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"gpu_bytes": 0, "host_bytes": 800}, ["host_bytes 800, not 0", "gpu_bytes 0, not 800"]),
        ({"imported_tokens": 256}, ["imported_tokens 256, not 260"]),
        ({"handoffs_completed": 3, "handoffs_failed": 1}, ["3 handoffs, 1 failed"]),
    ],
)
def test_bytes_are_due_in_one_memory_alone(change: dict[str, int], said: list[str]) -> None:
    """Of two answers by each of two routes; what a path gives no figure for is due nowhere."""
    from gpu_checks import misses

    from pdctl.runtime.bench.columns import Required
    from pdctl.runtime.bench.status import Moved

    whole = {"imported_tokens": 260, "host_bytes": 0, "gpu_bytes": 800, "foreign_handoffs": 0}
    whole |= {"handoffs_completed": 4, "handoffs_failed": 0, **change}
    wanted = [Required(imported_tokens=65, host_bytes=0, gpu_bytes=200)] * 2
    assert misses(Moved(**whole), wanted) == said
    unknown = [Required(imported_tokens=65, host_bytes=None, gpu_bytes=None)] * 2
    assert misses(Moved(**{**whole, "host_bytes": 7}), unknown) == [
        each for each in said if "bytes" not in each
    ]
