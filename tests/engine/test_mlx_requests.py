"""What clients ask of an MLX replica beside a plain answer, and what it refuses."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import Trio
from engines.replicas import SPEC, Pair, Process, read_events, text_of
from tiny import chat_overhead_tokens, digits, make_tokenizer

from pdctl.topology.model import Role

pytestmark = pytest.mark.engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "pdctl_cache": False, **fields}


def test_a_prompt_of_one_token_needs_no_page(llama: Trio) -> None:
    """R27: zero positions travel, and both engines go on."""
    alone = llama.alone.post(COMPLETIONS, ask("7"))
    (prefilled, _), decoded = llama.pair.post(COMPLETIONS, ask("7"))
    assert (prefilled, decoded[0]) == (200, 200)
    assert decoded[1]["choices"][0]["text"] == alone[1]["choices"][0]["text"]
    assert llama.pair.post(COMPLETIONS, ask("77"))[1][0] == 200


def test_a_prompt_over_the_context_is_refused(llama: Trio) -> None:
    """U18: on both legs alike, before anything is computed."""
    for status, answer in llama.pair.post(COMPLETIONS, ask(digits(2049))):
        assert status == 400
        assert "2049 tokens" in answer["error"]["message"]
        assert answer["error"]["param"] == "prompt"


def test_generation_ends_with_the_context(llama: Trio) -> None:
    """2044 tokens leave room for four."""
    _, answer = llama.alone.post(COMPLETIONS, ask(digits(2044), max_tokens=50))
    assert answer["usage"]["completion_tokens"] <= 4


def test_a_leg_for_somebody_else_is_refused(llama: Trio) -> None:
    """A replica is prefill or decode by its own name, and nothing else."""
    body = SPEC.decode_body(ask(digits(10)), llama.pair.leg())
    status, answer = llama.alone.post(COMPLETIONS, body)
    assert status == 400
    assert answer["error"]["param"] == "pdctl"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"draft_model": "x"}, "draft_model"),
        ({"adapters": "x"}, "adapters"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"99999": 1.0}}, "logit_bias"),
        ({"prompt": [5, 99999]}, "prompt"),
        ({"pdctl": {"room": 1}}, "pdctl"),
        ({"pdctl_cache": 3}, "pdctl_cache"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    llama: Trio, fields: dict[str, Any], parameter: str
) -> None:
    """R66: nothing of the stock server's other paths is taken silently."""
    status, answer = llama.alone.post(COMPLETIONS, {**ask("12"), **fields})
    assert status == 400
    assert answer["error"]["param"] == parameter
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 3},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"prompt": {"a": 1}},
        {"logit_bias": {"x": 1}},
    ],
)
def test_a_wrong_value_is_a_400_on_every_version(llama: Trio, fields: dict[str, Any]) -> None:
    """0.31.3 by itself would end the connection without an answer, or its only thread."""
    status, answer = llama.alone.post(COMPLETIONS, {**ask("12"), **fields})
    assert status == 400
    assert answer["error"]
    assert llama.alone.post(COMPLETIONS, ask("12"))[0] == 200


def test_a_sampler_that_fails_ends_its_own_request_only(llama: Trio) -> None:
    """R34: top_k over the vocabulary raises inside the batch."""
    answers: dict[str, Any] = {}

    def run(name: str, body: dict[str, Any]) -> None:
        answers[name] = llama.alone.post(COMPLETIONS, body)

    long = ask(digits(20), max_tokens=60)
    reference = llama.alone.post(COMPLETIONS, long)
    bad = ask(digits(30), temperature=1.0, top_k=1 << 20)
    threads = [threading.Thread(target=run, args=item) for item in (("good", long), ("bad", bad))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["bad"][0] == 500
    assert "top_k" in answers["bad"][1]["error"]["message"]
    assert text_of(answers["good"][1]) == text_of(reference[1])


def test_a_seed_is_honoured_in_company(llama: Trio) -> None:
    """The stock server drains its batch for a seed; here a row has its own draws."""
    body = ask(digits(40), temperature=1.0, seed=11, max_tokens=20)
    alone = text_of(llama.alone.post(COMPLETIONS, body)[1])
    beside = llama.alone.send(COMPLETIONS, ask(digits(25), temperature=1.0, max_tokens=40))
    assert text_of(llama.alone.post(COMPLETIONS, body)[1]) == alone
    assert beside.getresponse().status == 200
    beside.close()
    (_, _), (_, through_pair) = llama.pair.post(COMPLETIONS, body)
    assert text_of(through_pair) == alone
    assert text_of(llama.alone.post(COMPLETIONS, {**body, "seed": 12})[1]) != alone


def test_logits_processors_beside_plain_requests(llama: Trio) -> None:
    """0.31.3 misplaces a batch's processors when some requests have none."""
    plain, biased = ask(digits(30), max_tokens=40), ask(digits(31), logit_bias={"20": 100.0})
    want = text_of(llama.alone.post(COMPLETIONS, plain)[1])
    first = llama.alone.send(COMPLETIONS, plain)
    _, answer = llama.alone.post(COMPLETIONS, biased)
    assert len(set(text_of(answer))) == 1
    assert text_of(json.loads(first.getresponse().read())) == want
    first.close()


def test_token_ids_are_a_prompt_too(llama: Trio) -> None:
    """A bench can ask for an exact number of tokens."""
    ids = [13 + i % 10 for i in range(70)]
    _, alone = llama.alone.post(COMPLETIONS, ask(ids))
    assert alone["usage"]["prompt_tokens"] == 70
    (_, _), (_, answer) = llama.pair.post(COMPLETIONS, ask(ids))
    assert text_of(answer) == text_of(alone)


def test_stop_strings_logprobs_and_usage_are_the_librarys(llama: Trio) -> None:
    """The decode engine formats what the user sees, the same through a pair."""
    body = ask(digits(60), logprobs=True, top_logprobs=2, max_tokens=6)
    _, alone = llama.alone.post(COMPLETIONS, body)
    (_, _), (_, answer) = llama.pair.post(COMPLETIONS, body)
    tokens = [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert tokens == [entry["id"] for entry in alone["choices"][0]["logprobs"]["content"]]
    tokenizer = make_tokenizer()
    words = [tokenizer.decode([token]) for token in tokens[1:]]
    word = next(w for w, t in zip(words, tokens[1:], strict=True) if tokenizer.encode(w).ids == [t])
    stopped = ask(digits(60), max_tokens=30, stop=[word])
    (_, _), (_, cut) = llama.pair.post(COMPLETIONS, stopped)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert word not in text_of(cut)
    events = llama.pair.events(
        COMPLETIONS, {**ask(digits(60)), "stream_options": {"include_usage": True}}
    )
    assert events[-1]["usage"]["prompt_tokens"] == 60


def test_null_fields_and_empty_stream_options_stand_for_defaults(llama: Trio) -> None:
    """What OpenAI's clients send for "not set"."""
    body = ask(digits(9), stop=None, seed=None, top_p=None, max_completion_tokens=None)
    assert llama.alone.post(COMPLETIONS, body)[0] == 200
    assert llama.alone.events(COMPLETIONS, {**body, "stream_options": {}})


def test_the_prompt_cache_serves_ordinary_requests_only(llama: Trio) -> None:
    """A repeat is a hit that still leaves one token to compute; handoffs neither read nor
    write it, so that they always import n - 1."""
    prompt = digits(100, seed=9)
    shared = {**ask(prompt), "pdctl_cache": True}
    cached = [llama.alone.post(COMPLETIONS, shared)[1] for _ in range(2)]
    assert [c["usage"]["prompt_tokens_details"]["cached_tokens"] for c in cached] == [0, 99]
    assert text_of(cached[0]) == text_of(cached[1])
    for _ in range(2):
        _, (_, answer) = llama.pair.post(COMPLETIONS, ask(prompt))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
    _, decode_alone = llama.pair.decode.post(COMPLETIONS, shared)
    assert decode_alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_chat_templates_are_rendered_alike(llama: Trio) -> None:
    """The number of tokens is what the template adds."""
    messages = [{"role": "user", "content": digits(20)}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    _, answer = llama.alone.post(CHAT, body)
    assert answer["usage"]["prompt_tokens"] == 20 + chat_overhead_tokens()


def test_models_and_health_answer(llama: Trio) -> None:
    """Without a hub's cache to look through."""
    for path, word in (("/v1/models", str(llama.model_dir)), ("/health", "ok")):
        assert word in get(llama.alone, path)


def get(process: Process, path: str) -> str:
    connection = HTTPConnection("127.0.0.1", process.http_port, timeout=10)
    connection.request("GET", path)
    try:
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_sixteen_streams_at_once_are_each_right(llama: Trio) -> None:
    """Every client fits the backlog, and a batch changes nobody's text."""
    prompts = [digits(40 + i, seed=i) for i in range(16)]
    wanted = [text_of(llama.alone.post(COMPLETIONS, ask(p))[1]) for p in prompts]
    found: dict[int, str] = {}

    def run(index: int) -> None:
        events = llama.pair.events(COMPLETIONS, ask(prompts[index]))
        found[index] = "".join(map(text_of, events))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = [found[i] == wanted[i] for i in range(16)]
    # a batch's kernels may flip a near-tie; most must be equal, all must be answers
    assert sum(same) >= 14


def test_a_long_prompt_does_not_stall_a_running_stream(llama: Trio) -> None:
    """U28: between two chunks of a 1,900-token prompt everyone else gets a token."""
    connection, response = llama.alone.open(
        COMPLETIONS, ask(digits(20), max_tokens=1500, stream=True)
    )
    running = read_events(response)
    next(running)
    counted = 0
    other = llama.alone.send(COMPLETIONS, ask(digits(1900), max_tokens=1))
    done = threading.Event()

    def finish() -> None:
        other.getresponse().read()
        done.set()

    waiting = threading.Thread(target=finish)
    waiting.start()
    while not done.is_set():
        next(running)
        counted += 1
    waiting.join()
    other.close()
    response.close()
    connection.close()
    # 1,899 positions in chunks of 256, and a decode step before each
    assert counted >= 7


def test_prompts_computed_together_export_their_own_positions(folder: Path, llama: Trio) -> None:
    """prompt_concurrency pads a batch; 0.31.3 also changes its dtype as prompts join."""
    with Process(
        folder, "p2", Role.PREFILL, llama.model_dir, llama.contract, prompt_concurrency=4
    ) as prefill:
        pair = Pair(prefill, llama.pair.decode)
        prompts = [digits(n, seed=n) for n in (700, 90, 300, 129)]
        wanted = [text_of(llama.alone.post(COMPLETIONS, ask(p))[1]) for p in prompts]
        found: dict[str, str] = {}

        def run(prompt: str) -> None:
            found[prompt] = text_of(pair.post(COMPLETIONS, ask(prompt))[1][1])

        threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[prompt] for prompt in prompts] == wanted
