"""What is admitted on a sender, and what is to be sent of it."""

from __future__ import annotations

import msgspec

from pdctl.errors import HandoffError
from pdctl.handoff import wire
from pdctl.handoff.schedule import PagePart


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What was admitted."""

    room: int
    decode: str
    tokens: int
    token_sha256: bytes
    ticket_expires_at_s: float


class Over(msgspec.Struct, frozen=True):
    """Nothing more is to be sent but, where it is set, an Abort with this error."""

    tell: HandoffError | None


Step = wire.Offer | PagePart | wire.End | Over
