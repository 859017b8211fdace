"""Who answers a request without a handoff, and what needs somebody who does."""

from __future__ import annotations

from topology.texts import GOOD, ORDINARY

from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.load import loads

AUTO = GOOD.replace("[router]", '[router]\ndisaggregate = "auto"')
SGLANG = AUTO.replace('engine = "mlx"', 'engine = "sglang"')


def found(text: str) -> list[Diagnostic]:
    return loads(text)[1]


def test_auto_is_served_where_the_decode_replica_answers_alone() -> None:
    assert found(AUTO) == []


def test_auto_needs_somebody_who_answers_alone() -> None:
    """SGLang's decode replicas do not: an ordinary replica beside them does, of any engine."""
    (problem,) = [d for d in found(SGLANG) if d.severity is Severity.ERROR]
    assert problem.code == "topology.nobody_alone"
    assert problem.field == "router.disaggregate"
    assert "decode replicas of sglang do not" in problem.summary
    assert 'role = "both"' in (problem.hint or "")
    assert found(SGLANG + ORDINARY) == []


def test_one_decode_replica_that_answers_alone_is_enough() -> None:
    mixed = AUTO.replace('engine = "mlx"', 'engine = "sglang"', 1)
    assert found(mixed) == []


def test_auto_without_a_pair_is_a_warning() -> None:
    head, *_ = AUTO.split("[[replicas]]")
    (warning,) = found(head + ORDINARY)
    assert (warning.code, warning.severity) == ("topology.nothing_to_decide", Severity.WARNING)
