"""What a process that speaks with agents imports."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
from pdctl.runtime.agent.oscar import xoscar
assert xoscar.StatelessActor
assert [name for name in ("pandas", "scipy.sparse") if name in sys.modules] == []
import pandas, scipy.sparse
assert pandas.DataFrame({"a": [1]}).shape == (1, 1)
assert scipy.sparse.eye(2).shape == (2, 2)
"""
BEFORE = """
import pandas, scipy.sparse
from pdctl.runtime.agent.oscar import xoscar
assert scipy.sparse.eye(2).shape == pandas.DataFrame([[1, 2], [3, 4]]).shape
"""


def test_libraries_for_frames_are_loaded_when_they_are_used() -> None:
    """And not before; nothing of them is missing then."""
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, timeout=180)


def test_libraries_that_are_here_already_stay() -> None:
    subprocess.run([sys.executable, "-c", BEFORE], check=True, timeout=180)
