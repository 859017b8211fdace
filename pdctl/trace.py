"""Time, as the layers above measure it. One clock for all of pdctl."""

from __future__ import annotations

import time

monotonic_s = time.monotonic
"""Seconds; on Linux and macOS one clock for every process of a host."""
