"""One request to a cluster of several engines, and what its answer must be."""

from __future__ import annotations

import httpx2 as httpx
from e2e.mixed import Mixed
from tiny import digits


def ask(cluster: Mixed, path: str, tokens: int, **body: object) -> httpx.Response:
    fresh = {"pdctl_cache": False, "cache_salt": f"{path} {tokens}", "max_tokens": 8}
    return cluster.completion(digits(tokens, 3), path, **{**fresh, **body})


def check_error(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert [word for word in words if word not in error["message"]] == [], error["message"]
    assert "Internal" not in error["message"]


def check_next_is_right(cluster: Mixed, path: str) -> None:
    """As what decode computes alone; where that is SGLang, which can't, as what MLX does."""
    cluster.wait("nothing in flight", cluster.idle, 10)
    prompt = {"tokens": 130, "cache_salt": "next"}
    decode = path.partition(">")[2]
    alone = ask(cluster, "md" if decode[0] == "s" else decode, **prompt)
    handed = ask(cluster, path, **prompt)
    assert (alone.status_code, handed.status_code) == (200, 200), handed.text
    text, expected = (answer.json()["choices"][0]["text"] for answer in (handed, alone))
    assert text.strip() == expected.strip()


def check_over_context(cluster: Mixed, path: str, context: int) -> None:
    """400 that names the parameter, and nothing begins. SGLang names none."""
    asked = ask(cluster, path, context + 50)
    chatted = cluster.chat(digits(context + 50, 3), path, max_tokens=8)
    for response, param in ((asked, "prompt"), (chatted, "messages")):
        check_error(response, 400, str(context))
        assert response.json()["error"]["param"] in (param, None if "s" in path else param)
    check_next_is_right(cluster, path)


def check_over_buffer(cluster: Mixed, path: str, buffer_tokens: int) -> None:
    """400 before prefill: the client's mistake, whichever engine says it."""
    prefill = path.partition(">")[0]
    before = cluster.computed_tokens(prefill)
    response = ask(cluster, path, buffer_tokens + 50)
    check_error(response, 400, f"{buffer_tokens + 50} tokens", prefill, str(buffer_tokens))
    assert response.json()["error"]["code"] == "over_budget"
    cluster.wait("nothing in flight", cluster.idle, 10)
    # where the other leg answers first, an order to release is a request of one token
    assert cluster.computed_tokens(prefill) - before <= 1
    check_next_is_right(cluster, path)


def check_failed_handoff(
    cluster: Mixed, path: str, fault: str, words: tuple[str, ...], *, began: bool, stream: bool
) -> None:
    """502 by leg, replica and cause; that request fails alone, and is counted where its handoff
    had begun."""
    pair = path.split(">")
    before = cluster.pair(*pair)
    with cluster.faults.of(fault):
        response = ask(cluster, path, 200, cache_salt=f"{fault} {stream}", stream=stream)
    check_error(response, 502, *words)
    assert response.json()["error"]["code"] == "handoff"
    assert response.headers["x-pdctl-path"] == path
    check_next_is_right(cluster, path)
    assert cluster.pair(*pair)["handoffs_failed"] == before["handoffs_failed"] + began


def check_wrong_kv_fails_up(cluster: Mixed, fault: str, pair: str) -> None:
    """An `up` on the running cluster that brings the pair's new end: exit 5, the pair is named,
    and the cluster is as it was.

    Args:
        pair: one of its replicas ends in 1, the one that is not there yet.
    """
    before = {replica["name"] for replica in cluster.status()["replicas"]}
    cluster.write(next(name for name in pair.split(">") if name[-1] == "1"))
    with cluster.faults.of(fault):
        done = cluster.pdctl("up", cluster.topology, "--detach", check=False)
    cluster.write()
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"{pair} failed its canary" in done.stderr
    assert "the KV cache is not its own" in done.stderr
    cluster.wait("every pair ready", cluster.ready)
    assert {replica["name"] for replica in cluster.status()["replicas"]} == before
