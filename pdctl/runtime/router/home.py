"""The status page at `/`: one packaged file, which asks `/status` for all that it shows."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files
from typing import NamedTuple

PAGE = "page.html"

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class Home(NamedTuple):
    html: str
    headers: dict[str, str]


@functools.cache
def home() -> Home:
    """The page, which is the same for every cluster and says nothing about any, and headers under
    which a browser runs its own style and script and nothing else."""
    html = files("pdctl.runtime.router").joinpath(PAGE).read_text("utf-8")
    return Home(
        html,
        {
            "Content-Security-Policy": policy_of(html),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def policy_of(html: str) -> str:
    """A Content-Security-Policy that names the inline style and script by their digests."""
    digests = {kind: _digest(text) for kind, text in _INLINE.findall(html)}
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {digests['style']}",
            f"script-src {digests['script']}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
