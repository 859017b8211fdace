from __future__ import annotations

import msgspec
import pytest
from runtime.bench.bench_points import sample

from pdctl.errors import UsageError
from pdctl.runtime.bench.goodput import objectives, request_goodput


def test_objectives_are_read_as_vllm_bench_serve_spells_them() -> None:
    assert objectives(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    assert objectives([]) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("itl:5", "knows ttft, tpot, e2el, not 'itl'"),
        ("ttft", "milliseconds"),
        ("ttft:x", "milliseconds, not 'ttft:x'"),
        ("ttft:-1", "milliseconds"),
        ("ttft:nan", "milliseconds"),
    ],
)
def test_what_is_no_objective_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        objectives([text])


def test_an_objective_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="ttft twice"):
        objectives(["ttft:1", "ttft:2"])


def test_only_requests_within_every_objective_count() -> None:
    good = [sample(ttft_s=0.4), sample(ttft_s=0.6), sample(ttft_s=0.5)]
    assert request_goodput(good, 2.0, {"ttft": 500.0}) == 1.0
    assert request_goodput(good, 2.0, {"ttft": 500.0, "tpot": 999.0}) == 0.0
    assert request_goodput(good, 2.0, {"ttft": 500.0, "tpot": 1000.0}) == 1.0


def test_without_objectives_there_is_no_goodput() -> None:
    assert request_goodput([sample()], 2.0, {}) is None


def test_an_answer_of_one_token_meets_every_tpot() -> None:
    short = msgspec.structs.replace(sample(), output_tokens=1)
    assert request_goodput([short], 1.0, {"tpot": 0.0}) == 1.0
