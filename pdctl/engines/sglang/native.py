"""SGLang's own NIXL backend, as a replica of a cluster (`transport = "native"`).

It is SGLang's in everything that moves the KV cache. Added is: what it listens on is the address
that the topology names; host memory is called host memory; between CPUs its NIXL rests while
nothing moves; and its legs are counted, and their failures told, where SGLang itself learns of
their end.

All methods but the bootstrap server's are called by the scheduler's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl import (
    NixlKVBootstrapServer,
    NixlKVManager,
    NixlKVReceiver,
    NixlKVSender,
)
from sglang.srt.utils.network import get_local_ip_auto

from pdctl.engines.channel import Failed
from pdctl.engines.interface import Leg
from pdctl.engines.session import Session
from pdctl.errors import HandoffError, PeerLost
from pdctl.handoff.counters import OF_PAGES
from pdctl.handoff.transport.progress import resting

ASKED_TO_END = "Aborted by"
"""How SGLang says that the other end of a leg was told to end it."""


class NativeServer(NixlKVBootstrapServer):  # type: ignore[misc]
    """Where decode servers ask a prefill server for its ranks: beside the HTTP server, which
    listens on loopback, and at the address that the ranks have."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(get_local_ip_auto(), port)


class NativeManager(NixlKVManager):  # type: ignore[misc]
    def __init__(self, args: Any, mode: Any, server_args: Any, *rest: Any, **named: Any) -> None:
        self.on_host = server_args.device == "cpu"
        if self.on_host:
            # else SGLang registers it as a GPU's
            args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        self._session: Session | None = None
        with resting(import_module("nixl")) if self.on_host else contextlib.nullcontext():
            super().__init__(args, mode, server_args, *rest, **named)

    def register_to_bootstrap(self) -> None:
        self.bootstrap_host = self.local_ip
        super().register_to_bootstrap()

    def join(self, session: Session, pool: object, scheduler: object) -> None:
        self._session = session
        session.board.untell(OF_PAGES)

    @property
    def session(self) -> Session:
        assert self._session is not None, "join() comes first"
        return self._session

    def moved(self, pages: int) -> dict[str, int]:
        """So many of SGLang's pages, as bytes by the counter that they belong to."""
        name = "host_bytes" if self.on_host else "gpu_bytes"
        return {name: pages * self.kv_item_lens_sum}


class Account:
    """Counts one leg, once at its begin and once at its end."""

    def __init__(self, manager: NativeManager, leg: Leg, side: str, peer: str) -> None:
        self._manager, self._leg, self._side, self._peer = manager, leg, side, peer
        self._open = True
        manager.session.board.add(peer=peer, handoffs_active=1)

    def completed(self, **amounts: int) -> None:
        self._end(handoffs_completed=1, **amounts)

    def cancelled(self) -> None:
        self._end(handoffs_cancelled=1)

    def failed(self, error: HandoffError) -> None:
        if not self._open:
            return
        session, leg = self._manager.session, self._leg
        self._end(handoffs_failed=1)
        session.board.failure(error.cause)
        session.report(
            Failed(room=leg.room, leg=self._side, cause=error.cause, detail=error.message)
        )

    def _end(self, **amounts: int) -> None:
        if self._open:
            self._open = False
            board = self._manager.session.board
            board.add(peer=self._peer, handoffs_active=-1, **amounts)


class Counted:
    """What both ends of a leg have in common; stands before SGLang's own class."""

    side: str
    account: Account | None = None
    kv_mgr: NativeManager
    bootstrap_room: int

    def begin(self, leg: Leg, token_ids: Sequence[int], salt: str | None = None) -> None:
        """Counts from here on. Of a page store, which `salt` would be for, it takes nothing."""
        peer = leg.decode if self.side == "prefill" else leg.prefill
        self.tokens = len(token_ids)
        self.account = Account(self.kv_mgr, leg, self.side, peer)

    def fail(self, leg: Leg, error: HandoffError) -> None:
        """The leg was not begun; SGLang's own end goes on."""
        self.kv_mgr.session.report(
            Failed(room=leg.room, leg=self.side, cause=error.cause, detail=error.message)
        )

    def abort(self) -> None:
        if self.account is not None:
            self.account.cancelled()
        super().abort()  # type: ignore[misc]

    def poll(self) -> int:
        found = super().poll()  # type: ignore[misc]
        if self.account is not None and found == KVPoll.Success:
            self.account.completed(**self.amounts())
        elif self.account is not None and found == KVPoll.Failed:
            reason = self.kv_mgr.failure_records.get(self.bootstrap_room) or ""
            if reason.startswith(ASKED_TO_END):
                self.account.cancelled()
            else:
                self.account.failed(PeerLost(reason or "SGLang's own handoff failed"))
        return int(found)

    def amounts(self) -> dict[str, int]:
        """What a completed leg has moved."""
        raise NotImplementedError


class NativeSender(Counted, NixlKVSender):  # type: ignore[misc]
    side = "prefill"

    def amounts(self) -> dict[str, int]:
        return self.kv_mgr.moved(self._transfer_num_kv_indices)


class NativeReceiver(Counted, NixlKVReceiver):  # type: ignore[misc]
    side = "decode"
    pages = held_tokens = 0

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **more: Any,
    ) -> None:
        self.pages, self.held_tokens = len(kv_indices), decode_prefix_len or 0
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **more)

    def amounts(self) -> dict[str, int]:
        imported = {"imported_tokens": self.tokens - self.held_tokens}
        return {**imported, **self.kv_mgr.moved(self.pages)}
