"""What counts as a difference of greedy text, and what excuses one."""

from __future__ import annotations

from typing import Any

import pytest
from agreement import (
    NEAR_TIE_NATS,
    Agreement,
    Parting,
    Step,
    moved_nats,
    parting,
    report,
    steps_of,
)

OLDER: dict[str, Any] = {
    "tokens": ["a", "b"],
    "token_logprobs": [-0.1, -0.7],
    "top_logprobs": [{"a": -0.1, "x": -3.0}, {"b": -0.7, "c": -0.71}],
}
NEWER: dict[str, Any] = {
    "content": [
        {"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "x", "logprob": -3.0}]},
        {"token": "b", "logprob": -0.7, "top_logprobs": [{"token": "c", "logprob": -0.71}]},
    ]
}
OWN = [Step("a", {"a": -0.1, "x": -3.0}), Step("b", {"b": -0.7, "c": -0.71})]


def answer(logprobs: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"logprobs": logprobs}]}


def chosen(second: str, **likeliest: float) -> dict[str, Any]:
    """OLDER with another second token."""
    return answer(
        {
            "tokens": ["a", second],
            "token_logprobs": [-0.1, likeliest[second]],
            "top_logprobs": [{"a": -0.1}, likeliest],
        }
    )


@pytest.mark.parametrize("logprobs", [OLDER, NEWER])
def test_both_of_openais_shapes_are_read_alike(logprobs: dict[str, Any]) -> None:
    """Completions' older form and chat's name the same tokens."""
    assert steps_of(answer(logprobs)) == OWN


def test_equal_tokens_part_nowhere() -> None:
    """To the end, not to the shorter one's."""
    assert parting(OWN, OWN) is None


def test_a_parting_names_the_step_both_tokens_and_the_lead() -> None:
    """The lead is the engine's own: how much likelier its choice was to it."""
    found = parting(OWN, [OWN[0], Step("c", {"c": -0.69, "b": -0.72})])
    assert found is not None
    assert found[:3] == (1, "b", "c")
    assert found.gap_nats == pytest.approx(0.01)


@pytest.mark.parametrize("other", [[OWN[0], Step("z", {"z": -0.1})], OWN[:1], [*OWN, OWN[0]]])
def test_nothing_excuses_a_token_that_was_not_likely(other: list[Step]) -> None:
    """Nor an answer that ends before the other does."""
    found = parting(OWN, other)
    assert isinstance(found, Parting)
    assert found.gap_nats == float("inf")


def test_log_probabilities_are_compared_up_to_the_parting() -> None:
    """What follows other tokens is another text."""
    moved = [Step("a", {"a": -0.11, "x": -3.0}), Step("c", {"b": -0.75, "c": -0.7})]
    after = Step("q", {"q": 0.0})
    assert moved_nats([*OWN, after], [*moved, Step("q", {"q": -9.0})]) == pytest.approx(0.05)


def test_a_near_tie_is_reported_and_anything_else_fails() -> None:
    """The report counts every prompt, and shows each difference with its lead."""
    kept: list[object] = []
    agreement = Agreement(kept.append)
    agreement.check("p>d", "prompt 1", answer(OLDER), answer(NEWER))
    agreement.check("p>d", "prompt 2", answer(OLDER), chosen("c", b=-0.72, c=-0.69))
    with pytest.raises(AssertionError, match="'b' → 'x', 1"):
        agreement.check("p>d", "prompt 3", chosen("b", b=-0.7, x=-1.7), chosen("x", b=-1, x=-0.7))
    first, *differences = report(kept)
    assert first.startswith("p>d: 3 prompts, 1 equal")
    assert len(differences) == 2
    assert f"'b' → 'c', 0.0100 nats apart (bound {NEAR_TIE_NATS})" in differences[0]
