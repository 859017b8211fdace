from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from runtime.bench.bench_points import PAIR, RUN, cells, good, sample, turn, words
from runtime.bench.bench_router import PAGE_BYTES

from pdctl.runtime.bench.columns import required
from pdctl.runtime.bench.links import Link
from pdctl.runtime.bench.marks import Difference, first_difference
from pdctl.runtime.bench.measure import Turn
from pdctl.runtime.bench.page import page
from pdctl.runtime.bench.report import markdown, remarks
from pdctl.runtime.bench.status import Phase
from pdctl.runtime.bench.strangers import Stranger
from pdctl.runtime.bench.summary import Point, floor_ms, phase_means_ms, statistics
from pdctl.runtime.bench.terminal import tables

VLLM_FIELDS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate
burstiness max_concurrency duration completed failed total_input_tokens total_output_tokens
request_throughput request_goodput output_throughput total_token_throughput
mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms
p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms
std_e2el_ms p99_e2el_ms input_lens output_lens ttfts latencies errors""".split()
PD_FIELDS = """
pd_path pd_baseline pd_input_len pd_output_len pd_concurrency pd_rounds
pd_rounds_asked pd_page_bytes pd_imported_tokens pd_host_bytes pd_gpu_bytes
pd_imported_tokens_required pd_host_bytes_required pd_gpu_bytes_required pd_floor_ms
pd_phases pd_marks pd_short_outputs pd_repeated_rounds pd_steal_max pd_load_max
pd_versions pd_compute_dtypes pd_machine pd_method pd_setting pd_goodput pd_over_local_ms
pd_link_bytes_per_s pd_link_round_trip_ms
""".split()


def kinds(point: Point) -> list[str]:
    return [mark.kind for mark in point.pd_marks]


def test_a_point_has_vllm_bench_serves_field_names_and_ours() -> None:
    fields = set(json.loads(msgspec.json.encode(good()[1])))
    p95 = {f"p95_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el")}
    assert fields == {*VLLM_FIELDS, *PD_FIELDS, *p95}


def test_a_clean_cell_has_no_mark_and_exact_figures() -> None:
    alone, pair = good()
    assert (alone.pd_marks, pair.pd_marks) == ((), ())
    assert (pair.pd_imported_tokens, pair.pd_host_bytes) == (65, 2 * PAGE_BYTES)
    assert (alone.pd_imported_tokens, alone.pd_host_bytes) == (0, 0)
    assert (pair.median_ttft_ms, pair.mean_ttft_ms, pair.std_ttft_ms) == (1500.0, 1500.0, 500.0)
    assert (pair.median_itl_ms, pair.median_tpot_ms) == (1000.0, 1000.0)
    assert (pair.num_prompts, pair.completed, pair.failed) == (2, 2, 0)
    assert (pair.duration, pair.total_output_tokens, pair.output_throughput) == (6.0, 6, 1.0)
    assert (pair.total_input_tokens, pair.total_token_throughput) == (132, 23.0)
    assert pair.pd_phases == {"prefill": 250.0}


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=30))
def test_statistics_lie_between_the_smallest_and_the_largest(seconds: list[float]) -> None:
    found = statistics([sample(ttft_s=s) for s in seconds])
    for name in ("mean", "median", "p95", "p99"):
        value = found[f"{name}_ttft_ms"]
        assert min(seconds) * 999.999 <= value <= max(seconds) * 1000.001


def test_statistics_of_nothing_are_absent_not_zero() -> None:
    assert set(statistics([]).values()) == {None}


def test_a_pairs_floor_is_its_prefill_engine_alone() -> None:
    alone, pair = good()
    assert (alone.pd_floor_ms, pair.pd_floor_ms) == (None, 1000.0)


@pytest.mark.parametrize(("bytes_per_s", "floor"), [(4096.0, 2000.0), (40960.0, 1000.0)])
def test_a_link_that_is_slower_than_prefill_is_the_floor(bytes_per_s: float, floor: float) -> None:
    """Two pages of 4096 bytes, beside a prefill of one second."""
    link = Link(bytes_per_s=bytes_per_s, round_trip_ms=0.5)
    alone, pair = good(msgspec.structs.replace(RUN, links={"p0>d0": link}))
    assert (pair.pd_link_bytes_per_s, pair.pd_link_round_trip_ms) == (bytes_per_s, 0.5)
    assert (alone.pd_link_bytes_per_s, alone.pd_floor_ms) == (None, None)
    assert pair.pd_floor_ms == floor


def test_pairs_over_one_link_share_a_line_of_the_report() -> None:
    link = Link(bytes_per_s=117e6, round_trip_ms=0.25)
    _, pair = good(msgspec.structs.replace(RUN, links={"p0>d0": link}))
    other = msgspec.structs.replace(pair, pd_path="p0>d1")
    slow = msgspec.structs.replace(pair, pd_path="p1>d0", pd_link_bytes_per_s=12e6)
    text = markdown(RUN, (pair, other, slow))
    assert "- link of p0>d0, p0>d1: 117 MB/s, round trip 0.25 ms\n" in text
    assert "- link of p1>d0: 12 MB/s, round trip 0.25 ms\n" in text


def test_a_pair_under_its_floor_says_that_figures_scatter() -> None:
    """Rather than that it was quicker than can be."""
    _, pair = good()
    lower = msgspec.structs.replace(pair, median_ttft_ms=900.0)
    assert remarks([pair]) == []
    (line,) = remarks([lower])
    assert line.startswith("p0>d0 at 66 tokens: 100.0 ms under its floor")


def test_a_pair_says_what_it_takes_longer_than_decode_alone() -> None:
    alone, pair = good()
    assert (alone.pd_over_local_ms, pair.pd_over_local_ms) == (None, 500.0)
    _, bare = cells([turn(sample(error="x"), pair=False)], [turn(sample())])
    assert bare.pd_over_local_ms is None


def test_a_pair_whose_prefill_engine_answers_nothing_alone_has_its_own_prefill_as_floor() -> None:
    bare = msgspec.structs.replace(PAIR, prefill_alone=None)
    assert floor_ms(bare, [turn(sample())], [], required(bare, 66, PAGE_BYTES), None) == 250.0


def test_phase_means_weigh_every_observation_alike() -> None:
    one = turn(sample())
    three = msgspec.structs.replace(
        one,
        moved=msgspec.structs.replace(one.moved, phases={"prefill": Phase(count=3, sum_s=1.75)}),
    )
    assert phase_means_ms([one, three]) == {"prefill": 500.0}


def test_wrong_counters_mark_the_cell_and_leave_its_figures() -> None:
    _, pair = cells(
        [turn(sample(), pair=False)] * 2, [turn(sample()), turn(sample(), imported_tokens=64)]
    )
    assert kinds(pair) == ["moved"]
    assert pair.pd_marks[0].detail == (
        f"moved 64 tokens, {2 * PAGE_BYTES} host bytes where 65 tokens, {2 * PAGE_BYTES} host "
        "bytes were required (in 1 of 2 rounds)"
    )
    assert pair.median_ttft_ms == 1000.0


def test_an_engine_alone_that_imported_something_is_marked() -> None:
    alone, _ = cells([turn(sample(), pair=True)], [turn(sample())])
    assert kinds(alone) == ["moved"]


def test_text_that_differs_is_marked_with_the_place_of_the_first_difference() -> None:
    _, pair = cells(
        [turn(sample("a b c"), pair=False)] * 2, [turn(sample("a b c")), turn(sample("a x c"))]
    )
    assert kinds(pair) == ["text"]
    assert pair.pd_marks[0].detail == (
        "text differs from d0's in 1 of 2 requests, first at token 1 (character 2)"
    )


def test_failed_requests_are_counted_marked_and_in_no_statistic() -> None:
    broken = sample(ttft_s=99.0, error="502: prefill died", output_tokens=0)
    _, pair = cells([turn(sample(), pair=False)] * 2, [turn(sample()), turn(broken)])
    assert kinds(pair) == ["errors"]
    assert (pair.completed, pair.failed, pair.median_ttft_ms) == (1, 1, 1000.0)
    assert pair.errors == ("", "502: prefill died")


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (turn(sample(path="o0")), "path"),
        (turn(sample(prompt_tokens=67)), "prompt"),
        (turn(sample(), steal=0.2), "steal"),
        (turn(sample(), imported_tokens=-9), "restart"),
        (turn(sample(), strangers=frozenset({Stranger(9, "hog")})), "gpu"),
    ],
)
def test_what_makes_a_cell_doubtful_is_marked(changed: Turn, kind: str) -> None:
    _, pair = cells([turn(sample(), pair=False)], [changed])
    assert kind in kinds(pair)


def test_answers_shorter_than_asked_are_noted_not_marked() -> None:
    _, pair = cells([turn(sample(), pair=False)], [turn(sample(output_tokens=2))])
    assert (pair.pd_short_outputs, pair.pd_marks) == (1, ())


def test_a_text_that_only_goes_on_differs_where_the_other_ends() -> None:
    assert first_difference("a b", "a b c", words) == Difference(3, 2)
    assert first_difference("a b", "a b", words) is None


def test_tables_show_the_mark_and_say_why() -> None:
    points = cells([turn(sample(), pair=False)] * 2, [turn(sample("x")), turn(sample())])
    text = markdown(RUN, points)
    assert "1000.0†" in text
    assert "† p0>d0 at 66 tokens: text differs from d0's in 1 of 2 requests" in text
    assert (
        "| tokens | conc. | d0 | p0>d0 |\n| ---: | ---: | ---: | ---: |\n| 66 | 1 | 1000.0 |"
        in text
    )
    assert "Method: as it was" in text
    assert "- d0 computes in: float32" in text


def test_goodput_has_a_column_only_where_it_was_asked_for() -> None:
    points = good()
    assert "goodput" not in markdown(RUN, points)
    asked = [
        msgspec.structs.replace(p, pd_goodput={"ttft": 5.0}, request_goodput=0.25) for p in points
    ]
    assert "goodput req/s |" in markdown(RUN, asked)
    assert "| 0.25 |" in markdown(RUN, asked)


def test_what_counts_as_good_stands_beside_the_figures() -> None:
    """On the terminal, in the Markdown and on the page."""
    asked = [msgspec.structs.replace(p, pd_goodput={"ttft": 5.0, "e2el": 90.5}) for p in good()]
    words = "goodput: requests per second within ttft:5 e2el:90.5 (ms)"
    assert f"- {words}\n" in markdown(RUN, asked)
    assert words in page(RUN, asked)
    shown = io.StringIO()
    Console(width=160, file=shown).print(tables(asked))
    assert shown.getvalue().count(words) == 1


def test_an_interrupted_cell_says_how_many_rounds_it_has() -> None:
    points = cells([turn(sample(), pair=False)], [turn(sample())])
    assert "- p0>d0 at 66 tokens: 1 of 2 rounds, then interrupted" in markdown(RUN, points)


def test_the_guide_names_every_field_of_a_point() -> None:
    """Beside those that `vllm bench serve` has too."""
    guide = (Path(__file__).parents[3] / "docs" / "choosing-roles.md").read_text()
    table = guide.partition("In the JSON stand beside")[2].partition("\n\n`")[0]
    named = set(re.findall(r"`(pd_\w+)`", table))
    required = {name.removesuffix("_required") for name in PD_FIELDS}
    assert named == required
