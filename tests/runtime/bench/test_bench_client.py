from __future__ import annotations

from collections.abc import Callable

import aiohttp
import anyio
import pytest
from runtime.bench.bench_router import FakeRouter

from pdctl.errors import PdctlError
from pdctl.runtime.bench.client import Ask, Client, Sample, error_text
from pdctl.runtime.bench.prompts import PromptSource

ASK = Ask(path="p0>d0", body={"prompt": "ba ke lo"})


@pytest.fixture
def router(prompts: PromptSource) -> FakeRouter:
    return FakeRouter(lambda text: len(prompts.ids(text)))


def ask(
    router: FakeRouter, *, timeout_s: float = 60.0, clock: Callable[[], float] | None = None
) -> Sample:
    async def run() -> Sample:
        async with router.serving() as url, aiohttp.ClientSession() as session:
            extra = {} if clock is None else {"clock": clock}
            return await Client(session, url, timeout_s=timeout_s, **extra).complete(ASK)

    return anyio.run(run)


def test_a_sample_has_the_text_the_usage_and_the_path_taken(router: FakeRouter) -> None:
    sample = ask(router)
    assert sample.ok
    assert (sample.text, sample.output_tokens, sample.finish_reason) == (
        "one two three",
        3,
        "length",
    )
    assert sample.prompt_tokens == router.tokens_of("ba ke lo")
    assert sample.path == "p0>d0"
    assert len(sample.itl_s) == 2
    assert sample.ttft_s is not None
    assert sample.ttft_s + sum(sample.itl_s) <= sample.e2el_s


def test_an_empty_first_chunk_is_not_the_first_token(router: FakeRouter) -> None:
    """U36: TTFT counts to the first chunk with text."""
    now = [0.0]
    router.empty_first = True
    router.before_text = lambda: now.__setitem__(0, 7.0)
    assert ask(router, clock=lambda: now[0]).ttft_s == 7.0


def test_tpot_is_the_rest_of_the_answer_over_its_other_tokens() -> None:
    sample = Sample(started_s=0.0, ttft_s=1.0, e2el_s=4.0, output_tokens=4)
    assert sample.tpot_s == 1.0
    assert Sample(started_s=0.0, ttft_s=1.0, e2el_s=1.0, output_tokens=1).tpot_s is None


def test_a_stream_that_ends_before_done_is_an_error(router: FakeRouter) -> None:
    """U29: the end of a stream is not the end of an answer."""
    router.end_early = True
    sample = ask(router)
    assert sample.error == "the stream ended before [DONE]"
    assert sample.text == "one two three"


def test_an_error_event_in_the_stream_is_an_error(router: FakeRouter) -> None:
    router.error_in_stream = "decode replica d0 went away"
    assert ask(router).error == "in the stream: decode replica d0 went away"


def test_an_answer_without_text_is_an_error(router: FakeRouter) -> None:
    router.words = ["", ""]
    assert ask(router).error == "the answer has no text"


def test_an_http_error_carries_the_routers_words(router: FakeRouter) -> None:
    """R63: an HTTP error is never success."""
    router.refuse["p0>d0"] = (502, {"error": {"message": "prefill died", "code": "peer_lost"}})
    sample = ask(router)
    assert (sample.status, sample.error) == (502, "502: prefill died (peer_lost)")


def test_a_silent_stream_ends_with_its_deadline(router: FakeRouter) -> None:
    async def run() -> Sample:
        router.stall_at = 1
        async with router.serving() as url, aiohttp.ClientSession() as session:
            return await Client(session, url, timeout_s=0.2).complete(ASK)

    assert anyio.run(run).error == "no answer within the deadline"


def test_a_router_that_is_gone_fails_the_sample_and_the_status() -> None:
    async def run() -> tuple[Sample, str]:
        async with aiohttp.ClientSession() as session:
            client = Client(session, "http://127.0.0.1:9", timeout_s=1.0)
            with pytest.raises(PdctlError) as caught:
                await client.status()
            return await client.complete(ASK), caught.value.message

    sample, message = anyio.run(run)
    assert sample.error is not None
    assert sample.error.startswith("connection: ")
    assert "does not answer at http://127.0.0.1:9/status" in message


def test_a_body_that_is_no_openai_error_is_shown_as_it_is() -> None:
    assert error_text(500, b"oops") == "500: oops"
    assert error_text(500, b"") == "500: empty answer"
    assert error_text(500, b'{"error": "text"}') == '500: {"error": "text"}'
