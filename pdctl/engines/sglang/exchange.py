"""What all legs of this process share, in the place where SGLang wants its transfer backend's
common part."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager

from pdctl.engines.channel import Failed
from pdctl.engines.copier import Copier
from pdctl.engines.interface import Leg
from pdctl.engines.session import Session
from pdctl.engines.sglang.pool import SlotPool
from pdctl.errors import HandoffError
from pdctl.handoff.seam import ReceivingEnd, SendingEnd


class OneRank:
    """What SGLang's decode asks about a prefill server before it makes a receiver."""

    dp_size = 1
    follow_bootstrap_room = True


class EveryAddress:
    """The table of prefill servers: each has one rank, and nobody need be asked. The sender is
    dialled by the leg's own address."""

    def get(self, address: str) -> OneRank:
        return OneRank()


class Exchange(BaseKVManager):  # type: ignore[misc]
    """Made by SGLang before the replica has joined its cluster; `join` comes before any request.

    The first token and its room travel through SGLang's own rows (`MetadataBuffers`): prefill
    writes a row before the last `send`, and decode goes on with a request once its row names
    the room.
    """

    def __init__(self, args: Any, disaggregation_mode: Any, *_: Any, **__: Any) -> None:
        self.kv_args = args
        self.prefill_info_table = EveryAddress()
        self.exporter = Copier("pdctl-export")
        """Copies what prefill has computed out of the blocks, which SGLang takes back only after
        `PrefillLeg.abort` has returned: a job is short, and an abort waits for the one that is
        under way."""
        self._session: Session | None = None
        self._pool: SlotPool | None = None
        self._scheduler: Any = None

    def join(self, session: Session, pool: SlotPool, scheduler: Any) -> None:
        self._session, self._pool, self._scheduler = session, pool, scheduler

    def register_to_bootstrap(self) -> None:
        return

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    @property
    def session(self) -> Session:
        assert self._session is not None, "join() comes first"
        return self._session

    @property
    def pool(self) -> SlotPool:
        assert self._pool is not None, "join() comes first"
        return self._pool

    @property
    def sender(self) -> SendingEnd:
        """Raises HandoffError on a replica that does not send."""
        if self.session.sender is None:
            raise HandoffError(f'replica "{self.session.replica}" sends nothing')
        return self.session.sender

    @property
    def receiver(self) -> ReceivingEnd:
        """Raises HandoffError on a replica that does not receive."""
        if self.session.receiver is None:
            raise HandoffError(f'replica "{self.session.replica}" receives nothing')
        return self.session.receiver

    def observe(self, phase: str, seconds: float, peer: str) -> None:
        self.session.board.observe(phase, seconds, peer)

    def report(self, leg: Leg, side: str, error: HandoffError) -> None:
        """A leg that ended before its handoff began."""
        failed = Failed(room=leg.room, leg=side, cause=error.cause, detail=error.message)
        self.session.report(failed)

    # -- SGLang's rows

    def first_token(self, row: int | None) -> int:
        return int(self._rows.output_ids[row, 0])

    def fill_row(self, row: int | None, room: int, token: int, tokens: int) -> None:
        """What prefill would have written; the room last, since it opens the gate (R31).

        Args:
            tokens: of the prompt, none of which was computed here.
        """
        rows = self._rows
        rows.cached_tokens[row] = 0
        rows.cached_tokens[row, 0] = tokens
        for kept in (rows.output_token_logprobs_val, rows.output_top_logprobs_val):
            kept[row] = 0.0
        rows.output_top_logprobs_idx[row] = 0
        rows.output_token_logprobs_idx[row, 0] = token
        rows.output_ids[row, 0] = token
        rows.bootstrap_room[row, 0] = room

    @property
    def _rows(self) -> Any:
        return self._scheduler.disagg_metadata_buffers
