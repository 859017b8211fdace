"""Who one end of a handoff is, and how prompts are told apart."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdctl.errors import HandoffError


class Identity(msgspec.Struct, frozen=True):
    """One replica as its peers know it.

    `key` is the cluster's, secret; `digest` is the contract's.
    """

    replica: str
    key: bytes
    digest: str

    def __repr__(self) -> str:
        return f"Identity(replica={self.replica!r}, digest={self.digest!r})"


class Leg(Protocol):
    """The part of `pdctl.engines.interface.Leg` that a handoff reads."""

    @property
    def room(self) -> int: ...
    @property
    def ticket(self) -> str: ...
    @property
    def prefill(self) -> str: ...
    @property
    def decode(self) -> str: ...
    @property
    def sender(self) -> str: ...
    @property
    def timeout_s(self) -> float: ...


class Tokens(msgspec.Struct, frozen=True):
    """A prompt as its handoff knows it: the number of its token ids, and their `tokens_digest`."""

    count: int
    sha256: bytes

    @classmethod
    def of(cls, prompt: Sequence[int] | Tokens) -> Tokens:
        """Raises HandoffError as `tokens_digest` does."""
        return prompt if isinstance(prompt, Tokens) else cls(len(prompt), tokens_digest(prompt))


def tokens_digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the prompt's token ids, each as a little-endian uint32.

    Raises:
        HandoffError: no tokens, or an id that is not a uint32.
    """
    if len(token_ids) == 0:
        raise HandoffError("the prompt has no tokens")
    try:
        # of a list, an eighth of what numpy takes: it is an engine's own thread that waits
        ids = array("I", token_ids)
    except OverflowError as error:
        said = "the prompt's token ids are not unsigned 32-bit integers"
        raise HandoffError(said) from error
    except (ValueError, TypeError) as error:
        raise HandoffError(f"the prompt's token ids are not integers: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids).digest()
