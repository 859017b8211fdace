"""Whose request it is."""

from __future__ import annotations

import enum


class Purpose(enum.Enum):
    CLIENT = "client"
    TRIAL = "trial"
    """The router's own, to measure a path."""
    CANARY = "canary"
    """The router's own, to warm up or to compare: its time tells nothing."""
