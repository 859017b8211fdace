"""The figures on docs/fidelity.md are those of the result file that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "fidelity.md").read_text()


def rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """The table's, from the largest errors and the smallest share over all layers."""
    for each in results:
        errors = [
            f"{max(layer[half][name] for layer in each['worst']):.{digits}f}"
            for half in ("k", "v")
            for name, digits in (("absolute", 4), ("relative", 6))
        ]
        same = min(layer[half]["same"] for layer in each["worst"] for half in ("k", "v"))
        engine = f"{each['engine']} {each['engine_version']}"
        yield f"| {' | '.join((each['model'], engine, *errors, f'{same:.1%}'))} |"


def test_the_pages_figures_are_those_of_its_result_file() -> None:
    """Row by row, in the file's order; the bound and the reference too."""
    (name,) = re.findall(r"Layer by layer: `(bench/results/[\w-]+\.json)`", PAGE)
    report = json.loads((ROOT / name).read_text())
    table = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert table[1:] == list(rows(report["results"]))
    assert report["met"]
    assert f"{report['bound_relative']:.6f}" in PAGE
    assert f"transformers {report['reference']['transformers']}" in PAGE


def test_the_long_prompts_figures_are_those_of_theirs() -> None:
    """K grows apart with the position, V does not."""
    (name,) = re.findall(r"`(bench/results/[\w-]+-2000-tokens\.json)`", PAGE)
    (result,) = json.loads((ROOT / name).read_text())["results"]
    for half in ("k", "v"):
        assert f"{max(layer[half]['relative'] for layer in result['worst']):.6f}" in PAGE
