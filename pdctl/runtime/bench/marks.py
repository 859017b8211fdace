"""What makes a cell doubtful. A mark is shown beside the figure; it never changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from pdctl.runtime.bench.client import Sample
from pdctl.runtime.bench.columns import Column, Required
from pdctl.runtime.bench.measure import STEAL_BOUND, Place, Turn
from pdctl.runtime.bench.status import as_required

MEANINGS = {
    "errors": "Requests failed; they are in no figure.",
    "path": "Requests went another way than the column's.",
    "prompt": "The engine counted another number of prompt tokens than was sent.",
    "restart": "A replica was restarted meanwhile, so that counters cannot be compared.",
    "moved": "Other tokens or bytes travelled than such a prompt requires: a cache was in the "
    "way, or a handoff failed.",
    "text": "The greedy text is not the baseline's. Two engines may part at a near-tie; a pair "
    "should not part from its own decode engine early.",
    "steal": "The machine's owner took processor time away, also when the round was run again.",
    "gpu": "Another process was on the GPU, from the beginning or also when the round was run "
    "again.",
    "foreign": "Other requests went through the cluster meanwhile.",
}
"""What each kind of mark says, for people."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """One of MEANINGS."""
    detail: str
    """A sentence without its subject."""


class Difference(msgspec.Struct, frozen=True):
    """Where two texts part, counted from 0."""

    character: int
    token: int


def marks_of(
    place: Place,
    column: Column,
    turns: Sequence[Turn],
    baseline: Sequence[Turn],
    need: Required,
    tokenise: Callable[[str], Sequence[int]],
) -> tuple[Mark, ...]:
    """All marks of one cell, the gravest first."""
    samples = [sample for turn in turns for sample in turn.samples]
    return (
        *_answer_marks(place, column, samples),
        *_moved_marks(turns, need),
        *_text_marks(column, turns, baseline, tokenise),
        *_disturbance_marks(turns),
    )


def first_difference(
    left: str, right: str, tokenise: Callable[[str], Sequence[int]]
) -> Difference | None:
    """None where the texts are equal. One text that only goes on differs where the other ends."""
    if left == right:
        return None
    return Difference(_parting(left, right), _parting(tokenise(left), tokenise(right)))


def _answer_marks(place: Place, column: Column, samples: Sequence[Sample]) -> Iterator[Mark]:
    failed = [sample.error for sample in samples if sample.error is not None]
    if failed:
        yield Mark(
            kind="errors",
            detail=f"{len(failed)} of {len(samples)} requests failed, the first with: {failed[0]}",
        )
    good = [sample for sample in samples if sample.ok]
    strayed = [s.path for s in good if s.path is not None and s.path != column.path]
    if strayed:
        yield Mark(
            kind="path",
            detail=f"{len(strayed)} of {len(samples)} requests went another way: {strayed[0]}",
        )
    counted = [s.prompt_tokens for s in good if s.prompt_tokens not in (None, place.input_len)]
    if counted:
        yield Mark(
            kind="prompt",
            detail=f"the engine counted {counted[0]} prompt tokens, not {place.input_len}",
        )


def _moved_marks(turns: Sequence[Turn], need: Required) -> Iterator[Mark]:
    if any(turn.moved.restarted for turn in turns):
        yield Mark(kind="restart", detail="a replica was restarted meanwhile")
    wrong = [
        turn
        for turn in turns
        if all(sample.ok for sample in turn.samples)
        and not as_required(turn.moved, need, len(turn.samples))
    ]
    if wrong:
        requests, got = len(wrong[0].samples), wrong[0].moved
        wanted = [f"{need.imported_tokens * requests} tokens"]
        seen = [f"{got.imported_tokens} tokens"]
        for name, each, total in (
            ("host bytes", need.host_bytes, got.host_bytes),
            ("GPU bytes", need.gpu_bytes, got.gpu_bytes),
        ):
            if each is not None and (each or total):
                wanted.append(f"{each * requests} {name}")
                seen.append(f"{total} {name}")
        yield Mark(
            kind="moved",
            detail=f"moved {', '.join(seen)} where {', '.join(wanted)} were required "
            f"(in {len(wrong)} of {len(turns)} rounds)",
        )


def _text_marks(
    column: Column,
    turns: Sequence[Turn],
    baseline: Sequence[Turn],
    tokenise: Callable[[str], Sequence[int]],
) -> Iterator[Mark]:
    compared = [
        first_difference(own.text, other.text, tokenise)
        for turn, reference in zip(turns, baseline, strict=False)
        for own, other in zip(turn.samples, reference.samples, strict=False)
        if own.ok and other.ok
    ]
    found = [difference for difference in compared if difference is not None]
    if found:
        first = min(found, key=lambda difference: difference.token)
        yield Mark(
            kind="text",
            detail=f"text differs from {column.baseline}'s in {len(found)} of {len(compared)} "
            f"requests, first at token {first.token} (character {first.character})",
        )


def _disturbance_marks(turns: Sequence[Turn]) -> Iterator[Mark]:
    stolen = [turn.steal for turn in turns if turn.steal > STEAL_BOUND]
    if stolen:
        yield Mark(
            kind="steal",
            detail=f"up to {max(stolen):.0%} of the CPU time was stolen in {len(stolen)} of "
            f"{len(turns)} rounds",
        )
    met = sorted({str(stranger) for turn in turns for stranger in turn.strangers})
    if met:
        rounds = sum(bool(turn.strangers) for turn in turns)
        yield Mark(
            kind="gpu",
            detail=f"{', '.join(met)} on the GPU in {rounds} of {len(turns)} rounds",
        )
    foreign = sum(turn.moved.foreign_handoffs for turn in turns)
    if foreign:
        yield Mark(kind="foreign", detail=f"{foreign} handoffs of others finished meanwhile")


def _parting(left: Sequence[object], right: Sequence[object]) -> int:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))
