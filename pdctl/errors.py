"""The error tree.

Every expected failure is one of these: a sentence, then a hint. `cli/app.py` is the only
place that turns one into an exit code; foreign exceptions are translated where they enter.

    PdctlError                     1
    ├── UsageError                 2    a flag or an argument
    │   └── TopologyError          2    the file
    ├── ContractError              3    two replicas may not exchange KV cache
    ├── ClusterError               1    what runs: nothing, somebody else's, no agent
    │   └── AgentLost              1    a host's agent does not answer, or not ours
    ├── HostError                  4    unreachable, or not fit
    ├── LaunchError                5    failed or timed out; everything rolled back
    ├── InterruptedLaunch        130    Ctrl-C or a signal; everything rolled back
    └── HandoffError               1    one request's handoff; `cause` is its stable name
        ├── BudgetExceeded              "over_budget": the prompt can never fit
        ├── QueueFull                   "queue_full": too many prompts wait already
        ├── HandoffExpired              "expired": its deadline or its lease ran out
        ├── HandoffCancelled            "cancelled": either end asked for the end of it
        ├── PeerLost                    "peer_lost": the connection or the process went away
        ├── TicketRejected              "ticket": missing, forged, expired or used before
        ├── ContractRejected            "contract": the peer serves something else
        ├── TokensDiffer                "tokens": the two legs tokenised differently
        └── ProtocolViolation           "protocol": bytes or an order that cannot be
"""

from __future__ import annotations

from typing import ClassVar


class PdctlError(Exception):
    """Base of every expected failure.

    Args:
        message: one sentence that names the thing.
        hint: what to do about it; None where nothing useful can be said.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PdctlError):
    exit_code = 2


class TopologyError(UsageError):
    pass


class ContractError(PdctlError):
    exit_code = 3


class HostError(PdctlError):
    exit_code = 4


class ClusterError(PdctlError):
    pass


class AgentLost(ClusterError):
    pass


class LaunchError(PdctlError):
    exit_code = 5


class InterruptedLaunch(PdctlError):
    exit_code = 130


class HandoffError(PdctlError):
    """One request's handoff failed; nothing was committed on either end."""

    cause: ClassVar[str] = "handoff"


class BudgetExceeded(HandoffError):
    cause = "over_budget"


class QueueFull(HandoffError):
    cause = "queue_full"


class HandoffExpired(HandoffError):
    cause = "expired"


class HandoffCancelled(HandoffError):
    cause = "cancelled"


class PeerLost(HandoffError):
    cause = "peer_lost"


class TicketRejected(HandoffError):
    cause = "ticket"


class ContractRejected(HandoffError):
    cause = "contract"


class TokensDiffer(HandoffError):
    cause = "tokens"


class ProtocolViolation(HandoffError):
    cause = "protocol"


HANDOFF_CAUSES: dict[str, type[HandoffError]] = {
    kind.cause: kind
    for kind in (
        HandoffError,
        BudgetExceeded,
        QueueFull,
        HandoffExpired,
        HandoffCancelled,
        PeerLost,
        TicketRejected,
        ContractRejected,
        TokensDiffer,
        ProtocolViolation,
    )
}
"""From the stable name that travels (wire, counters, HTTP bodies) to the class."""


def handoff_error(cause: str, message: str) -> HandoffError:
    """The typed error for a cause that a peer named; unknown names stay a HandoffError."""
    return HANDOFF_CAUSES.get(cause, HandoffError)(message)
