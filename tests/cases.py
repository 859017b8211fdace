"""Prints which of the numbered cases in `cases.toml` a test claims, and which none does.

    python tests/cases.py [--json]

A test claims a case by naming its number in its docstring; a class's or a module's docstring
claims it for what is inside. Exit status 1: a number that is not in the list is claimed, or a
required case is not.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).parent
AREAS = frozenset(
    "deadlines cancellation geometry isolation budget launch network router public".split()
)
NUMBER = re.compile(r"\b[RU]\d+\b")

Tested = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case. `waits_for` names what must exist before a test can show it."""

    title: str
    area: str
    required: bool = False
    waits_for: str | None = None

    def __post_init__(self) -> None:
        if self.area not in AREAS:
            raise ValueError(f"no area is called {self.area}")
        if self.required and self.waits_for:
            raise ValueError("a required case waits for nothing")


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """`claims`: number → where it is claimed, in order of file and line."""

    cases: dict[str, Case]
    claims: dict[str, tuple[str, ...]]

    @property
    def covered(self) -> list[str]:
        return [number for number in self.cases if number in self.claims]

    @property
    def uncovered(self) -> list[str]:
        return [number for number in self.cases if number not in self.claims]

    @property
    def problems(self) -> list[str]:
        unknown = sorted(set(self.claims) - set(self.cases))
        missing = [number for number in self.uncovered if self.cases[number].required]
        return [f"{number} is no case: {', '.join(self.claims[number])}" for number in unknown] + [
            f"{number} is required, and no test claims it" for number in missing
        ]


def read_cases(path: Path = TESTS / "cases.toml") -> dict[str, Case]:
    """Number → case, in the file's order; msgspec.ValidationError for a malformed one."""
    return msgspec.convert(tomllib.loads(path.read_text()), dict[str, Case])


def claims_of(source: str) -> Iterator[tuple[str, str]]:
    """(number, name of the test, "" for the module) for every claim in a test module."""
    module = ast.parse(source)
    for number in numbers(module):
        yield number, ""
    for node in ast.walk(module):
        if isinstance(node, Tested) and _is_test(node):
            for number in numbers(node):
                yield number, node.name


def numbers(node: Tested | ast.Module) -> list[str]:
    return list(dict.fromkeys(NUMBER.findall(ast.get_docstring(node) or "")))


def _is_test(node: Tested) -> bool:
    """Also a state machine of hypothesis, which pytest finds under another name."""
    return isinstance(node, ast.ClassDef) or node.name.startswith("test_")


def coverage(cases: Mapping[str, Case], tests: Path = TESTS) -> Coverage:
    """What the test modules under a folder claim."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for number, test in claims_of(path.read_text()):
            place = str(path.relative_to(tests))
            found.setdefault(number, []).append(f"{place}::{test}" if test else place)
    return Coverage(cases=dict(cases), claims={n: tuple(places) for n, places in found.items()})


def show(found: Coverage, console: Console) -> None:
    table = Table("case", "title", "tests", title="covered", box=None, title_justify="left")
    for number in found.covered:
        table.add_row(number, found.cases[number].title, "\n".join(found.claims[number]))
    console.print(table)
    table = Table("case", "title", "waits for", title="uncovered", box=None, title_justify="left")
    for number in found.uncovered:
        table.add_row(number, found.cases[number].title, found.cases[number].waits_for or "-")
    console.print(table)
    waiting = sum(found.cases[number].waits_for is not None for number in found.uncovered)
    console.print(
        f"{len(found.covered)} of {len(found.cases)} cases covered, "
        f"{len(found.uncovered)} uncovered ({waiting} of them wait for something)"
    )


def as_json(found: Coverage) -> bytes:
    return msgspec.json.encode(
        {
            "covered": {n: found.claims[n] for n in found.covered},
            "uncovered": {n: found.cases[n] for n in found.uncovered},
            "problems": found.problems,
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    found = coverage(read_cases())
    if parser.parse_args().json:
        sys.stdout.buffer.write(as_json(found) + b"\n")
    else:
        show(found, Console(width=None if sys.stdout.isatty() else 160))
    for problem in found.problems:
        sys.stderr.write(f"error: {problem}\n")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
