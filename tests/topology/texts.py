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


NATIVE = edited("timeout_s = 30", 'transport = "native"')

APART = """
[hosts.a]
ssh = "a"
address = "10.0.0.1"
[hosts.b]
ssh = "b"
address = "10.0.0.2"
"""


def native_between(prefill: str, decode: str, text: str = NATIVE) -> str:
    """NATIVE, or another text of its kind, with these engines."""
    head, p0, d0 = text.split("[[replicas]]")
    pair = (p0.replace('"mlx"', f'"{prefill}"'), d0.replace('"mlx"', f'"{decode}"'))
    return "[[replicas]]".join((head, *pair))


def native_apart(engine: str, hosts: str = APART) -> str:
    """The same of one engine, on two hosts."""
    text = native_between(engine, engine).replace('name = "p0"', 'name = "p0"\nhost = "a"')
    return text.replace('name = "d0"', 'name = "d0"\nhost = "b"') + hosts
