"""What the scheduler's half and the worker's half of the connector tell each other, per step.

They may be one process (CUDA) or two (CPU): everything here is plain and picklable, and
travels in vLLM's own connector metadata, forwards with a step and back with its output.
"""

from __future__ import annotations

import enum

import msgspec

from pdctl.engines.interface import Leg


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A request with a leg has come."""

    request_id: str
    leg: Leg
    token_ids: list[int]
    salt: str | None = None
    """None: past the host's page store."""


class Seek(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of an ordinary or a prefill replica, part of which the host's page store may
    have."""

    request_id: str
    token_ids: list[int]
    salt: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A request has its blocks: what comes from elsewhere is to fill them from `held_tokens` on."""

    request_id: str
    blocks: list[int]
    held_tokens: int
    private: list[int]
    """Those of the blocks that this request shares with nobody."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """After this step, positions [0, positions) of a prompt stand in `blocks`."""

    request_id: str
    blocks: list[int]
    positions: int


class Doom(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose handoff failed before it had blocks: these are to be reported as not
    loaded, which is how vLLM fails one request."""

    request_id: str
    blocks: list[int]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The request has ended in the engine; None where it was aborted or failed."""

    request_id: str
    first_token: int | None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has, for the counters."""

    requests_active: int = 0
    prompt_tokens: int = 0
    """Since the last step; `output_tokens` too."""
    output_tokens: int = 0
    decoding: list[int] = []
    """Rooms of the decode requests that compute in this step."""
    decoded: list[int] = []
    """Of those that have ended since the last one."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step's orders, in the order in which the worker's half obeys them."""

    begin: list[Begin] = []
    seek: list[Seek] = []
    place: list[Place] = []
    doom: list[Doom] = []
    finish: list[Finish] = []
    release: list[int] = []
    """Rooms of prefill requests that have ended; their receivers will not come."""
    starts: list[str] = []
    """Requests whose first forward on imported positions is in this step."""
    export: list[Export] = []
    load: Load = Load()


class News(enum.StrEnum):
    RESERVED = "reserved"
    """Prefill: the pages of the whole prompt are there."""
    OFFERED = "offered"
    """Decode: the sender has reserved and offered the prompt."""
    FOUND = "found"
    """Ordinary, prefill: what the page store has of the prompt is known."""
    FAILED = "failed"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker's half tells back about one request."""

    request_id: str
    news: News
    tokens: int = 0
    """FOUND: of the prompt's first positions, how many need not be computed."""
