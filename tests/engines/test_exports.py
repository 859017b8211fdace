"""When a step's layers are copied out of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pdctl.engines.exports import LATE, Exports
from pdctl.engines.vllm.interface import Span
from pdctl.handoff.page import PageGeometry

NAMES = [f"model.layers.{number}.attn" for number in range(4)]


class Memory:
    """Remembers what is gathered; layers land at once, or when the test says so."""

    block_tokens = 32
    names = NAMES

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gathered: list[int] = []
        self.late: list[Callable[[], None]] | None = None
        self.breaks_at: int | None = None

    def begin_step(self, spans: Sequence[Span]) -> None:
        self.begun.append(len(spans))

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        if layer == self.breaks_at:
            raise RuntimeError("no such block")
        self.gathered.append(layer)
        if self.late is None:
            landed()
        else:
            self.late.append(landed)


class Prompt:
    """What a leg is told."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.held = 0
        self.error: BaseException | None = None

    def landed(self, span: Span, layers: int) -> None:
        self.layers.append(layers)

    def taken(self, span: Span) -> None:
        self.held = span.stop

    def broke(self, error: BaseException) -> None:
        self.error = error


SPAN = Span([1, 2], 10, 40, PageGeometry(4, 1, 1).empty(40))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def exports(memory: Memory) -> Exports:
    return Exports(memory)


def test_each_layer_lands_within_the_forward(
    memory: Memory, exports: Exports, caplog: pytest.LogCaptureFixture
) -> None:
    """One preparation a step, one copy a layer, for all of its prompts."""
    prompts = Prompt(), Prompt()
    exports.begin([(prompt, SPAN) for prompt in prompts])
    for number, name in enumerate(NAMES):
        exports.saved(name)
        assert [prompt.layers[-1] for prompt in prompts] == [number + 1] * 2
    exports.finish()
    assert (memory.begun, memory.gathered) == ([2], [0, 1, 2, 3])
    assert [prompt.held for prompt in prompts] == [40, 40]
    assert not caplog.records


@pytest.mark.parametrize(
    ("named", "within"),
    [([], []), (NAMES[:2], [0, 1]), (NAMES[1:], []), ([NAMES[0], *NAMES[2:]], [0]), (["x"], [])],
)
def test_layers_that_vllm_does_not_name_are_copied_at_the_end(
    memory: Memory,
    exports: Exports,
    caplog: pytest.LogCaptureFixture,
    named: list[str],
    within: list[int],
) -> None:
    """A model or a version that skips `save_kv_layer` loses no export, and no layer overtakes;
    the log says once what that costs."""
    for _ in range(2):
        prompt = Prompt()
        memory.gathered.clear()
        exports.begin([(prompt, SPAN)])
        for name in named:
            exports.saved(name)
        assert memory.gathered == within
        exports.finish()
        assert (memory.gathered, prompt.layers) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert caplog.text.count(LATE) == 1


def test_a_layer_that_is_named_twice_is_copied_once(memory: Memory, exports: Exports) -> None:
    """The second time, and after the step."""
    exports.begin([(Prompt(), SPAN)])
    for name in [*NAMES, *NAMES]:
        exports.saved(name)
    exports.finish()
    exports.saved(NAMES[0])
    exports.finish()
    assert memory.gathered == [0, 1, 2, 3]


def test_a_step_that_exports_nothing_touches_nothing(memory: Memory, exports: Exports) -> None:
    """A step without a prompt's positions is only said to begin: what it overwrites has been read
    by then (R10)."""
    exports.begin([])
    for name in NAMES:
        exports.saved(name)
    exports.finish()
    assert (memory.begun, memory.gathered) == ([0], [])


def test_layers_may_land_after_the_step(memory: Memory, exports: Exports) -> None:
    """A copy that runs beside the model tells of its end later, and of its own prompts."""
    memory.late = []
    first, second = Prompt(), Prompt()
    for prompt in (first, second):
        exports.begin([(prompt, SPAN)])
        exports.finish()
    assert (first.layers, first.held) == ([], 40)
    for landed in memory.late:
        landed()
    assert np.array_equal([first.layers, second.layers], [[1, 2, 3, 4]] * 2)


@pytest.mark.parametrize("within", [True, False])
def test_a_copy_that_fails_ends_the_handoffs_of_its_step(
    memory: Memory, exports: Exports, within: bool
) -> None:
    """R34: inside the forward or after it; nothing is raised, and the next step exports."""
    prompt, after = Prompt(), Prompt()
    memory.breaks_at = 2
    exports.begin([(prompt, SPAN)])
    for name in NAMES if within else ():
        exports.saved(name)
    exports.finish()
    assert str(prompt.error) == "no such block"
    assert (memory.gathered, prompt.held) == ([0, 1], 0)
    memory.breaks_at = None
    exports.begin([(after, SPAN)])
    exports.finish()
    assert (after.layers, after.error) == ([1, 2, 3, 4], None)


def test_a_forward_that_fails_exports_nothing_more(memory: Memory, exports: Exports) -> None:
    """R34: what it did not compute is never taken for what it did."""
    prompt = Prompt()
    exports.begin([(prompt, SPAN)])
    exports.saved(NAMES[0])
    exports.fail(RuntimeError("the model broke"))
    exports.finish()
    assert (memory.gathered, prompt.layers, prompt.held) == ([0], [1], 0)
    assert str(prompt.error) == "the model broke"
