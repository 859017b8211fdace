"""From samples to points: pure arithmetic, nothing measured here.

Field names of `Point` are `vllm bench serve`'s (vllm/benchmarks/serve.py) and `pd_*`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from pdctl.runtime.bench.client import Sample
from pdctl.runtime.bench.columns import Column, Required, required
from pdctl.runtime.bench.goodput import request_goodput
from pdctl.runtime.bench.links import Link
from pdctl.runtime.bench.marks import Mark, marks_of
from pdctl.runtime.bench.measure import Place, Turn

METRICS = ("ttft", "tpot", "itl", "e2el")
Setting = dict[str, str | int | None]
"""What all points of one sweep were asked to be, by name."""

STATISTICS = ("mean", "median", "std", "p95", "p99")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: one path, one prompt length, one concurrency. Milliseconds where named so.

    Statistics are over requests that succeeded (ITL: over all their gaps), None where there
    is nothing to take them of. Throughputs are over `duration`, the sum of this path's turns.
    """

    date: str
    """YYYYmmdd-HHMMSS, local time."""
    endpoint_type: str = "openai"
    backend: str = "openai"
    label: str
    model_id: str
    tokenizer_id: str
    num_prompts: int
    """Requests sent."""
    request_rate: str = "inf"
    burstiness: float = 1.0
    max_concurrency: int
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """None where no objective was given."""
    output_throughput: float
    total_token_throughput: float
    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    std_ttft_ms: float | None
    p95_ttft_ms: float | None
    p99_ttft_ms: float | None
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    std_tpot_ms: float | None
    p95_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None
    median_itl_ms: float | None
    std_itl_ms: float | None
    p95_itl_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    std_e2el_ms: float | None
    p95_e2el_ms: float | None
    p99_e2el_ms: float | None
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    ttfts: tuple[float | None, ...]
    """Seconds, one per request; None for a request that failed before its first text."""
    latencies: tuple[float, ...]
    """Seconds."""
    errors: tuple[str, ...]
    """"" for a request that succeeded."""
    pd_path: str
    pd_baseline: str | None
    """The path whose greedy text this one's was compared with."""
    pd_input_len: int
    pd_output_len: int
    """Tokens asked for; `output_lens` are those that came."""
    pd_concurrency: int
    pd_rounds: int
    pd_rounds_asked: int
    pd_page_bytes: int | None
    pd_imported_tokens: float
    """Per request, as are the bytes."""
    pd_host_bytes: float
    pd_gpu_bytes: float
    pd_imported_tokens_required: int
    pd_host_bytes_required: int | None
    pd_gpu_bytes_required: int | None
    pd_floor_ms: float | None
    """What a pair's TTFT cannot be under: its prefill engine alone, or the pages' bytes over the
    measured link, whichever takes longer, since pages travel while prefill computes. Of the
    first the median TTFT; where that engine answers nothing alone, the mean of the pair's own
    prefill phase. The second is left out where no link was measured. None for an engine alone."""
    pd_over_local_ms: float | None = None
    """Median TTFT of a pair less that of `pd_baseline`: what its user waits longer than without
    a handoff, negative where the pair is sooner. None for an engine alone."""
    pd_link_bytes_per_s: float | None = None
    """Of a pair's link, measured before the sweep; None where it was not."""
    pd_link_round_trip_ms: float | None = None
    pd_phases: dict[str, float]
    """Mean milliseconds per phase of the handoff."""
    pd_marks: tuple[Mark, ...]
    """What makes this cell doubtful; empty for one that can be quoted."""
    pd_short_outputs: int
    """Requests that ended before `pd_output_len` tokens; no fault where an engine can't be
    told to go on after its end-of-text token."""
    pd_repeated_rounds: int
    pd_steal_max: float
    pd_load_max: float
    pd_versions: dict[str, str]
    pd_compute_dtypes: dict[str, str]
    """By replica; pages have the model's dtype whatever an engine computes in."""
    pd_machine: dict[str, Any]
    pd_goodput: dict[str, float]
    """The objectives of `request_goodput`: milliseconds by metric."""
    pd_method: str
    pd_setting: Setting


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What all points of one sweep share."""

    date: str
    cluster: str
    model: str
    tokenizer: str
    output_len: int
    rounds: int
    page_bytes: int | None
    versions: dict[str, str]
    compute_dtypes: dict[str, str]
    machine: dict[str, Any]
    method: str
    setting: Setting
    goodput: dict[str, float] = {}
    links: dict[str, Link] = {}
    """By path."""


def point(
    run: Run,
    place: Place,
    column: Column,
    turns: Sequence[Turn],
    baseline: Sequence[Turn],
    prefill_alone: Sequence[Turn],
    tokenise: Callable[[str], Sequence[int]],
) -> Point:
    """One cell. `baseline` and `prefill_alone` have the turns of the columns that `column` names
    so, at the same place (or nothing)."""
    samples = [sample for turn in turns for sample in turn.samples]
    good = [sample for sample in samples if sample.ok]
    duration = sum(turn.duration_s for turn in turns)
    inputs, outputs = place.input_len * len(good), sum(s.output_tokens for s in good)
    need = required(column, place.input_len, run.page_bytes)
    link = run.links.get(column.path)
    return Point(
        date=run.date,
        label=f"{run.cluster} {column.path}",
        model_id=run.model,
        tokenizer_id=run.tokenizer,
        num_prompts=len(samples),
        max_concurrency=place.concurrency,
        duration=duration,
        completed=len(good),
        failed=len(samples) - len(good),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=_rate(len(good), duration),
        request_goodput=request_goodput(good, duration, run.goodput),
        output_throughput=_rate(outputs, duration),
        total_token_throughput=_rate(inputs + outputs, duration),
        **statistics(good),
        input_lens=tuple(place.input_len for _ in samples),
        output_lens=tuple(sample.output_tokens for sample in samples),
        ttfts=tuple(sample.ttft_s for sample in samples),
        latencies=tuple(sample.e2el_s for sample in samples),
        errors=tuple(sample.error or "" for sample in samples),
        pd_path=column.path,
        pd_baseline=column.baseline,
        pd_input_len=place.input_len,
        pd_output_len=run.output_len,
        pd_concurrency=place.concurrency,
        pd_rounds=len(turns),
        pd_rounds_asked=run.rounds,
        pd_page_bytes=run.page_bytes,
        pd_imported_tokens=_each(sum(t.moved.imported_tokens for t in turns), samples),
        pd_host_bytes=_each(sum(t.moved.host_bytes for t in turns), samples),
        pd_gpu_bytes=_each(sum(t.moved.gpu_bytes for t in turns), samples),
        pd_imported_tokens_required=need.imported_tokens,
        pd_host_bytes_required=need.host_bytes,
        pd_gpu_bytes_required=need.gpu_bytes,
        pd_floor_ms=floor_ms(column, turns, prefill_alone, need, link),
        pd_over_local_ms=over_local_ms(column, turns, baseline),
        pd_link_bytes_per_s=None if link is None else link.bytes_per_s,
        pd_link_round_trip_ms=None if link is None else link.round_trip_ms,
        pd_phases=phase_means_ms(turns),
        pd_marks=marks_of(place, column, turns, baseline, need, tokenise),
        pd_short_outputs=sum(s.output_tokens < run.output_len for s in good),
        pd_repeated_rounds=sum(turn.repeats for turn in turns),
        pd_steal_max=max((turn.steal for turn in turns), default=0.0),
        pd_load_max=max((turn.load for turn in turns), default=0.0),
        pd_versions=run.versions,
        pd_compute_dtypes=run.compute_dtypes,
        pd_machine=run.machine,
        pd_goodput=run.goodput,
        pd_method=run.method,
        pd_setting=run.setting,
    )


def statistics(samples: Sequence[Sample]) -> dict[str, Any]:
    """{"mean_ttft_ms": …} for every metric and statistic, over samples that succeeded."""
    seconds: dict[str, list[float]] = {
        "ttft": [s.ttft_s for s in samples if s.ttft_s is not None],
        "tpot": [s.tpot_s for s in samples if s.tpot_s is not None],
        "itl": [gap for s in samples for gap in s.itl_s],
        "e2el": [s.e2el_s for s in samples],
    }
    return {
        f"{name}_{metric}_ms": value
        for metric in METRICS
        for name, value in zip(STATISTICS, _statistics_ms(seconds[metric]), strict=True)
    }


def floor_ms(
    column: Column,
    turns: Sequence[Turn],
    prefill_alone: Sequence[Turn],
    need: Required,
    link: Link | None,
) -> float | None:
    """As `Point.pd_floor_ms` says; `need` is what one prompt moves."""
    if not column.is_pair:
        return None
    alone = _median_ttft_ms(prefill_alone)
    computing = phase_means_ms(turns).get("prefill") if alone is None else alone
    moved = sum(n for n in (need.host_bytes, need.gpu_bytes) if n is not None)
    travelling = None if link is None else moved / link.bytes_per_s * 1000
    return max((ms for ms in (computing, travelling) if ms is not None), default=None)


def over_local_ms(column: Column, turns: Sequence[Turn], baseline: Sequence[Turn]) -> float | None:
    """As `Point.pd_over_local_ms` says."""
    own, local = _median_ttft_ms(turns), _median_ttft_ms(baseline)
    if not column.is_pair or own is None or local is None:
        return None
    return own - local


def phase_means_ms(turns: Iterable[Turn]) -> dict[str, float]:
    counts: dict[str, int] = {}
    sums: dict[str, float] = {}
    for turn in turns:
        for name, phase in turn.moved.phases.items():
            counts[name] = counts.get(name, 0) + phase.count
            sums[name] = sums.get(name, 0.0) + phase.sum_s
    return {name: sums[name] / counts[name] * 1000 for name in counts}


def _median_ttft_ms(turns: Sequence[Turn]) -> float | None:
    good = [s.ttft_s for turn in turns for s in turn.samples if s.ok and s.ttft_s is not None]
    return _statistics_ms(good)[STATISTICS.index("median")]


def _statistics_ms(seconds: Sequence[float]) -> tuple[float | None, ...]:
    """In the order of STATISTICS; percentiles interpolate linearly, std is the population's."""
    if not seconds:
        return (None,) * len(STATISTICS)
    ms = np.asarray(seconds) * 1000
    p95, p99 = np.percentile(ms, (95, 99))
    return tuple(float(v) for v in (ms.mean(), np.median(ms), ms.std(), p95, p99))


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _each(total: int, samples: Sequence[Sample]) -> float:
    """Per request; a whole number where it is one."""
    if not samples:
        return 0
    return total // len(samples) if total % len(samples) == 0 else total / len(samples)
