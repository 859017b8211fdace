"""Where pdctl keeps things on a host."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """Where every cluster's folder lies: `~/.local/state/pdctl`, XDG_STATE_HOME honoured."""
    base = os.environ.get("XDG_STATE_HOME")
    home = Path(base) if base and os.path.isabs(base) else Path.home() / ".local" / "state"
    return home / "pdctl"


def nearest(path: Path) -> Path:
    """The path itself, or the closest parent that exists."""
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))
