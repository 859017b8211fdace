"""A short run of the fuzzer; `python tests/handoff/fuzz_frames.py` is the long one."""

from __future__ import annotations

from handoff.fuzz_frames import run

FRAMES = 6_000


def test_broken_frames_crash_nothing_and_leave_nothing() -> None:
    """R28, R29: whatever a peer that knows the key sends, either end fails that handoff alone;
    what is committed all the same is bit by bit right."""
    told = run(FRAMES, seed=1)
    assert told["crashes"] == 0
    assert told["commits_compared"] > 0
    assert min(told["frames_by_end"].values()) > FRAMES // 4
