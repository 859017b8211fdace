"""Whether decode holds, bit for bit, what prefill computed, and touched nothing else.

Both engines' own memory is written down from inside their processes (`tests/engine/witness.py`),
and all of decode's from before the first page is compared with that after the last
(`tests/inside/broken.py`, "audit").
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from gpu_answers import End, answer, body_of
from gpu_cluster import LETTERS

from pdctl.runtime.bench.prompts import Prompt
from pdctl.runtime.router.endpoints import COMPLETIONS
from pdctl.topology.model import PAGE_TOKENS, Engine

# `gpu_answers` has put the tests into the path
from engine import witness  # isort: skip
from engine.faults import Faults  # isort: skip
from engine.memory import same_bits, tokens_of  # isort: skip

UNREAD = "what it holds was not seen"


class Watch:
    """A folder that the replicas of a cluster look at; one request at a time."""

    def __init__(self, folder: Path, *, on_gpu: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._on_gpu = folder, on_gpu
        self._faults = Faults(folder)

    @property
    def environment(self) -> Mapping[str, str]:
        """Of every replica."""
        return {**self._faults.environment, **witness.environment(self._folder)}

    async def handed_over(
        self, http: aiohttp.ClientSession, end: End, path: str, prompt: Prompt
    ) -> dict[str, Any]:
        """What became of one prompt on that path; `wrong` says what is not as it must be."""
        salt = {"pdctl_cache": False, "cache_salt": f"bits/{path}/{prompt.text}"}
        body = body_of(end, COMPLETIONS, prompt, max_tokens=2, **salt)
        self._faults.forget()
        with witness.watched(self._folder), self._faults.of("audit"):
            given = await answer(http, end.pinned(path), COMPLETIONS, body)
        try:
            if given.error:
                raise ValueError(given.error)
            return await asyncio.to_thread(self._looked_at, path, int(given.room), prompt.tokens)
        # an engine's memory that can't be read is a finding; the other checks go on
        except (AssertionError, ValueError, OSError) as error:
            said = f"{UNREAD}: {error!r}"
            return {"path": path, "tokens": prompt.tokens, "wrong": [said]}

    def _looked_at(self, path: str, room: int, tokens: int) -> dict[str, Any]:
        computed, imported = (
            tokens_of(
                witness.read(self._folder, room, name),
                Engine(LETTERS[name[0]]),
                tokens,
                on_gpu=self._on_gpu,
            )
            for name in path.split(">")
        )
        recomputes = path.partition(">")[2].startswith("v")
        count = tokens - recomputes
        sent = computed[:, :, :count].astype(np.float16).astype(imported.dtype)
        wrong = [] if same_bits(imported[:, :, :count], sent) else ["other bits"]
        audited = self._faults.audited()
        wanted = {"blocks": -(-count // PAGE_TOKENS), "filled": count, "strays": []}
        wrong += [
            f"{name}: {audited[name]} where {each} was due"
            for name, each in wanted.items()
            if audited[name] != each
        ]
        found = {"path": path, "tokens": tokens, "positions": count, "blocks": audited["blocks"]}
        return {**found, "dtype": str(imported.dtype), "wrong": wrong}
