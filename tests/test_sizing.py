"""The guide to sizes and deadlines says what the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import Dtype, Handoff, Model, Router, Sharing

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "sizing.md").read_text()
ROWS = re.findall(r"^\| `([a-z_.]+)\.([A-Z_]+)` \| ([0-9.]+) \|", GUIDE, re.MULTILINE)

SECTIONS = {"model": Model, "handoff": Handoff, "sharing": Sharing, "router": Router}
SIZED = ("_bytes", "_length", "_s")
"""What the name of a budget or of a deadline ends with."""

KEYS = [
    f"{section}.{field.name}"
    for section, kind in SECTIONS.items()
    for field in msgspec.structs.fields(kind)
    if field.name.endswith(SIZED)
]


def constant(module: str, name: str) -> object:
    """A number from a module's source: an engine's own modules need the engine to be imported."""
    source = (ROOT / "pdctl" / f"{module.replace('.', '/')}.py").read_text()
    (value,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]
    )
    return eval(ast.unparse(value), {"__builtins__": {}})


def test_the_topology_has_budgets_and_deadlines() -> None:
    """The keys that the guide must name are found at all."""
    assert {"handoff.buffer_bytes", "handoff.timeout_s", "sharing.buffer_bytes"} <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_every_budget_and_deadline_of_a_topology_is_in_the_guide(key: str) -> None:
    """R73: with a formula where it is a budget, with its start where it is a deadline."""
    assert f"`{key}`" in GUIDE
    if key.endswith("_s"):
        assert f"`{key}`" in GUIDE.partition("## When each deadline starts")[2]
    else:
        (row,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{key}`")]
        assert row.split("|")[4].strip()


@pytest.mark.parametrize(("module", "name", "value"), ROWS)
def test_the_guides_fixed_limits_are_the_codes(module: str, name: str, value: str) -> None:
    """R73, R3: a limit that changes, changes in the guide."""
    assert constant(module, name) == float(value)


def test_the_guides_fixed_limits_are_found() -> None:
    """The tables above are read, not skipped."""
    assert len(ROWS) == 37


def test_the_guides_example_is_right() -> None:
    """R73: the formulas, for SmolLM2-135M, against the contract's own numbers."""
    contract = Contract(
        weights="w",
        tokenizer="t",
        chat_template="c",
        attention=Attention(kind="full", layers=30, kv_heads=3, head_dim=64),
        positions=Positions(rope_theta=1e5, max_positions=8192, context_length=2048),
        dtype=Dtype.FLOAT16,
    )
    pages = -(-2000 // contract.page_tokens)
    for number in (
        contract.token_kv_bytes,
        contract.page_bytes,
        pages * contract.page_bytes,
    ):
        assert f"{number:,}" in GUIDE
    assert f"{pages} pages" in GUIDE
