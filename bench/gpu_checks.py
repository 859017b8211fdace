"""Whether pages between devices are right: text, bytes, bits, leavers, and a prefill that dies.

Two clusters of vLLM's and SGLang's own NIXL handoff, one of pdctl's pairs of both engines over
NIXL, and each engine's own server without any connector, which says what is right.

    text     chat and completions, streamed and whole, of every length on every pair, beside what
             the prefill engine answers alone; each difference with the lead, in nats, that the
             engine alone gave its own token. One of more than twice what the log probabilities of
             the two engines' own servers differ is a fault
    bytes    a pair moved its prompts' pages in the devices' memory, and none in the host's
    bits     decode's memory after a handoff is prefill's, at lengths that fill their blocks and
             that take one more; no other token of it changed
    leavers  half of the clients leave at random moments: the others' text is right, nothing is
             held after it, no handoff failed, no process is another
    killed   prefill replicas die while answers are written: those become whole, decode lives on,
             and hands over with what comes instead

Exit status 1 where something is wrong, or was left out.

    python bench/gpu_checks.py --vllm-python PYTHON --sglang-python PYTHON --tokenizer CHECKPOINT
    python bench/gpu_checks.py --devices 0,1 --shapes 7b --steps text,bits ...
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
from gpu_answers import ROUTES, End, Owns, four, owns_of, session
from gpu_bits import UNREAD, Watch
from gpu_budget import Budget
from gpu_cluster import LETTERS, Fleet, System, fleet, members
from gpu_crowd import POLL_S, Known, Watched, killed, leaving
from gpu_engines import ordinary
from gpu_options import UP_SHARE, parser_of, run, site_of, split
from gpu_report import closing, write
from gpu_verdicts import Found

from pdctl.runtime.bench.columns import Column, Required, columns, required
from pdctl.runtime.bench.prompts import Prompt, PromptSource
from pdctl.runtime.bench.status import Moved, moved

STEPS = ("text", "bits", "leavers", "killed")
BIT_LENS = (65, 66, 129, 130, 193, 194)
CROWD_LENS = (193, 744, 2844)
CROWD_PROMPTS = 12
TOLD_S = 5.0
"""After an answer, until its bytes are counted."""
RUN = os.getpid()


def systems(
    engines: Sequence[str], names: Sequence[str], env: Mapping[str, str]
) -> Iterator[System]:
    """`env`: of the replicas whose handoff is pdctl's."""
    if "nixl" in names:
        both = members(" ".join(f"{e[0]}p {e[0]}d" for e in engines))
        watched = tuple(replace(each, env=env) for each in both)
        yield System(f"nixl-{RUN}", watched, transport="nixl")
    if "native" in names:
        for engine in engines:
            pair = members(f"{engine[0]}p {engine[0]}d")
            yield System(f"native-{engine}-{RUN}", pair, transport="native")


def misses(change: Moved, wanted: Sequence[Required]) -> list[str]:
    """What two answers by each route did not move as they had to."""
    found = [
        f"{what} {got}, not {due}"
        for what in ("imported_tokens", "host_bytes", "gpu_bytes")
        if all(getattr(one, what) is not None for one in wanted)
        and (due := 2 * sum(getattr(one, what) for one in wanted)) != (got := getattr(change, what))
    ]
    if change.handoffs_completed != 2 * len(wanted) or change.handoffs_failed:
        found.append(f"{change.handoffs_completed} handoffs, {change.handoffs_failed} failed")
    return found


class Checks:
    """One shape's."""

    def __init__(self, options: argparse.Namespace, budget: Budget, shape: str, logs: Path) -> None:
        self._options, self._budget, self._shape = options, budget, shape
        self._site = site_of(options, shape, logs)
        self._source = PromptSource.of_checkpoint(self._site.model, seed=0)
        on_gpu = options.device == "cuda"
        self._watch = Watch(logs / "watched", on_gpu=on_gpu) if "bits" in options.steps else None
        self.found = Found()
        self.up_s = 0.0
        self.failed: dict[str, str] = {}

    def measure(self) -> None:
        options, budget = self._options, self._budget
        env = {} if self._watch is None else self._watch.environment
        wanted = list(systems(options.engines, options.systems, env))
        beside = [ordinary(self._site, engine) for engine in options.engines]
        with fleet(self._site, wanted, beside, budget.left_s * UP_SHARE) as started:
            self.up_s, self.failed = round(started.up_s, 1), started.failed
            try:
                asyncio.run(self._checked(started))
            finally:
                self.write()

    async def _checked(self, started: Fleet) -> None:
        async with session() as http:
            owns = {e: End.of(s) for e, s in started.servers.items()}
            asked = {
                column: Watched(http, target)
                for target in started.targets.values()
                for column in columns(target.plan)
                if column.is_pair
            }
            pdctls = {c: w for c, w in asked.items() if c.transport != "native"}
            if "text" in self._options.steps:
                await self._text(http, owns, asked)
            if "bits" in self._options.steps:
                await self._bits(http, pdctls)
            if "leavers" in self._options.steps:
                await self._leavers(http, owns, pdctls)
            if "killed" in self._options.steps and pdctls:
                await self._killed(http, owns, pdctls)
            for column, watched in asked.items():
                if held := await watched.left():
                    self.found.held[column.path] = held

    async def _text(
        self, http: aiohttp.ClientSession, owns: dict[str, End], asked: dict[Column, Watched]
    ) -> None:
        for tokens in self._options.lens:
            if not self._budget.allows(f"text at {tokens} tokens", 3.0):
                continue
            prompt = self._source.prompt(tokens, f"text/{time.time_ns()}")
            own = await owns_of(http, owns, prompt)
            self.found.owns.append(own)
            async with asyncio.TaskGroup() as group:
                for column, watched in asked.items():
                    group.create_task(self._one(http, column, watched, prompt, own))
            print(f"text at {tokens} tokens, {self._budget.left_s:.0f} s left", flush=True)

    async def _one(
        self,
        http: aiohttp.ClientSession,
        column: Column,
        watched: Watched,
        prompt: Prompt,
        own: Owns,
    ) -> None:
        engine = LETTERS[column.path[0]]
        path = column.path
        before = await watched.status()
        found, counts = await four(http, watched.end, path, prompt, own[engine])
        wanted = [required(column, counts[route], self._site.page_bytes) for route in ROUTES]
        until_s = time.monotonic() + TOLD_S
        while wrong := misses(moved(before, await watched.status(), column), wanted):
            if time.monotonic() > until_s:
                break
            await asyncio.sleep(POLL_S)
        name = f"{path} {column.transport}"
        self.found.texts += [each._replace(path=name) for each in found]
        said = [f"{prompt.tokens} tokens: {each}" for each in wrong]
        self.found.bytes.setdefault(name, []).extend(said)

    async def _bits(self, http: aiohttp.ClientSession, asked: dict[Column, Watched]) -> None:
        assert self._watch is not None
        unread: set[str] = set()
        for tokens, (column, watched) in itertools.product(BIT_LENS, asked.items()):
            if column.path not in unread and self._budget.allows(
                f"bits at {tokens} tokens, {column.path}", 2.0
            ):
                prompt = self._source.prompt(tokens, f"bits/{column.path}/{time.time_ns()}")
                await watched.left()
                found = await self._watch.handed_over(http, watched.end, column.path, prompt)
                self.found.bits.append(found)
                if found["wrong"]:
                    unread |= {column.path for each in found["wrong"] if each.startswith(UNREAD)}
                    print(f"bits: {found}", flush=True)

    async def _known(self, http: aiohttp.ClientSession, owns: dict[str, End]) -> list[Known]:
        lens = [n for n in self._options.lens if n in CROWD_LENS] or self._options.lens
        found = []
        for number in range(CROWD_PROMPTS):
            tokens = lens[number % len(lens)]
            prompt = self._source.prompt(tokens, f"crowd/{number}/{time.time_ns()}")
            own = await owns_of(http, owns, prompt)
            self.found.owns.append(own)
            found.append(Known(prompt, own))
        return found

    async def _leavers(
        self, http: aiohttp.ClientSession, owns: dict[str, End], asked: dict[Column, Watched]
    ) -> None:
        known = await self._known(http, owns)
        spent_s = 0.0
        for column, watched in asked.items():
            if not self._budget.allows(f"leavers, {column.path}", spent_s):
                continue
            self.found.leavers[column.path] = found = await leaving(
                *(http, watched, column.path, known, LETTERS[column.path[0]]),
                requests=self._options.requests,
                clients=self._options.clients,
            )
            spent_s = found["took_s"]
            print(f"leavers, {column.path}: {spent_s} s, held {found['held']}", flush=True)

    async def _killed(
        self, http: aiohttp.ClientSession, owns: dict[str, End], asked: dict[Column, Watched]
    ) -> None:
        """The pairs of two engines, so that each prefill and each decode has its part."""
        cross = [c for c in asked if c.path[0] != c.decode[0]] or list(asked)
        watched = asked[cross[0]]
        if not self._budget.allows("killed prefill replicas", self._options.back_s):
            return
        prompt = self._source.prompt(193, f"killed/{time.time_ns()}")
        self.found.killed = await killed(http, watched, [c.path for c in cross], prompt)
        print(f"killed: {self.found.killed}", flush=True)
        if self.found.killed["back_s"] is not None:
            own = await owns_of(http, owns, prompt)
            for column, each in asked.items():
                found, _ = await four(
                    http, each.end, column.path, prompt, own[LETTERS[column.path[0]]]
                )
                self.found.texts += [one._replace(path=f"{column.path} again") for one in found]

    @property
    def complete(self) -> bool:
        found = self.found
        seen = {"text": found.texts, "bits": found.bits, "leavers": found.leavers}
        seen["killed"] = found.killed
        return not self.failed and all(seen[step] for step in self._options.steps)

    @property
    def good(self) -> bool:
        return self.complete and all(ok for ok, _ in self.found.verdicts().values())

    def write(self) -> None:
        found = self.found
        measured = {
            "up_s": self.up_s,
            **found.written(),
            "left_out": self._budget.left_out,
            "failed": self.failed,
        }
        lines = [*found.table(self._shape), *closing(self._budget.left_out, self.failed)]
        write("gpu_checks", self._shape, __doc__ or "", self._options, measured, lines)
        print("\n".join(lines), flush=True)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    lens = "51,64,65,66,128,129,130,193,744,2844,8000"
    parser = parser_of(__doc__ or "", engines="vllm,sglang", lens=lens, context_length=8192)
    parser.add_argument("--systems", default="nixl,native")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--requests", type=int, default=300, help="of each pair, with leavers")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--back-s", type=float, default=60.0, help="a replica's start takes")
    options = split(parser, words)
    options.systems, options.steps = options.systems.split(","), options.steps.split(",")
    return options


def main() -> int:
    options = parsed()
    good = True
    with run(options) as (budget, logs):
        for shape in options.shapes:
            checks = Checks(options, budget, shape, logs / shape)
            checks.measure()
            good &= checks.good
        good &= not budget.left_out
    print("all is well" if good else "not all is well")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
