"""What `plan` says, and what it does not say."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from runtime.router.cluster import plan_of

from pdctl.runtime.cost.forecast import Forecast, PairForecast, forecast
from pdctl.runtime.cost.record import PathRecord, Sample, identity
from pdctl.topology.plan import Plan

PLAN = plan_of("p0 d0")
MEASURED = (51, 184, 744, 1500)
ALONE_S = 1e-3
"""Per token, on d0."""


def record(
    path: str, ttft_s: Callable[[int], float], prefill_s: Callable[[int], float] | None = None
) -> PathRecord:
    assert PLAN.contract_digest is not None
    samples = tuple(
        Sample(
            tokens=n,
            ttft_s=ttft_s(n),
            at=0.0,
            prefill_s=None if prefill_s is None else prefill_s(n),
            transfer_s=None if prefill_s is None else ttft_s(n) - prefill_s(n) - 0.01,
        )
        for n in MEASURED
    )
    return PathRecord(
        identity=identity(PLAN, path),
        contract=PLAN.contract_digest,
        versions=("0.32.2",),
        samples=samples,
        steps_s=(0.02, 0.03, 0.04),
    )


def alone(n: int) -> float:
    return ALONE_S * n


def forecast_of(**records: PathRecord) -> Forecast:
    by_path = {"p0>d0" if name == "pair" else name: found for name, found in records.items()}
    return forecast(PLAN, by_path, ["d0", "p0>d0"])


def pair_of(prefill_token_s: float, link_token_s: float) -> PairForecast:
    """Fixed costs of 10 ms, and pages that nothing hides."""

    def prefill(n: int) -> float:
        return prefill_token_s * n

    def pair(n: int) -> float:
        return prefill(n) + 0.01 + link_token_s * n

    (found,) = forecast_of(d0=record("d0", alone), pair=record("p0>d0", pair, prefill)).pairs
    return found


def test_nothing_is_invented() -> None:
    """Where nothing was measured there is no figure, and it says so."""
    found = forecast_of()
    assert found.unmeasured == ("d0", "p0>d0")
    assert all(not path.cells for path in found.paths)
    assert found.pairs[0].words.startswith("nothing is known yet of p0>d0")
    assert found.pairs[0].break_even_tokens is None


def test_half_of_it_is_no_comparison() -> None:
    found = forecast_of(d0=record("d0", alone))
    assert found.unmeasured == ("p0>d0",)
    assert found.pairs[0].words == "nothing is known yet of p0>d0"


def test_times_are_those_that_were_measured() -> None:
    found = forecast_of(d0=record("d0", alone)).paths[0]
    assert {c.tokens: round(c.ttft_ms) for c in found.cells} == {51: 51, 184: 184, 744: 744}
    assert found.step_ms == pytest.approx(30)
    assert not any(cell.extrapolated for cell in found.cells)


def test_far_beyond_what_was_measured_is_marked() -> None:
    plan = msgspec.structs.replace(PLAN, context_length=8192)
    found = forecast(plan, {"d0": record("d0", alone)}, ["d0"])
    assert {c.tokens: c.extrapolated for c in found.paths[0].cells} == {
        51: False,
        184: False,
        744: False,
        2844: False,
        8000: True,
    }


def test_a_quick_prefill_replica_pays_from_a_length_on() -> None:
    """10 ms + 0.5 ms per token against 1 ms per token: from 20 tokens on."""
    found = pair_of(0.4e-3, 0.1e-3)
    assert found.alone == "d0"
    assert found.break_even_tokens is not None
    assert 18 <= found.break_even_tokens <= 24
    assert found.words.startswith("mlx → mlx (p0>d0) pays from ")
    assert found.fixed_ms == pytest.approx(10, rel=0.05)


def test_a_break_even_beyond_what_was_measured_says_so() -> None:
    """0.17 s and 0.9 ms per token against 1 ms per token: at 1700 tokens."""
    pair = record("p0>d0", lambda n: 0.17 + 0.9e-3 * n)
    (found,) = forecast_of(d0=record("d0", alone), pair=pair).pairs
    assert found.break_even_tokens is not None
    assert 1500 < found.break_even_tokens < 1900
    assert found.words.endswith("beyond the 1500 that were measured (by few requests)")


def test_two_paths_are_compared_where_both_were_measured() -> None:
    """Beyond the 51 tokens of d0 there is no figure to hold the pair's against."""
    short = record("d0", alone)
    short = msgspec.structs.replace(short, samples=short.samples[:1])
    (found,) = forecast_of(d0=short, pair=record("p0>d0", lambda n: 0.01 + 0.5e-3 * n)).pairs
    assert found.words.endswith("× 1.44 at 51 tokens, against d0 (by few requests)")


def test_what_three_requests_say_is_said_without_a_doubt() -> None:
    """Of the longest prompts, on either path."""
    often = {path: record(path, lambda n: 1e-3 * n) for path in ("d0", "p0>d0")}
    often = {p: msgspec.structs.replace(r, samples=r.samples * 3) for p, r in often.items()}
    for path, doubted in ((None, False), ("d0", True), ("p0>d0", True)):
        found = {**often}
        if path is not None:
            found[path] = msgspec.structs.replace(
                often[path], samples=often[path].samples[: len(MEASURED)]
            )
        (pair,) = forecast_of(d0=found["d0"], pair=found["p0>d0"]).pairs
        assert pair.words.endswith("(by few requests)") is doubted


def test_a_slow_prefill_replica_never_pays_and_says_by_how_much() -> None:
    found = pair_of(3e-3, 0.0001e-3)
    assert found.break_even_tokens is None
    assert "never pays here: prefill is 3 × slower than d0's own" in found.words
    assert found.enough_bytes_per_s is None


def test_a_slow_link_never_pays_and_says_which_would() -> None:
    """Pages take 1 ms per token where 0.5 ms are left; 2048 bytes per token."""
    found = pair_of(0.5e-3, 1e-3)
    assert found.break_even_tokens is None
    assert found.link_bytes_per_s == pytest.approx(2048 / 1e-3, rel=0.1)
    assert found.enough_bytes_per_s == pytest.approx(2048 / 0.5e-3, rel=0.1)
    assert "never pays here: the link carries 2" in found.words
    assert "would be enough" in found.words


def test_equal_replicas_never_pay() -> None:
    found = pair_of(1e-3, 0.01e-3)
    assert "both compute prompts equally fast, so the handoff only adds" in found.words


def test_a_record_of_another_engine_is_not_used() -> None:
    old = record("d0", alone)
    other: Plan = plan_of("p0 ds0")
    assert forecast(other, {"ds0": old}, ["ds0"]).unmeasured == ("ds0",)


def test_beside_a_pair_that_answers_nothing_alone_the_ordinary_replica_counts() -> None:
    plan = plan_of("ps0 ds0 o0")
    assert plan.contract_digest is not None
    records = {
        path: PathRecord(
            identity=identity(plan, path),
            contract=plan.contract_digest,
            versions=(),
            samples=tuple(Sample(tokens=n, ttft_s=factor * n, at=0.0) for n in MEASURED),
        )
        for path, factor in (("ps0>ds0", 1e-3), ("o0", 2e-3))
    }
    (found,) = forecast(plan, records, ["o0", "ps0>ds0"]).pairs
    assert found.alone == "o0"
    assert "pays at every length" in found.words
