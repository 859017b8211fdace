"""Requests with one prefix, over replicas that could each take them."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest
from runtime.router.cluster import PATIENCE_S, Cluster, cluster, eventually
from runtime.router.fakes import stalls_then
from tiny import make_checkpoint

from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS
from pdctl.runtime.router.prompts import PromptReader
from pdctl.topology.model import Disaggregate

pytestmark = pytest.mark.anyio

DOCUMENT = "the quick brown fox jumps over the lazy dog " * 20
OTHER = "a page of another book altogether, as long as that " * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


def asks(document: str, question: str = "", **fields: object) -> dict[str, object]:
    content = f"{document}\n{question}"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


async def path_of(c: Cluster, body: dict[str, object], **headers: str) -> str:
    answer = await c.ask(body, **headers)
    assert answer.status == 200, await answer.text()
    return answer.headers["x-pdctl-path"]


async def test_a_documents_next_question_follows_it(checkpoint: Path) -> None:
    """U24: keys are of the templated prompt; another document goes elsewhere."""
    async with cluster("o0 o1 o2", policy="prefix", model_dir=checkpoint) as c:
        first = await path_of(c, asks(DOCUMENT, "who?"))
        other = await path_of(c, asks(OTHER, "who?"))
        assert other != first
        for question in ("when?", "where?", "why?"):
            assert await path_of(c, asks(DOCUMENT, question)) == first
            assert await path_of(c, asks(OTHER, question)) == other


async def test_auto_goes_by_the_tokens_that_were_read(checkpoint: Path) -> None:
    """Not by the prompt's bytes, where the policy has rendered and encoded it."""
    body = asks(DOCUMENT, "who?")
    ids = PromptReader(checkpoint).tokens(CHAT_COMPLETIONS, body)
    assert ids is not None
    auto = {"disaggregate": Disaggregate.AUTO, "policy": "prefix", "model_dir": checkpoint}
    async with cluster("o0 o1", **auto) as c:
        await path_of(c, body)
        status = await (await c.http.get(c.url("/status"))).json()
        assert status["decisions"]["latest"][0]["prompt_tokens"] == len(ids)


async def test_what_another_computed_under_a_salt_is_not_near(checkpoint: Path) -> None:
    """R48: a salt has keys of its own: its first request goes round, its next one follows it."""
    async with cluster("o0 o1", policy="prefix", model_dir=checkpoint) as c:
        first = await path_of(c, asks(DOCUMENT, "who?"))
        salted = await path_of(c, asks(DOCUMENT, "who?", cache_salt="mine"))
        assert salted != first
        assert await path_of(c, asks(DOCUMENT, "why?", cache_salt="mine")) == salted
        assert await path_of(c, asks(DOCUMENT, "why?")) == first


async def test_waiting_at_the_holder_is_weighed(checkpoint: Path) -> None:
    """Requests that run where the document is send the next one elsewhere, not at once."""
    async with cluster("o0 o1", policy="prefix", model_dir=checkpoint) as c:
        first = await path_of(c, asks(DOCUMENT, "who?"))
        for engine in c.engines.values():
            engine.on["alone"] = stalls_then()
        running, there = [], []
        for number in range(16):
            running.append(asyncio.create_task(c.ask(asks(DOCUMENT, str(number)))))
            await eventually(lambda n=number: sum(e.open for e in c.engines.values()) == n + 1)
            there.append(c.engines[first].open)
        assert there[1] == 2
        assert there[-1] < 16
        for engine in c.engines.values():
            engine.release.set()
        answers = await asyncio.gather(*running)
        assert {answer.status for answer in answers} == {200}


async def test_a_restarted_replica_is_no_nearer_than_another(checkpoint: Path) -> None:
    async with cluster("o0 o1", policy="prefix", model_dir=checkpoint) as c:
        assert await path_of(c, asks(DOCUMENT, "who?")) == "o0"
        c["o0"].incarnation += 1
        c.keeper.push()
        await eventually(lambda: c.router.roster.seat("o0").state.incarnation == 2)
        await c.ready("o0", "o1")
        assert await path_of(c, asks(DOCUMENT, "who?")) == "o1"


async def test_pairs_go_by_their_prefill(checkpoint: Path) -> None:
    """Fake engines say they are MLX's, whose handoffs leave nothing behind: they go round."""
    async with cluster("p0 p1 d0", policy="prefix", model_dir=checkpoint) as c:
        paths = [await path_of(c, asks(DOCUMENT, "who?")) for _ in range(4)]
        assert set(paths) == {"p0>d0", "p1>d0"}


async def test_a_prefill_whose_host_has_a_store_keeps_what_it_computed(checkpoint: Path) -> None:
    """There a document's next question follows it, to whichever decode replica."""
    async with cluster("p0 p1 d0", policy="prefix", model_dir=checkpoint, shares=True) as c:
        paths = [await path_of(c, asks(DOCUMENT, question)) for question in ("who?", "why?", "?")]
        assert len(set(paths)) == 1


async def test_without_a_tokenizer_load_decides_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="pdctl.router"):
        async with cluster("o0 o1", policy="prefix") as c:
            paths = [await path_of(c, asks(DOCUMENT, "who?")) for _ in range(4)]
    assert set(paths) == {"o0", "o1"}
    assert sum("routed by load" in record.message for record in caplog.records) == 1


async def test_a_pin_is_obeyed(checkpoint: Path) -> None:
    async with cluster("o0 o1", policy="prefix", model_dir=checkpoint) as c:
        first = await path_of(c, asks(DOCUMENT, "who?"))
        away = "o1" if first == "o0" else "o0"
        assert await path_of(c, asks(DOCUMENT, "who?"), x_pdctl_path=away) == away


@pytest.mark.parametrize(("names", "pin"), [("p0 d0", None), ("o0 o1", "o0")])
async def test_engines_do_not_wait_for_a_prompt_to_be_read_where_there_is_no_choice(
    names: str, pin: str | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pair alone, and a pinned path: the engines have the request before the router knows
    its pages."""
    asked, reading = threading.Event(), PromptReader.tokens

    def tokens(reader: PromptReader, endpoint: str, body: dict[str, object]) -> list[int] | None:
        assert asked.wait(PATIENCE_S)
        return reading(reader, endpoint, body)

    monkeypatch.setattr(PromptReader, "tokens", tokens)
    async with cluster(names, policy="prefix", model_dir=checkpoint) as c:
        headers = {} if pin is None else {"x_pdctl_path": pin}
        running = asyncio.create_task(c.ask(asks(DOCUMENT, "who?"), **headers))
        first, *_ = c.engines.values()
        await eventually(lambda: bool(first.bodies))
        asked.set()
        assert (await running).status == 200


async def test_what_was_pinned_is_remembered(checkpoint: Path) -> None:
    """Its document's next question follows it, though its pages were read beside it."""
    async with cluster("o0 o1 o2", policy="prefix", model_dir=checkpoint) as c:
        for away in ("o1", "o2"):
            document = f"{away} {DOCUMENT}"
            assert await path_of(c, asks(document, "who?"), x_pdctl_path=away) == away
            for question in ("when?", "where?"):
                assert await path_of(c, asks(document, question)) == away
