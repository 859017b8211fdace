"""What must not stand in the source, whoever writes it: found by reading it, not by running it."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.engines.mlx.spec import ABORT_PATH
from pdctl.handoff.outbound import Outbound
from pdctl.runtime.router import endpoints

ROOT = Path(__file__).parent.parent / "pdctl"

WAITING = frozenset(
    "wait wait_for join get acquire result sleep recv recv_into send sendall".split()
)
"""Methods that may block, with no argument that says otherwise."""

LOOP_FILES = "batch exporter importer kvcache legs loop sampling versions call".split()
"""What the MLX loop's thread runs; some of it runs on other threads too."""

MAY_WAIT = {
    "call.Call.first": "the request's own HTTP thread waits for its answers",
    "call.Call.responses": "the request's own HTTP thread",
    "legs.DecodeLeg.offered": "a handoff's thread, which waits for a slot",
    "loop.EngineLoop._do_work": "idle: nothing is in the batch",
    "loop.EngineLoop.stop_and_join": "the main thread, at the end",
}

ENGINE_CALLS = "written begin_last finish fail cancel pages".split()
"""Of `Outbound`: what an engine's thread calls while pages are on their way."""

ASKS = frozenset("snapshot status refresh poll counters members describe changes".split())

MAY_POLL = {
    "runtime/bench/measure.py": "counters that lag an answer, five times at most",
    "runtime/change/draining.py": "what still runs is counted where it runs and is not pushed",
}


ENGINES_OWN = {
    endpoints.READY: "engines/sglang/joining.py",
    endpoints.COMPLETIONS: "engines/vllm/spec.py",
}
"""Paths of the router's that an engine's own server has too, and where that one is spelt."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(class.function, node) of a module's functions and methods."""
    for node in parsed(path).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + each.name, each


def waits(node: ast.AST) -> list[str]:
    """Calls below a node that may block."""
    found = []
    for call in ast.walk(node):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        # `mapping.get(key)` and `",".join(parts)` look nothing up elsewhere
        looks_up = call.func.attr in ("get", "join", "wait_for") and call.args
        if call.func.attr in WAITING and not looks_up:
            found.append(ast.unparse(call))
    return found


def test_the_engines_thread_waits_for_nothing_but_work() -> None:
    """R11: every blocking call in what the MLX loop runs is one of those that are listed here,
    with the thread that makes it."""
    found = {
        f"{name}.{function}": waits(node)
        for name in LOOP_FILES
        for function, node in functions(ROOT / "engines/mlx" / f"{name}.py")
        if waits(node)
    }
    assert set(found) == set(MAY_WAIT), found


@pytest.mark.parametrize("call", ENGINE_CALLS)
def test_what_the_engine_calls_of_a_handoff_blocks_on_nothing(call: str) -> None:
    """R11: neither itself nor what it calls of its own; it takes a lock that no send holds."""
    seen: set[str] = set()
    todo = [call]
    while todo:
        name = todo.pop()
        method = getattr(Outbound, name, None)
        if name in seen or not inspect.isfunction(method):
            continue
        seen.add(name)
        node = ast.parse(textwrap.dedent(inspect.getsource(method)))
        assert waits(node) == [], name
        todo += [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    assert call in seen


def test_no_loop_asks_a_control_plane_every_so_often() -> None:
    """R64: a loop that sleeps a fixed time and asks for a picture in between is a poll; what
    changes is pushed, or waited for in a call that answers when it changed."""
    polling = {}
    for path in sorted(ROOT.rglob("*.py")):
        for loop in ast.walk(parsed(path)):
            if isinstance(loop, ast.While | ast.For):
                called = {
                    node.func.attr
                    for node in ast.walk(loop)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                }
                if "sleep" in called and called & ASKS:
                    polling[str(path.relative_to(ROOT))] = loop.lineno
    assert set(polling) <= set(MAY_POLL), polling


def test_each_endpoint_is_spelt_in_one_place() -> None:
    """R70: the router's paths and headers in `endpoints.py`, the engines' own in their spec."""
    named = {
        value: "runtime/router/endpoints.py"
        for name, value in vars(endpoints).items()
        if name.isupper() and isinstance(value, str) and value != "/"
    }
    named[ABORT_PATH] = "engines/mlx/spec.py"
    assert len(named) > 8
    for path in sorted(ROOT.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and node.value in named:
                places = {named[node.value], ENGINES_OWN.get(node.value)}
                assert place in places, f"{place}:{node.lineno} spells {node.value}"


def test_the_router_encodes_no_prompt_on_its_event_loop() -> None:
    """R39: it has nothing to encode one with; the policy that needs it loads a tokenizer and a
    template in a thread, and encodes there."""
    code = (
        "import sys, pdctl.runtime.router.server, pdctl.runtime.router.__main__;"
        "print(*{'tokenizers', 'transformers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
