"""`policy = "prefix"` over two real MLX replicas: what their caches say they had."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
from runtime.router.cluster import MODEL
from runtime.router.engines import RealCluster, real_cluster

from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS
from pdctl.runtime.router.prompts import PromptReader

pytest.importorskip("mlx_lm")

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

DOCUMENTS = [tiny.digits(640, seed=seed) for seed in (1, 2)]
QUESTIONS = ("Who?", "When?", "Where?")


async def asked(c: RealCluster, document: str, question: str) -> tuple[str, dict[str, Any]]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{document} {question}"}],
        "max_tokens": 2,
    }
    async with c.http.post(c.url(CHAT_COMPLETIONS), json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-pdctl-path"], json.loads(await response.read())["usage"]


async def test_questions_follow_their_document() -> None:
    """U24: two documents asked three questions each in turn are computed once each, though by
    turns every other question would miss; the router counts the tokens that engines count."""
    async with real_cluster("o0 o1", policy="prefix") as c:
        reader = PromptReader(c.model)
        for round_, question in enumerate(QUESTIONS):
            paths = set()
            for document in DOCUMENTS:
                path, usage = await asked(c, document, question)
                paths.add(path)
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert (cached >= 640) == (round_ > 0), (path, usage)
                message = {"role": "user", "content": f"{document} {question}"}
                ids = reader.tokens(CHAT_COMPLETIONS, {"messages": [message]})
                assert ids is not None
                assert len(ids) == usage["prompt_tokens"]
            assert paths == {"o0", "o1"}
