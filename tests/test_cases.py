"""The numbered cases: each one that can be shown has a test, and no test names another."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cases import Case, coverage, read_cases

SOURCE = '''
"""{module}"""
class TestIt:
    """{group}"""
    async def test_one(self):
        """{test}"""
def helped():
    """{other}"""
'''


def write(folder: Path, **docstrings: str) -> Path:
    words = dict.fromkeys(("module", "group", "test", "other"), "Nothing.") | docstrings
    (folder / "test_it.py").write_text(SOURCE.format(**words))
    return folder


def test_every_case_that_can_be_shown_is_claimed() -> None:
    """No required case lacks a test, no test names an unknown case."""
    assert coverage(read_cases()).problems == []


def test_the_list_is_whole() -> None:
    """Every number is there once, and what is not required says what it waits for."""
    cases = read_cases()
    assert list(cases) == [f"R{n}" for n in range(1, 74)] + [f"U{n}" for n in range(1, 37)]
    assert all(case.required != (case.waits_for is not None) for case in cases.values())
    assert all((number[0] == "U") == (case.area == "public") for number, case in cases.items())


@pytest.mark.parametrize("place", ["module", "group", "test"])
def test_a_claim_stands_in_a_tests_docstring(place: str, tmp_path: Path) -> None:
    """Of a module, a class or a function, alone or with others; a helper's does not count."""
    case = Case(title="t", area="public", required=True)
    known = {"R25": case, "R2": case, "U4": case}
    claimed = coverage(known, write(tmp_path, **{place: "R25, U4: a fact."}))
    assert claimed.covered == ["R25", "U4"]
    assert claimed.problems == ["R2 is required, and no test claims it"]
    assert coverage(known, write(tmp_path, other="R2: no test.")).covered == []


def test_an_unknown_number_is_named_with_its_test(tmp_path: Path) -> None:
    """A misspelt number would otherwise cover nothing in silence."""
    (problem,) = coverage({}, write(tmp_path, test="R99: no such case.")).problems
    assert problem == "R99 is no case: test_it.py::test_one"


@pytest.mark.parametrize(
    "fields", [{"area": "nowhere"}, {"area": "public", "required": True, "waits_for": "x"}]
)
def test_a_malformed_case_is_an_error(fields: dict[str, object]) -> None:
    """An unknown area, and a required case that waits."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"title": "t", **fields}, Case)
