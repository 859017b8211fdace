"""The connector's half in vLLM's worker: it owns the handoff's ends and obeys steps.

The worker's process is the one that owns KV memory, so it is the one that attaches to the
agent: the key and the contract come over the agent's 0600 socket into this process alone, and
neither vLLM's scheduler nor its HTTP server ever has them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from pdctl.engines.channel import Failed
from pdctl.engines.exports import Exports, Taker
from pdctl.engines.vllm.inlet import Inlet
from pdctl.engines.vllm.interface import Blocks, Span
from pdctl.engines.vllm.legs import DecodeLeg, PrefillLeg
from pdctl.engines.vllm.session import Session
from pdctl.engines.vllm.sharing import Sharer, Sharing
from pdctl.engines.vllm.steps import Begin, Doom, Export, Finish, News, Notice, Place, Seek, Step
from pdctl.errors import HandoffError
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.pulse import guarded
from pdctl.handoff.store.interface import PageStore
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.engines.vllm")


class WorkerHalf:
    """`obey`, `saved` for each layer, `forwarded` and `collect` are called in that order by the
    worker's thread in each step; the `Desk` methods by any thread.

    Args:
        step_tokens: vLLM computes no more in one step.
    """

    def __init__(self, session: Session, blocks: Blocks, *, step_tokens: int) -> None:
        self._session = session
        self._blocks = blocks
        self._inlet: Inlet | None = None
        self._sharing: Sharing | None = None
        if session.store is not None:
            self._share(session.store, step_tokens)
        self._exports = Exports(blocks, by_layer=self._sharing is None or self._sends)
        self._prefill: dict[str, PrefillLeg] = {}
        self._decode: dict[str, DecodeLeg] = {}
        self._sharers: dict[str, Sharer] = {}
        self._started: list[tuple[float, str]] = []
        self._lock = threading.Lock()
        self._notices: list[Notice] = []
        self._is_heard = False
        self._loaded: set[str] = set()
        self._lost: set[int] = set()

    def obey(self, step: Step) -> None:
        """Before the forward, and also in a step without one."""
        self._session.count(step.load)
        for begin in step.begin:
            self.begin(begin)
        for seek in step.seek:
            self.seek(seek)
        for place in step.place:
            self._place(place)
        for doom in step.doom:
            self._doomed(doom)
        for room in step.release:
            if self._session.sender is not None:
                guarded(partial(self._session.sender.release, room))
        for request_id in step.starts:
            self._starts(request_id)
        for finish in step.finish:
            self._finish(finish)

        self._exports.begin(list(self._spans(step.export)))

    def saved(self, layer_name: str) -> None:
        """Inside the forward: what it computes of that layer stands in the blocks."""
        self._exports.saved(layer_name)

    def forwarded(self, step: Step, error: BaseException | None = None) -> None:
        """After the forward: what it computed stands in the blocks, unless it raised `error`."""
        if error is not None:
            self._exports.fail(error)
        self._exports.finish()
        for export in step.export:
            if (sending := self._prefill.get(export.request_id)) is not None:
                sending.computed(export.positions)
        now = monotonic_s()
        for started_at, peer in self._started:
            self.observe("first_token", now - started_at, peer)
        self._started.clear()

    def collect(self) -> tuple[list[Notice], set[str], set[int]]:
        """(news, requests whose loading has ended, blocks that were not filled) since the last
        step, in one look: a request's lost blocks never come without its end."""
        with self._lock:
            told = [] if self._is_heard else self._notices
            found = told, self._loaded, self._lost
            self._loaded, self._lost = set(), set()
            if not self._is_heard:
                self._notices = []
        return found

    def close(self) -> None:
        """Bounded."""
        if self._sharing is not None:
            self._sharing.close()

    # -- Line

    def seek(self, seek: Seek) -> None:
        try:
            if self._sharing is not None:
                self._sharers[seek.request_id] = self._sharing.seek(seek)
                return
        # a prompt that can't be looked for is computed
        except Exception:
            log.exception("request=%s its prompt can't be looked for", seek.request_id)
        self.found(seek.request_id, 0)

    def begin(self, begin: Begin) -> None:
        leg, replica = begin.leg, self._session.replica
        side = "prefill" if leg.prefill == replica else "decode"
        try:
            if leg.prefill == replica and self._session.sender is not None:
                sending = PrefillLeg(begin.request_id, self, len(begin.token_ids))
                self._prefill[begin.request_id] = sending
                sending.start(self._session.sender, leg, begin.token_ids)
            elif leg.decode == replica and self._session.receiver is not None:
                receiving = DecodeLeg(
                    *(begin.request_id, self, self._blocks),
                    inlet=self._inlet if begin.salt is not None else None,
                    salt=begin.salt or "",
                )
                self._decode[begin.request_id] = receiving
                receiving.start(self._session.receiver, leg, begin.token_ids)
            else:
                raise HandoffError(f'replica "{replica}" is no end of {leg.prefill}>{leg.decode}')
        except HandoffError as error:
            self._fail(begin, side, error)
        # the engine goes on, whatever this request met (R34)
        except Exception as error:
            log.exception("request=%s its handoff could not begin", begin.request_id)
            self._fail(begin, side, HandoffError(f"the {side} engine failed: {error!r}"))

    def news(self) -> list[Notice]:
        with self._lock:
            self._is_heard = True
            found, self._notices = self._notices, []
        return found

    # -- Desk, from any thread

    def reserved(self, request_id: str) -> None:
        self._note(request_id, News.RESERVED)

    def offered(self, request_id: str) -> None:
        self._note(request_id, News.OFFERED)

    def found(self, request_id: str, tokens: int) -> None:
        self._note(request_id, News.FOUND, tokens)

    def failed(self, request_id: str) -> None:
        self._note(request_id, News.FAILED)

    def loaded(self, request_id: str, lost: Sequence[int]) -> None:
        with self._lock:
            self._loaded.add(request_id)
            self._lost.update(lost)

    def observe(self, phase: str, seconds: float, peer: str) -> None:
        self._session.board.observe(phase, seconds, peer)

    # -- inside, on the worker's thread

    @property
    def _sends(self) -> bool:
        return self._session.sender is not None

    def _share(self, store: PageStore, step_tokens: int) -> None:
        """A decode replica takes pages from there, the others also give some."""
        if self._session.receiver is not None:
            self._inlet = Inlet(store, self._blocks)
            return
        pages = PageGeometry.of(self._session.assigned.contract)
        self._sharing = Sharing(
            *(store, self._blocks, pages),
            step_tokens=step_tokens,
            found=self.found,
            loaded=self._shared,
        )

    def _shared(self, request_id: str, lost: Sequence[int]) -> None:
        """The copier's thread. A handoff whose prompt can't be computed ends before vLLM ends
        the request."""
        sending = self._prefill.get(request_id)
        if lost and sending is not None:
            sending.deprive()
        self.loaded(request_id, lost)

    def _note(self, request_id: str, news: News, tokens: int = 0) -> None:
        with self._lock:
            self._notices.append(Notice(request_id=request_id, news=news, tokens=tokens))

    def _fail(self, begin: Begin, side: str, error: HandoffError) -> None:
        detail = error.message
        failed = Failed(room=begin.leg.room, leg=side, cause=error.cause, detail=detail)
        self._session.report(failed)
        self.failed(begin.request_id)

    def _place(self, place: Place) -> None:
        if place.private:
            self._blocks.fence()
        filled = self._decode.get(place.request_id) or self._sharers.get(place.request_id)
        if filled is not None:
            filled.place(place.blocks, place.held_tokens, place.private)
        elif place.private:
            self.loaded(place.request_id, place.private)

    def _doomed(self, doom: Doom) -> None:
        self.loaded(doom.request_id, doom.blocks)

    def _starts(self, request_id: str) -> None:
        receiving = self._decode.get(request_id)
        if receiving is None or receiving.committed_at is None:
            return
        now = monotonic_s()
        self.observe("import", now - receiving.committed_at, receiving.peer)
        self._started.append((now, receiving.peer))

    def _finish(self, finish: Finish) -> None:
        """One that fails holds up none of the others (R36)."""
        sending = self._prefill.pop(finish.request_id, None)
        if sending is not None:
            guarded(lambda: sending.finish(finish.first_token))
        receiving = self._decode.pop(finish.request_id, None)
        if receiving is not None:
            guarded(lambda: receiving.finish(aborted=finish.first_token is None))
        sharer = self._sharers.pop(finish.request_id, None)
        if sharer is not None:
            guarded(sharer.finish)

    def _spans(self, exports: Sequence[Export]) -> Iterator[tuple[Taker[Span], Span]]:
        for export in exports:
            sharer = self._sharers.get(export.request_id)
            saving = sharer.saving(export.blocks, export.positions) if sharer else None
            if saving is not None:
                yield saving, saving.span
            sending = self._prefill.get(export.request_id)
            span = sending.span(export.blocks, export.positions) if sending else None
            if sending is not None and span is not None:
                yield sending, span
