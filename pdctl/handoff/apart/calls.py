"""What the engine's process and its data plane's process tell each other.

Pages never travel here: they lie in memory that both have, and calls name the place. A handoff
is named by its `number`, which the engine's side counts: a room may be asked for twice.
"""

from __future__ import annotations

import msgspec

from pdctl.errors import HandoffError, handoff_error
from pdctl.handoff.identity import Leg, Tokens
from pdctl.handoff.opening import Opening


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all."""


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """A HandoffError as it travels."""

    cause: str
    message: str
    hint: str | None

    @classmethod
    def of(cls, error: HandoffError) -> Trouble:
        return cls(error.cause, error.message, error.hint)

    def error(self) -> HandoffError:
        return type(handoff_error(self.cause, ""))(self.message, hint=self.hint)


class SentLeg(msgspec.Struct, frozen=True, array_like=True):
    """The `Leg` of one request."""

    room: int
    ticket: str
    prefill: str
    decode: str
    sender: str
    timeout_s: float

    @classmethod
    def of(cls, leg: Leg) -> SentLeg:
        return cls(leg.room, leg.ticket, leg.prefill, leg.decode, leg.sender, leg.timeout_s)


# -- from the engine


class Open(Call, frozen=True):
    """First, once. It holds secrets, so they come this way and no other."""

    opening: Opening


class Admit(Call, frozen=True):
    number: int
    leg: SentLeg
    tokens: Tokens


class Written(Call, frozen=True):
    number: int
    tokens: int
    computed_at: float
    layers: int | None


class SkipLast(Call, frozen=True):
    """The last position is not written: nobody wants it."""

    number: int


class Finish(Call, frozen=True):
    number: int
    first_token: int


class Fail(Call, frozen=True):
    """Ends a handoff of either end; None: it was cancelled."""

    number: int
    trouble: Trouble | None


class Dropped(Call, frozen=True):
    """No array of the engine's process lies over these pages any more."""

    number: int


class Release(Call, frozen=True):
    room: int


class Fetch(Call, frozen=True):
    number: int
    leg: SentLeg
    tokens: Tokens


class Wanted(Call, frozen=True):
    """The sink's answer to Offered."""

    number: int
    tokens: int
    held_tokens: int
    first_token: bool


class Taken(Call, frozen=True):
    """So many more pieces may be overwritten."""

    number: int
    pieces: int


class Refused(Call, frozen=True):
    """The sink raised."""

    number: int
    trouble: Trouble


class Ended(Call, frozen=True):
    """The sink's `commit` or `abort` has returned."""

    number: int


class Pong(Call, frozen=True):
    """The answer to Ping."""


class Close(Call, frozen=True):
    """Last."""


Order = (
    Open | Admit | Written | SkipLast | Finish | Fail | Dropped | Release
    | Fetch | Wanted | Taken | Refused | Ended | Pong | Close
)  # fmt: skip


# -- from the data plane


class Opened(Call, frozen=True):
    """The answer to Open: the port that listens, or what was in the way."""

    port: int | None
    trouble: Trouble | None = None


class Reserved(Call, frozen=True):
    """The prompt's pages begin there in the shared memory."""

    number: int
    offset: int


class Granted(Call, frozen=True):
    """The receiver wants positions up to there."""

    number: int
    tokens: int


class Offered(Call, frozen=True):
    number: int
    tokens: int
    deadline: float


class Piece(Call, frozen=True):
    """Received and checked; it lies there until it is taken."""

    number: int
    page: int
    first_layer: int
    layers: int
    offset: int


class Commit(Call, frozen=True):
    number: int
    first_token: int | None


class Abort(Call, frozen=True):
    number: int
    trouble: Trouble


class Settled(Call, frozen=True):
    """The end of a handoff, on either end; its counters have come before.

    `refused`: it never began, and nobody was told.
    """

    number: int
    done: bool
    trouble: Trouble | None = None
    refused: bool = False


class Failed(Call, frozen=True):
    room: int
    cause: str
    detail: str


class Counted(Call, frozen=True):
    peer: str | None
    amounts: dict[str, int]


class FailureCounted(Call, frozen=True):
    cause: str


class Gauged(Call, frozen=True):
    values: dict[str, int]


class Observed(Call, frozen=True):
    phase: str
    seconds: float
    peer: str


class Met(Call, frozen=True):
    peer: str
    round_trip_s: float


class Ping(Call, frozen=True):
    """Asks whether anybody is still there."""


class Rooms(Call, frozen=True):
    """Open handoffs: room → seconds since their last progress. Now and then, while any is open,
    and once after the last."""

    idle_s: dict[int, float]


News = (
    Opened | Reserved | Granted | Offered | Piece | Commit | Abort | Settled
    | Failed | Counted | FailureCounted | Gauged | Observed | Met | Rooms | Ping
)  # fmt: skip
