"""Continuous batching: calls in, tokens out, positions exported on the way. Loop's thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm.server as library
from mlx_lm.models.cache import trim_prompt_cache

from pdctl.engines.mlx import versions
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.kvcache import SequenceCache, empty_caches, taken_over
from pdctl.engines.mlx.legs import DecodeLeg, PrefillLeg
from pdctl.engines.mlx.shared import SharedPrefix
from pdctl.errors import HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.engines.mlx")


class Batch:
    """The library's BatchGenerator and the calls that are in it.

    `ended(call, error)` is called when a call is over: its last token, or its own failure.
    """

    def __init__(
        self,
        provider: Any,
        prompt_cache: Any,
        board: CounterBoard,
        ended: Callable[[Call, BaseException | None], None],
    ) -> None:
        args = provider.cli_args
        self._tokenizer = provider.tokenizer
        self._detokenizer = provider.tokenizer.detokenizer
        self._layers = len(provider.model.layers)
        self._cache_key = provider.model_key
        self._cache_bytes = args.prompt_cache_bytes
        self._prefixes = prompt_cache
        self._board = board
        self._ended = ended
        self._calls: dict[int, Call] = {}
        self._imported: list[Call] = []
        self._sent_early: set[int] = set()
        """Whose first token went out before the step that reports it: on a CPU that step's
        own forward comes first, which would cost every request one token's time."""
        self._generator = library.BatchGenerator(
            provider.model,
            completion_batch_size=args.decode_concurrency,
            prefill_batch_size=args.prompt_concurrency,
            prefill_step_size=args.prefill_step_size,
            stream=mx.default_stream(mx.default_device()),
        )

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(self._calls.values())

    def insert(self, call: Call) -> None:
        """Adds a call: on what its leg imported, on the longest prefix kept, or from nothing."""
        tokens = call.prompt.tokens
        leg, shared = call.leg, _shared(call)
        if isinstance(leg, DecodeLeg) and leg.memory is not None:
            # n-1 positions came, so exactly the last token is left to compute
            caches, held, segments = leg.memory.caches(), leg.memory.positions, [tokens[-1:]]
            self._imported.append(call)
        elif shared is not None and shared.memory is not None:
            caches, held = shared.memory.caches(), shared.memory.positions
            segments = self._remaining(call, held)
        else:
            caches, held = self.kept_prefix(call)
            segments = self._remaining(call, held)
        call.context.prompt_cache_count = held
        call.detokenizer = versions.fresh(self._detokenizer)
        call.uid = versions.insert(
            self._generator,
            segments,
            cached=tokens[:held],
            cache=caches,
            max_tokens=call.args.max_tokens,
            sampler=call.sampler,
            processors=call.processors,
            stops=call.stops,
        )
        self._calls[call.uid] = call

    def remove(self, call: Call) -> None:
        """Takes a call out at whatever stage it is; no-op for one that is not in."""
        if call.uid is not None and self._calls.pop(call.uid, None) is not None:
            self._generator.remove([call.uid])
            self._sent_early.discard(call.uid)
            self._left(call)

    def step(self) -> None:
        """One decode step for everyone, then at most one chunk of prompts."""
        self._observe_imports()
        prompts, tokens = self._generator.next()
        for uid, row, positions, caches in versions.prefilling(self._generator):
            self._of_call(uid, self._computed, caches, row, positions)
        for progress in prompts:
            self._of_call(progress.uid, self._progressed, progress)
        for response in tokens:
            self._of_call(response.uid, self._deliver, response)

    def _of_call(self, uid: int, action: Callable[..., None], *arguments: Any) -> None:
        call = self._calls.get(uid)
        if call is None:
            return
        try:
            action(call, *arguments)
        # its handoff ended while this step ran, and whoever ended it has told why
        except HandoffError as error:
            self._ended(call, error)
        # one request's failure is its own (R34)
        except Exception as error:
            log.exception("room=%s failed in the engine", call.room)
            self._ended(call, error)

    def kept_prefix(self, call: Call) -> tuple[list[SequenceCache], int]:
        """The nearest prefix that the library's prompt cache keeps, never the whole prompt.

        Handoffs read and write none: decode replicas import what their host's page store has
        not, and prefill replicas compute what theirs has not.
        """
        if call.kept is None:
            call.kept = self._nearest(call) if call.keeps_prefix else None
        kept: tuple[list[SequenceCache], int] = call.kept or (empty_caches(self._layers), 0)
        return kept

    def _nearest(self, call: Call) -> tuple[list[SequenceCache], int] | None:
        tokens = call.prompt.tokens
        found, rest = self._prefixes.fetch_nearest_cache(self._key(call), tokens)
        if found is None:
            return None
        if not rest:
            trim_prompt_cache(found, 1)
            rest = tokens[-1:]
        return taken_over(found), len(tokens) - len(rest)

    def _key(self, call: Call) -> Any:
        """Of the library's prompt cache: a salt's prefixes are its own (R48)."""
        return (self._cache_key, call.salt) if call.salt else self._cache_key

    def _remaining(self, call: Call, held: int) -> list[list[int]]:
        """The segments past the first `held` tokens; their kinds are dropped alike."""
        segments = [list(segment) for segment in call.prompt.segments]
        while held >= len(segments[0]):
            held -= len(segments.pop(0))
            call.prompt.segment_kinds.pop(0)
        segments[0] = segments[0][held:]
        return segments

    def _observe_imports(self) -> None:
        for call in self._imported:
            if isinstance(call.leg, DecodeLeg):
                call.leg.started_at = monotonic_s()
                waited_s = call.leg.started_at - call.leg.committed_at
                self._board.observe("import", waited_s, call.leg.peer)
        self._imported.clear()

    def _computed(self, call: Call, caches: list[Any], row: int, positions: int) -> None:
        if isinstance(call.leg, PrefillLeg):
            call.leg.computed(caches, row, positions)
        if (shared := _shared(call)) is not None:
            shared.computed(caches, row, positions)

    def _progressed(self, call: Call, progress: Any) -> None:
        if progress.end_of_prompt:
            self._board.add(prompt_tokens=progress.progress[1])
            first = versions.first_token(self._generator, progress.uid)
            if isinstance(call.leg, PrefillLeg):
                if call.leg.shared is not None:
                    # what has been sampled leaves the batch
                    call.leg.shared.computed(first.caches, first.row, len(call.prompt.tokens))
                call.leg.sampled(first.token, first.caches, first.row)
                self.remove(call)
            elif call.args.max_tokens > 1 and versions.matches_nothing(call.stops, first):
                self._send(call, first)
                self._sent_early.add(progress.uid)
            if isinstance(call.leg, SharedPrefix):
                call.leg.computed(first.caches, first.row, len(call.prompt.tokens))
        elif progress.end_of_segment and call.keeps_prefix and call.prompt.segment_kinds:
            caches, tokens = self._generator.extract_cache([progress.uid])[progress.uid]
            self._keep_prefix(call, tokens[:], caches, call.prompt.segment_kinds.pop(0))

    def _deliver(self, call: Call, raw: Any) -> None:
        if raw.uid in self._sent_early:
            self._sent_early.remove(raw.uid)
            return
        self._send(call, raw)
        if raw.finish_reason is not None:
            del self._calls[raw.uid]
            self._left(call)
            if call.keeps_prefix:
                self._keep_prefix(call, raw.all_tokens[:], raw.prompt_cache, "assistant")
            self._ended(call, None)

    def _send(self, call: Call, raw: Any) -> None:
        text = call.detokenizer
        if versions.keeps_stop_text(raw):
            text.add_token(raw.token)
        if raw.finish_reason is not None:
            text.finalize()
        if call.tokens_sampled == 0 and isinstance(call.leg, DecodeLeg) and call.leg.started_at:
            took_s = monotonic_s() - call.leg.started_at
            self._board.observe("first_token", took_s, call.leg.peer)
        logprob = raw.logprobs[raw.token].item()
        top = library._format_top_logprobs(raw.logprobs, call.args.top_logprobs, self._tokenizer)
        call.answer(
            versions.response(text.last_segment, raw.token, logprob, raw.finish_reason, top, raw)
        )
        self._board.add(output_tokens=1)
        if isinstance(call.leg, DecodeLeg) and call.room is not None:
            self._board.decoded(call.room)

    def _left(self, call: Call) -> None:
        if call.room is not None:
            self._board.decode_over(call.room)

    def _keep_prefix(self, call: Call, tokens: list[int], caches: list[Any], kind: str) -> None:
        # unevaluated slices would hold the whole batch's arrays
        mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
        self._prefixes.insert_cache(self._key(call), tokens, caches, cache_type=kind)
        if self._cache_bytes is not None:
            active = self._generator.prompt_cache_nbytes
            self._prefixes.trim_to(n_bytes=self._cache_bytes - active)


def _shared(call: Call) -> SharedPrefix | None:
    """Its prompt's pages in the host's page store."""
    if isinstance(call.leg, PrefillLeg):
        return call.leg.shared
    return call.leg if isinstance(call.leg, SharedPrefix) else None
