from __future__ import annotations

import io
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from runtime.bench.bench_points import RUN, cells, good, sample, turn

from pdctl.errors import UsageError
from pdctl.runtime.bench.compare import (
    beyond_scatter,
    compare,
    comparison_table,
    newest_run,
    newest_runs,
)
from pdctl.runtime.bench.folder import save_points
from pdctl.runtime.bench.summary import Point

SETTING = {"model": "tiny", "contract": "c", "output_len": 3, "seed": 0, "topology": "x"}


def ran(pair_ttft_s: float, **changes: object) -> tuple[Point, ...]:
    """Five rounds of both columns; the pair's TTFT scatters by 4 %."""
    alone = [turn(sample(ttft_s=1.0 + n / 100), pair=False) for n in range(5)]
    pair = [turn(sample(ttft_s=pair_ttft_s * (1 + n / 100))) for n in range(5)]
    fields = {"pd_setting": SETTING, **changes}
    return tuple(msgspec.structs.replace(p, **fields) for p in cells(alone, pair))


def test_a_change_has_both_medians_its_percent_and_whether_it_is_beyond_the_scatter() -> None:
    found = {(c.path, c.metric): c for c in compare(ran(1.0), ran(1.2)).changes}
    pair = found["p0>d0", "ttft"]
    assert (pair.before_ms, pair.after_ms) == pytest.approx((1020.0, 1224.0))
    assert pair.percent == pytest.approx(20.0)
    assert pair.beyond_scatter is True
    assert found["d0", "ttft"].beyond_scatter is False
    assert {metric for _, metric in found} == {"ttft", "tpot", "e2el"}


@pytest.mark.parametrize("name", ["model", "contract", "output_len", "seed"])
def test_runs_that_measured_different_things_are_refused_by_name(name: str) -> None:
    other = ran(1.0, pd_setting={**SETTING, name: "other"})
    with pytest.raises(UsageError, match=f"different things: {name} is .* in one and other in"):
        compare(ran(1.0), other)


def test_runs_without_a_common_cell_are_refused_and_named() -> None:
    with pytest.raises(UsageError, match="d0 at 66 tokens in one, d0 at 51 tokens in the other"):
        compare(ran(1.0), ran(1.0, pd_input_len=51))


def test_what_else_differs_is_noted_and_not_refused() -> None:
    before, after = ran(1.0), ran(1.0, pd_versions={"d0": "mlx 2"}, pd_machine={"cores": 4})
    newer = {**SETTING, "topology": "y"}
    after = tuple(msgspec.structs.replace(p, pd_setting=newer) for p in after)
    notes = compare(before, after[:1]).notes
    assert "topology differs" in notes
    assert "d0: –, then mlx 2" in notes
    assert "the machines differ" in notes
    assert "only before: p0>d0 at 66 tokens" in notes


def test_why_nothing_is_said_of_scatter_is_noted() -> None:
    """Under five requests a side; a setting that was left away is a dash, too."""
    after = [
        msgspec.structs.replace(p, pd_setting={**SETTING, "goodput": "ttft:9"}) for p in good()
    ]
    before = [msgspec.structs.replace(p, pd_setting={**SETTING, "goodput": ""}) for p in good()]
    notes = compare(before, after).notes
    assert "goodput: –, then ttft:9" in notes
    assert "beyond scatter –: under 5 requests on a side say nothing" in notes
    assert not [note for note in compare(ran(1.0), ran(2.0)).notes if "scatter" in note]


def test_a_marked_cell_is_marked_in_the_comparison() -> None:
    doubtful = cells([turn(sample(), pair=False)], [turn(sample(), steal=0.5)])
    found = compare(doubtful, doubtful)
    assert {c.path for c in found.changes if c.doubtful} == {"p0>d0"}
    console = Console(width=140, record=True)
    console.print(comparison_table(found))
    assert "p0>d0†" in console.export_text()


def test_too_few_samples_are_not_judged() -> None:
    """Four against four cannot reach the bound, so that "no" would say too much."""
    assert beyond_scatter([1.0, 1.1, 1.2, 1.3], [9.0, 9.1, 9.2, 9.3]) is None


def test_five_against_five_are_apart_only_where_none_lies_among_the_others() -> None:
    low = [1.0, 1.1, 1.2, 1.3, 1.4]
    assert beyond_scatter(low, [1.5, 1.6, 1.7, 1.8, 1.9]) is True
    assert beyond_scatter(low, [1.35, 1.6, 1.7, 1.8, 1.9]) is False


def test_equal_samples_are_never_apart() -> None:
    assert beyond_scatter([1.0] * 8, [1.0] * 8) is False


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=20), st.integers(0, 1000))
def test_the_order_of_samples_and_of_sides_does_not_matter(values: list[float], seed: int) -> None:
    other = [value * 1.1 for value in values]
    mixed = random.Random(seed).sample(other, len(other))
    assert beyond_scatter(values, other) == beyond_scatter(mixed, values)


def test_of_several_runs_in_a_folder_the_newest_is_taken(tmp_path: Path) -> None:
    later = msgspec.structs.replace(RUN, date="20270101-000000")
    save_points(tmp_path, RUN, good())
    save_points(tmp_path, later, [msgspec.structs.replace(p, date=later.date) for p in good()])
    assert {p.date for p in newest_run(tmp_path)} == {"20270101-000000"}


def test_a_folder_is_not_compared_with_itself(tmp_path: Path) -> None:
    """Under another name, too: nothing would differ, and it would look like a finding."""
    again = tmp_path / "again"
    again.symlink_to(tmp_path)
    for after in (tmp_path, again):
        with pytest.raises(UsageError, match="are the same folder") as caught:
            newest_runs(tmp_path, after)
        assert caught.value.exit_code == 2


def test_the_table_has_no_lines_drawn_around_it() -> None:
    """Into a file, as on a terminal: columns that are aligned, and characters that are there."""
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(comparison_table(compare(good(), good())))
    text = console.export_text()
    assert not set(text) & set("│┃─━┏┓└┘")
    assert text.splitlines()[1].split()[:4] == ["tokens", "conc.", "path", "metric"]


def test_a_folder_without_results_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no result in"):
        newest_run(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match=r"broken\.json is no result"):
        newest_run(tmp_path)
