"""Topology texts for tests: a good one, and edits of it."""

from __future__ import annotations

GOOD = """\
schema = 1
name = "studio"

[model]
name = "tiny"
dtype = "float16"
context_length = 2048

[handoff]
timeout_s = 30

[router]
bind = "127.0.0.1:8000"

[[replicas]]
name = "p0"
engine = "mlx"
role = "prefill"
model = "/models/tiny"

[[replicas]]
name = "d0"
engine = "mlx"
role = "decode"
model = "/models/tiny"
"""

ORDINARY = """
[[replicas]]
name = "o0"
engine = "mlx"
role = "both"
model = "/models/tiny"
"""


def edited(old: str, new: str, count: int = 1) -> str:
    """GOOD with its first `count` occurrences of `old` replaced; `old` must be there."""
    assert old in GOOD
    return GOOD.replace(old, new, count)
