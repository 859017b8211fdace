"""The order of a sweep: warm-ups, then rounds in which every column takes its turn.

In a round each column answers the same prompts, one column after the other (A B, A B, …), so
that drift of the machine meets all alike. A prompt is sent once per column and to no column
twice; `pdctl_cache` (and a salt, for engines that have one) keeps prefix caches out of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import anyio
import msgspec

from pdctl.errors import PdctlError
from pdctl.runtime.bench.client import Ask, Client, Sample
from pdctl.runtime.bench.columns import Column, required
from pdctl.runtime.bench.machine import Disturbance
from pdctl.runtime.bench.prompts import Prompt, PromptSource
from pdctl.runtime.bench.settings import Settings
from pdctl.runtime.bench.status import Moved, Status, as_required, moved, not_ready
from pdctl.runtime.bench.strangers import Stranger
from pdctl.topology.model import Engine

STEAL_BOUND = 0.05
"""Share of CPU time; a round with more in any of its turns is run again."""

MAX_REPEATS = 2
"""Times that one round is run again before it is kept and marked."""

Strangers = Callable[[Status], Awaitable[frozenset[Stranger]]]

_SETTLE_TRIES = 5
_SETTLE_S = 0.1


class Place(msgspec.Struct, frozen=True):
    """One row of the sweep."""

    input_len: int
    concurrency: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One column's part of one round: its samples, in the order of the round's prompts."""

    samples: tuple[Sample, ...]
    duration_s: float
    moved: Moved
    steal: float
    """Share of CPU time, 0 to 1."""
    load: float
    strangers: frozenset[Stranger] = frozenset()
    """Processes of others on the GPUs when it ended."""
    repeats: int = 0
    """How often the round was run before this one was kept."""


class Results:
    """What has been measured so far: whole rounds only, so every column of a place has as many.

    Written by the sweep, read by anybody afterwards, also when it was interrupted.
    """

    def __init__(
        self,
        *,
        done: Collection[Place] = (),
        finished: Callable[[Results, Place], None] = lambda results, place: None,
    ) -> None:
        """`done`: places that are not to be measured. `finished` is called on the event loop
        after the last round of each other; what it raises ends the sweep."""
        self.done = frozenset(done)
        self.finished = finished
        self.turns: dict[Place, dict[str, list[Turn]]] = {}
        self.status: Status | None = None
        self.interrupted = False

    def keep(self, place: Place, turns: Mapping[str, Turn]) -> None:
        cells = self.turns.setdefault(place, {})
        for path, turn in turns.items():
            cells.setdefault(path, []).append(turn)


class Observer(Protocol):
    """Told about progress, on the event loop; must not block."""

    def place(self, place: Place) -> None: ...

    def turn(self, place: Place, column: Column, stage: str) -> None:
        """Before each turn; `stage` reads "warm-up 1/2" or "round 3/5"."""
        ...

    def done(self, place: Place, column: Column) -> None:
        """After each turn."""
        ...

    def note(self, sentence: str) -> None: ...


async def nobody(status: Status) -> frozenset[Stranger]:
    """Where no GPU is watched."""
    return frozenset()


class Sweep:
    """One run over `settings`' lengths and concurrencies, on columns that were all ready.

    `page_bytes` None: bytes are not checked. `disturbance` is called before every turn,
    `strangers` after it. Who is on the GPUs from the beginning is marked, and no round is run
    again for it.
    """

    def __init__(
        self,
        client: Client,
        columns: Sequence[Column],
        settings: Settings,
        prompts: PromptSource,
        *,
        model: str,
        page_bytes: int | None,
        observer: Observer,
        disturbance: Callable[[], Disturbance] = Disturbance,
        strangers: Strangers = nobody,
    ) -> None:
        self._client = client
        self._columns = columns
        self._settings = settings
        self._prompts = prompts
        self._model = model
        self._page_bytes = page_bytes
        self._observer = observer
        self._disturbance = disturbance
        self._strangers = strangers
        self._residents: frozenset[Stranger] = frozenset()

    async def run(self, into: Results) -> None:
        """Measures every place into `into`.

        Raises PdctlError where the router is gone, a column is not ready, or a path refuses
        the requests (a 4xx in its warm-up); what was measured before stays in `into`.
        """
        into.status = await self._client.status()
        for column in self._columns:
            reason = not_ready(into.status, column)
            if reason is not None:
                raise PdctlError(reason, hint="see `pdctl ps` and `pdctl logs`")
        self._residents = await self._strangers(into.status)
        for concurrency in self._settings.concurrency:
            for input_len in self._settings.input_lens:
                place = Place(input_len, concurrency)
                if place not in into.done:
                    await self._place(place, into)
                    into.finished(into, place)

    async def _place(self, place: Place, into: Results) -> None:
        self._observer.place(place)
        for number in range(self._settings.num_warmups):
            stage = f"warm-up {number + 1}/{self._settings.num_warmups}"
            turns = await self._round(place, stage, f"warm-up/{number}")
            for path, turn in turns.items():
                _refuse_refused(path, turn)
        for number in range(self._settings.num_prompts):
            stage = f"round {number + 1}/{self._settings.num_prompts}"
            into.keep(place, await self._calm_round(place, stage, str(number)))

    async def _calm_round(self, place: Place, stage: str, key: str) -> dict[str, Turn]:
        for attempt in range(MAX_REPEATS + 1):
            turns = await self._round(place, stage, f"{key}/{attempt}", repeats=attempt)
            reason = self._disturbed(turns)
            if reason is None:
                break
            if attempt < MAX_REPEATS:
                self._observer.note(f"{stage} again: {reason} meanwhile")
        return turns

    def _disturbed(self, turns: Mapping[str, Turn]) -> str | None:
        stolen = max(turn.steal for turn in turns.values())
        if stolen > STEAL_BOUND:
            return f"{stolen:.0%} of the CPU time was stolen"
        newcomers = frozenset().union(*(t.strangers for t in turns.values())) - self._residents
        return f"{min(map(str, newcomers))} was on the GPU" if newcomers else None

    async def _round(
        self, place: Place, stage: str, key: str, *, repeats: int = 0
    ) -> dict[str, Turn]:
        prompts = [
            self._prompts.prompt(place.input_len, f"{place.concurrency}/{key}/{lane}")
            for lane in range(place.concurrency)
        ]
        turns: dict[str, Turn] = {}
        for column in self._columns:
            self._observer.turn(place, column, stage)
            salt = f"{place.input_len}/{place.concurrency}/{key}/{column.path}"
            turns[column.path] = await self._turn(column, prompts, salt, repeats)
            self._observer.done(place, column)
        return turns

    async def _turn(
        self, column: Column, prompts: Sequence[Prompt], salt: str, repeats: int
    ) -> Turn:
        before = await self._client.status()
        disturbance = self._disturbance()
        started = self._client.clock()
        samples = await self._together(column, prompts, salt)
        duration_s = self._client.clock() - started
        steal, load = disturbance.steal(), disturbance.load()
        return Turn(
            samples=samples,
            duration_s=duration_s,
            moved=await self._settled(before, column, prompts, samples),
            steal=steal,
            load=load,
            strangers=await self._strangers(before),
            repeats=repeats,
        )

    async def _together(
        self, column: Column, prompts: Sequence[Prompt], salt: str
    ) -> tuple[Sample, ...]:
        samples: dict[int, Sample] = {}

        async def lane(number: int, prompt: Prompt) -> None:
            body = request_body(
                self._model, column, prompt, self._settings.output_len, f"{salt}/{number}"
            )
            samples[number] = await self._client.complete(Ask(path=column.path, body=body))

        async with anyio.create_task_group() as lanes:
            for number, prompt in enumerate(prompts):
                lanes.start_soon(lane, number, prompt)
        return tuple(samples[number] for number in range(len(prompts)))

    async def _settled(
        self,
        before: Status,
        column: Column,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
    ) -> Moved:
        """What moved, asked again for a moment where the counters still lag the answers."""
        need = required(column, prompts[0].tokens, self._page_bytes)
        for _ in range(_SETTLE_TRIES):
            change = moved(before, await self._client.status(), column)
            if as_required(change, need, len(samples)) or not all(s.ok for s in samples):
                break
            await anyio.sleep(_SETTLE_S)
        return change


def request_body(
    model: str, column: Column, prompt: Prompt, output_len: int, salt: str
) -> dict[str, Any]:
    """Greedy, streaming, with usage, and outside every prefix cache."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "pdctl_cache": False,
    }
    if column.ignores_eos:
        body["ignore_eos"] = True
    if any(engine is not Engine.MLX for engine in column.engines):
        body["cache_salt"] = salt
    return body


def _refuse_refused(path: str, turn: Turn) -> None:
    for sample in turn.samples:
        if sample.error is not None and sample.status is not None and 400 <= sample.status < 500:
            raise PdctlError(f'path "{path}" refuses the requests: {sample.error}')
