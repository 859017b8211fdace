from __future__ import annotations

import io
import os
import signal
from typing import Any

import aiohttp
import anyio
import pytest
from rich.console import Console
from runtime.bench.bench_router import CONTEXT, PAGE_BYTES, FakeRouter, plan, topology

from pdctl.errors import PdctlError, UsageError
from pdctl.runtime.bench.client import Client
from pdctl.runtime.bench.columns import Column, columns
from pdctl.runtime.bench.machine import Disturbance
from pdctl.runtime.bench.measure import MAX_REPEATS, Place, Results, Strangers, Sweep, nobody
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.session import sweep
from pdctl.runtime.bench.settings import Settings
from pdctl.runtime.bench.status import Status
from pdctl.runtime.bench.strangers import Stranger
from pdctl.runtime.bench.target import Target

ONE = Settings(input_lens=(51,), output_len=3, num_prompts=3, num_warmups=1)


@pytest.fixture
def router(prompts: PromptSource) -> FakeRouter:
    return FakeRouter(lambda text: len(prompts.ids(text)))


class Notebook:
    def __init__(self) -> None:
        self.turns: list[str] = []
        self.notes: list[str] = []

    def place(self, place: Place) -> None:
        pass

    def turn(self, place: Place, column: Column, stage: str) -> None:
        self.turns.append(f"{column.path} {stage}")

    def done(self, place: Place, column: Column) -> None:
        pass

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def measure(
    router: FakeRouter,
    prompts: PromptSource,
    settings: Settings = ONE,
    *,
    disturbance: Any = Disturbance,
    strangers: Strangers = nobody,
    results: Results | None = None,
) -> tuple[Results, Notebook]:
    into, notebook = results or Results(), Notebook()

    async def run() -> None:
        async with router.serving() as url, aiohttp.ClientSession() as session:
            await Sweep(
                Client(session, url, timeout_s=60.0),
                columns(plan()),
                settings,
                prompts,
                model="tiny",
                page_bytes=PAGE_BYTES,
                observer=notebook,
                disturbance=disturbance,
                strangers=strangers,
            ).run(into)

    anyio.run(run)
    return into, notebook


def test_columns_take_turns_within_every_round(router: FakeRouter, prompts: PromptSource) -> None:
    _, notebook = measure(router, prompts)
    assert notebook.turns == [
        f"{path} {stage}"
        for stage in ("warm-up 1/1", "round 1/3", "round 2/3", "round 3/3")
        for path in ("d0", "p0>d0")
    ]


def test_a_prompt_is_shared_by_the_columns_of_a_round_and_by_nothing_else(
    router: FakeRouter, prompts: PromptSource
) -> None:
    measure(router, prompts)
    sent = {
        path: [body["prompt"] for p, body in router.asked if p == path] for path, _ in router.asked
    }
    assert sent["d0"] == sent["p0>d0"]
    assert len(set(sent["d0"])) == 4


def test_requests_are_greedy_counted_and_outside_the_prompt_cache(
    router: FakeRouter, prompts: PromptSource
) -> None:
    measure(router, prompts)
    body = router.asked[0][1]
    assert body.pop("prompt")
    assert body == {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "pdctl_cache": False,
    }


def test_every_place_of_the_sweep_has_all_its_rounds(
    router: FakeRouter, prompts: PromptSource
) -> None:
    results, _ = measure(
        router,
        prompts,
        Settings(input_lens=(51, 65), concurrency=(1, 3), num_prompts=2, num_warmups=0),
    )
    assert list(results.turns) == [Place(51, 1), Place(65, 1), Place(51, 3), Place(65, 3)]
    for place, cells in results.turns.items():
        assert list(cells) == ["d0", "p0>d0"]
        for turns in cells.values():
            assert [len(turn.samples) for turn in turns] == [place.concurrency] * 2
    assert router.most_active <= 3


def test_what_a_turn_moved_is_read_from_the_routers_counters(
    router: FakeRouter, prompts: PromptSource
) -> None:
    results, _ = measure(
        router, prompts, Settings(input_lens=(66,), concurrency=(2,), num_prompts=1)
    )
    cells = results.turns[Place(66, 2)]
    assert cells["p0>d0"][0].moved.imported_tokens == 2 * 65
    assert cells["p0>d0"][0].moved.host_bytes == 2 * 2 * PAGE_BYTES
    assert cells["d0"][0].moved.imported_tokens == 0


def test_a_round_under_cpu_steal_is_run_again_with_fresh_prompts(
    router: FakeRouter, prompts: PromptSource
) -> None:
    stolen = iter([0.0, 0.5])

    class Once(Disturbance):
        def steal(self) -> float:
            return next(stolen, 0.0)

    settings = Settings(input_lens=(51,), num_prompts=1, num_warmups=0)
    results, notebook = measure(router, prompts, settings, disturbance=Once)
    turns = results.turns[Place(51, 1)]
    assert [(turn.repeats, turn.steal) for turn in turns["p0>d0"]] == [(1, 0.0)]
    assert len({body["prompt"] for _, body in router.asked}) == 2
    assert notebook.notes == ["round 1/1 again: 50% of the CPU time was stolen meanwhile"]


def test_steal_that_does_not_end_is_kept_after_a_bounded_number_of_rounds(
    router: FakeRouter, prompts: PromptSource
) -> None:
    class Always(Disturbance):
        def steal(self) -> float:
            return 0.5

    settings = Settings(input_lens=(51,), num_prompts=1, num_warmups=0)
    results, _ = measure(router, prompts, settings, disturbance=Always)
    assert len(router.asked) == 2 * (MAX_REPEATS + 1)
    assert results.turns[Place(51, 1)]["d0"][0].steal == 0.5


def hog_on(*calls: int) -> Strangers:
    """Somebody is on the GPU at these calls, counted from 0, which is the sweep's beginning."""
    asked: list[int] = []

    async def strangers(status: Status) -> frozenset[Stranger]:
        asked.append(1)
        return frozenset({Stranger(9, "hog")} if len(asked) - 1 in calls else ())

    return strangers


GPU = Settings(input_lens=(51,), output_len=3, num_prompts=1, num_warmups=0)


def test_a_round_with_a_newcomer_on_the_gpu_is_run_again(
    router: FakeRouter, prompts: PromptSource
) -> None:
    results, notebook = measure(router, prompts, GPU, strangers=hog_on(2))
    assert notebook.notes == ["round 1/1 again: hog (pid 9) was on the GPU meanwhile"]
    for turns in results.turns[Place(51, 1)].values():
        assert [(turn.repeats, turn.strangers) for turn in turns] == [(1, frozenset())]


def test_a_newcomer_that_stays_is_kept_with_the_turn_after_the_last_repeat(
    router: FakeRouter, prompts: PromptSource
) -> None:
    results, _ = measure(router, prompts, GPU, strangers=hog_on(*range(1, 99)))
    turn = results.turns[Place(51, 1)]["d0"][0]
    assert (turn.repeats, turn.strangers) == (MAX_REPEATS, {Stranger(9, "hog")})


def test_for_who_was_on_the_gpu_from_the_beginning_no_round_is_run_again(
    router: FakeRouter, prompts: PromptSource
) -> None:
    results, notebook = measure(router, prompts, GPU, strangers=hog_on(*range(99)))
    turn = results.turns[Place(51, 1)]["d0"][0]
    assert (turn.repeats, turn.strangers) == (0, {Stranger(9, "hog")})
    assert notebook.notes == []


def test_a_pair_that_is_not_ready_is_named_before_anything_is_sent(
    router: FakeRouter, prompts: PromptSource
) -> None:
    router.pair_state = "failed"
    with pytest.raises(PdctlError, match="pair 'p0>d0' is failed"):
        measure(router, prompts)
    assert router.asked == []


def test_a_path_that_refuses_its_warm_up_ends_the_sweep(
    router: FakeRouter, prompts: PromptSource
) -> None:
    router.refuse["d0"] = (400, {"error": {"message": "d0 is no path"}})
    with pytest.raises(PdctlError, match='path "d0" refuses the requests: 400: d0 is no path'):
        measure(router, prompts)


def test_a_failed_request_is_kept_as_an_error(router: FakeRouter, prompts: PromptSource) -> None:
    router.refuse["p0>d0"] = (502, {"error": {"message": "prefill died"}})
    results, _ = measure(router, prompts)
    turns = results.turns[Place(51, 1)]["p0>d0"]
    assert [turn.samples[0].error for turn in turns] == ["502: prefill died"] * 3


def run_session(
    router: FakeRouter, prompts: PromptSource, settings: Settings, results: Results
) -> str:
    """Runs `sweep` and returns its progress; SIGINT comes where the router stalls."""
    out = Console(file=io.StringIO(), width=80)

    router.stalled = lambda: os.kill(os.getpid(), signal.SIGINT)

    async def run() -> None:
        async with router.serving() as url:
            await sweep(
                Target(plan=plan(), topology=topology(), url=url), settings, prompts, results, out
            )

    anyio.run(run)
    return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_an_interrupted_sweep_keeps_whole_rounds_and_leaves_no_request(
    router: FakeRouter, prompts: PromptSource
) -> None:
    results = Results()
    router.stall_at = 4
    run_session(router, prompts, Settings(input_lens=(51,), num_prompts=9, num_warmups=0), results)
    assert results.interrupted
    assert [len(turns) for turns in results.turns[Place(51, 1)].values()] == [1, 1]
    assert (router.active, router.gone) == (0, 1)


def test_an_error_of_the_sweep_comes_out_as_itself(
    router: FakeRouter, prompts: PromptSource
) -> None:
    router.pair_state = "failed"
    with pytest.raises(PdctlError, match="is failed"):
        run_session(router, prompts, ONE, Results())


def test_a_length_beyond_the_context_is_refused_before_anything_is_sent(
    router: FakeRouter, prompts: PromptSource
) -> None:
    with pytest.raises(UsageError, match=f"--input-lens {CONTEXT}"):
        run_session(router, prompts, Settings(input_lens=(CONTEXT,)), Results())
    assert router.asked == []


def test_progress_is_plain_lines_where_there_is_no_terminal(
    router: FakeRouter, prompts: PromptSource
) -> None:
    settings = Settings(input_lens=(51, 65), concurrency=(1, 2), num_prompts=1, num_warmups=0)
    assert run_session(router, prompts, settings, Results()).splitlines() == [
        "51 tokens",
        "65 tokens",
        "51 tokens, 2 at once",
        "65 tokens, 2 at once",
    ]
