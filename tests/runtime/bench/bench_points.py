"""Turns and points that were measured nowhere: every test bends one figure of them."""

from __future__ import annotations

import msgspec
from runtime.bench.bench_router import PAGE_BYTES, plan

from pdctl.runtime.bench.client import Sample
from pdctl.runtime.bench.columns import columns
from pdctl.runtime.bench.measure import Place, Results, Turn
from pdctl.runtime.bench.report import points_of
from pdctl.runtime.bench.status import Moved, Phase
from pdctl.runtime.bench.summary import Point, Run

ALONE, PAIR = columns(plan())
PLACE = Place(66, 1)
RUN = Run(
    date="20260102-030405",
    cluster="studio",
    model="tiny",
    tokenizer="tiny",
    output_len=3,
    rounds=2,
    page_bytes=PAGE_BYTES,
    versions={"pdctl": "0.1.0"},
    compute_dtypes={"d0": "float32"},
    machine={"cores": 2},
    method="as it was",
    setting={"seed": 0},
)


def words(text: str) -> list[str]:
    return text.split()


def sample(text: str = "a b c", ttft_s: float = 1.0, **changes: object) -> Sample:
    base = Sample(
        started_s=0.0,
        ttft_s=ttft_s,
        e2el_s=ttft_s + 2.0,
        itl_s=(0.5, 1.5),
        prompt_tokens=PLACE.input_len,
        output_tokens=3,
        text=text,
        finish_reason="length",
        status=200,
    )
    return msgspec.structs.replace(base, **changes)


def turn(*samples: Sample, pair: bool = True, **changes: object) -> Turn:
    figures = {"imported_tokens": 65, "host_bytes": 2 * PAGE_BYTES} if pair else {}
    zero = dict.fromkeys(("imported_tokens", "host_bytes", "gpu_bytes"), 0)
    moved = Moved(
        **{**zero, **figures, **{k: v for k, v in changes.items() if k in Moved.__struct_fields__}},
        handoffs_completed=int(pair),
        handoffs_failed=0,
        foreign_handoffs=0,
        phases={"prefill": Phase(count=1, sum_s=0.25)} if pair else {},
    )
    kept = {k: v for k, v in changes.items() if k in Turn.__struct_fields__}
    return Turn(
        **{"samples": samples, "duration_s": 3.0, "moved": moved, "steal": 0.0, "load": 0.5, **kept}
    )


def cells(alone: list[Turn], pair: list[Turn], run: Run = RUN) -> tuple[Point, Point]:
    results = Results()
    results.turns[PLACE] = {"d0": alone, "p0>d0": pair}
    first, second = points_of(run, (ALONE, PAIR), results, words)
    return first, second


def good(run: Run = RUN) -> tuple[Point, Point]:
    pair = [turn(sample()), turn(sample(ttft_s=2.0))]
    return cells([turn(sample(), pair=False)] * 2, pair, run)
