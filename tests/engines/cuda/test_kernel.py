"""The kernel, as a GPU runs it. For an environment that has torch and triton; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdctl.engines.cuda.kernel import _copy

SHAPE = {"PAGE_HALF": 64 * 96, "WIDTH": 96, "DIM": 32, "LANES": 128, "ROWS": 16}
POINTERS = ("bases", "places", "addresses")
for engine, page, to_pages in ((tl.int64, tl.int64, True), (tl.float32, tl.bfloat16, False)):
    constants = {**SHAPE, "ENGINE": engine, "PAGE": page, "TO_PAGES": to_pages}
    types = {
        name: "constexpr" if name in constants else "*i64" if name in POINTERS else "i32"
        for name in _copy.arg_names
    }
    given = {(_copy.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(_copy, types, given), target=GPUTarget("cuda", 90, 32))
    print(len(made.asm["cubin"]))
"""


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """What the interpreter takes is more than what a GPU does: to machine code of an H200, moved
    as words and cast."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [int(size) > 1000 for size in done.stdout.split()] == [True, True]
