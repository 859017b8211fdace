"""Every path and header that the router serves or sends, once."""

from __future__ import annotations

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
MODELS = "/v1/models"
MODEL = "/v1/models/{model}"
HEALTH = "/health"
READY = "/ready"
METRICS = "/metrics"
STATUS = "/status"
HOME = "/"

GENERATION = frozenset({COMPLETIONS, CHAT_COMPLETIONS})
OPEN = frozenset({HOME, HEALTH, READY})
"""Answered without an API key: they say nothing about anybody's request."""

PATH_HEADER = "x-pdctl-path"
"""Request: pins the path. Response: the path taken, `p0>d0` or `o0`."""
ROOM_HEADER = "x-pdctl-room"
TRANSPORT_HEADER = "x-pdctl-transport"
"""Response of a pair: how its pages moved."""
RETRIED_HEADER = "x-pdctl-retried"
"""Response: the path of a first try that failed on a dead replica, where there was one."""
DECISION_HEADER = "x-pdctl-decision"
"""Response, with `disaggregate = "auto"`: why this path, and what was expected of each."""
