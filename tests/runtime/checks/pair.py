"""The topology that most checks are tried on: p0 on gpu1, d0 on studio."""

from __future__ import annotations

from pathlib import Path


def pair_text(
    name: str,
    model: str | Path,
    *,
    address: str,
    bind: str,
    router: str = "",
    studio: str = "studio.local",
    python: str | None = None,
    prefill: str = "",
    prefill_model: str | Path | None = None,
) -> str:
    """The file's text.

    Args:
        address: of gpu1, where p0's data plane is dialled.
        router, prefill: more lines of [router] and of p0.
        studio: its SSH destination.
        python: of both hosts.
        prefill_model: p0's, where that is not d0's.
    """
    own = f'python = "{python}"' if python is not None else ""
    return f"""
schema = 1
name = "{name}"
[model]
name = "tiny"
context_length = 2048
[router]
bind = "{bind}"
{router}
[hosts.gpu1]
ssh = "gpu1"
address = "{address}"
{own}
[hosts.studio]
ssh = "{studio}"
{own}
[[replicas]]
name = "p0"
host = "gpu1"
engine = "mlx"
role = "prefill"
model = "{prefill_model or model}"
{prefill}
[[replicas]]
name = "d0"
host = "studio"
engine = "mlx"
role = "decode"
model = "{model}"
"""
