"""A request's own sampler and logits processors, made by the library and kept from harming
the batch that they run in."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm.server as library

from pdctl.engines.mlx.versions import Sampler, greedy

Failed = Callable[[Exception], None]
Processor = Callable[[mx.array, mx.array], mx.array]


def make_sampler(args: Any, tokenizer: Any, failed: Failed) -> Sampler:
    """The library's sampler. Greedy requests share one, which a batch then calls once."""
    if args.sampling.temperature == 0:
        return greedy
    sampler: Sampler = library._make_sampler(args, tokenizer)
    if args.seed is not None:
        sampler = _seeded(sampler, args.seed)
    return _guarded_sampler(sampler, failed)


def make_processors(args: Any, failed: Failed) -> list[Any]:
    return [_guarded_processor(p, failed) for p in library._make_logits_processors(args)]


def _seeded(sampler: Sampler, seed: int) -> Sampler:
    """The same draws for the same seed, whoever else is in the batch.

    The library drains its batch for a request with a seed; here the generator's state is set
    for this row's draw alone, from (seed, tokens drawn so far), and from entropy after it.
    """
    drawn = 0

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal drawn
        digest = hashlib.blake2b(f"{seed}:{drawn}".encode(), digest_size=4).digest()
        mx.random.seed(int.from_bytes(digest, "little"))
        drawn += 1
        try:
            return sampler(logprobs)
        finally:
            mx.random.seed(int.from_bytes(os.urandom(4), "little"))

    return sample


def _guarded_sampler(sampler: Sampler, failed: Failed) -> Sampler:
    def sample(logprobs: mx.array) -> mx.array:
        try:
            return sampler(logprobs)
        # one request's arguments must not end the batch (R34)
        except Exception as error:
            failed(error)
            return greedy(logprobs)

    return sample


def _guarded_processor(processor: Processor, failed: Failed) -> Processor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            return processor(tokens, logits)
        # as above (R34)
        except Exception as error:
            failed(error)
            return logits

    return process
