"""The copies between vLLM's blocks and pages that lie in the device's own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines.vllm.cuda_engine import (  # noqa: E402
    DEVICE,
    FORMS_AND_SIZES,
    PAGES,
    SEQUENCES,
    Engine,
    expected,
)
from engines.vllm.test_cuda_blocks import untouched  # noqa: E402

from pdctl.engines.cuda import reading  # noqa: E402
from pdctl.engines.device import TorchDevice, tensor_of  # noqa: E402
from pdctl.engines.vllm.interface import Span  # noqa: E402
from pdctl.handoff.device import Run, address_of_pages  # noqa: E402
from pdctl.handoff.page import PATTERN, Patterns  # noqa: E402
from pdctl.handoff.sink import Piece  # noqa: E402


def pages_on_device(tokens: int) -> Run:
    """Full of ones, somewhere in an allocation."""
    size = PAGES.pages_for(tokens) * PAGES.page_bytes
    memory = TorchDevice(DEVICE)(size + 512)
    memory.tensor.fill_(255)
    return Run(memory, 512, size)


def brought(run: Run) -> Patterns:
    """What lies there, as an array."""
    on_host = tensor_of(run, torch.int16, (-1, *PAGES.shape)).cpu()
    found: Patterns = on_host.numpy().view(PATTERN)
    return found


LENGTHS = [("packed", "NHD", 64, tokens) for tokens in (65, 193)]
OF_EACH_FORM = [*((*form, 129) for form in FORMS_AND_SIZES), *LENGTHS]


@pytest.mark.parametrize(("form", "order", "size", "tokens"), OF_EACH_FORM)
def test_pages_on_the_device_hold_what_the_blocks_do(
    form: str, order: str, size: int, tokens: int
) -> None:
    """R25: to the bit; slots past the prompt stay as they were, for who sends to clear."""
    engine = Engine(form, order, size=size)
    blocks = list(range(SEQUENCES[size]))[::-1][: -(-tokens // size)]
    run = pages_on_device(tokens)
    assert engine.read(Span(blocks, 0, tokens, run)) == [2]
    found, wanted = brought(run), expected(engine, blocks, 0, tokens)
    past = (tokens - 1) % 64 + 1
    assert np.all(found[-1, :, :, past:] == 0xFFFF)
    found[-1, :, :, past:] = 0
    assert np.array_equal(found, wanted)


def test_layers_leave_by_what_the_other_end_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landing costs both ends the same whatever it brings."""
    monkeypatch.setattr(reading, "DEVICE_GROUP_BYTES", 65 * 2 * PAGES.layer_bytes // 64)
    engine = Engine()
    run = pages_on_device(65)
    assert engine.read(Span([1, 2], 0, 65, run)) == [1, 2]


@pytest.mark.parametrize(("form", "order", "size", "tokens"), OF_EACH_FORM)
@pytest.mark.parametrize("extra", [0, 1])
def test_blocks_hold_what_pieces_on_the_device_did(
    form: str, order: str, size: int, tokens: int, extra: int
) -> None:
    """R26: several pieces at once, of all layers or some, into as many blocks as they need, and
    into one more, which stays as it was."""
    engine = Engine(form, order, size=size)
    blocks = list(range(SEQUENCES[size]))[::-1][: -(-tokens // size) + extra]
    before = {layer: engine.tokens(layer, range(SEQUENCES[size])) for layer in range(3)}
    run = pages_on_device(tokens)
    shape = (PAGES.pages_for(tokens), *PAGES.shape)
    numbers = np.random.default_rng(5).integers(0, 1 << 15, shape).astype(np.uint16)
    tensor_of(run, torch.int16, shape).copy_(torch.from_numpy(numbers.view(np.int16)))
    engine.blocks.fence()
    parts = []
    for page in range(len(numbers)):
        at = range(page * 64, min((page + 1) * 64, tokens))
        for first, last in ((0, 2), (2, 3)):
            offset = page * PAGES.page_bytes + first * PAGES.layer_bytes
            there = run.part(offset, (last - first) * PAGES.layer_bytes)
            parts.append((at, Piece(page, first, last - first, there)))
    placed = engine.blocks.write_from(blocks, parts)
    engine.blocks.flush()
    assert placed()
    for layer in range(3):
        held = engine.tokens(layer, blocks)
        wanted = numbers[:, layer].transpose(1, 0, 2, 3, 4).reshape(2, -1, 3, 64)[:, :tokens]
        assert np.array_equal(held[:, :tokens], wanted)
        assert untouched(engine, layer, blocks, tokens, before[layer])


@pytest.mark.parametrize(("form", "order", "size", "tokens"), OF_EACH_FORM)
def test_several_pages_of_one_piece_are_placed_where_their_blocks_are(
    form: str, order: str, size: int, tokens: int
) -> None:
    """R26: from the middle of the first page on, some layers; the others stay as they were."""
    engine = Engine(form, order, size=size)
    blocks = list(range(SEQUENCES[size]))[::-1][: -(-tokens // size)]
    before = [engine.tokens(layer, blocks) for layer in range(3)]
    count, start = PAGES.pages_for(tokens), min(7, tokens - 1)
    shape = (count, 2, *PAGES.shape[1:])
    numbers = np.random.default_rng(5).integers(0, 1 << 15, shape).astype(np.uint16)
    memory = engine.blocks.device(numbers.nbytes)
    memory.tensor.copy_(torch.from_numpy(numbers.reshape(-1).view(np.uint8)))
    piece = Piece(0, 1, 2, Run(memory, 0, memory.size), count)
    engine.blocks.fence()
    placed = engine.blocks.write_from(blocks, [(range(start, tokens), piece)])
    engine.blocks.flush()
    assert placed()
    for layer in range(3):
        wanted = before[layer].copy()
        if layer:
            came = numbers[:, layer - 1].transpose(1, 0, 2, 3, 4).reshape(2, -1, 3, 64)
            wanted[:, start:tokens] = came[:, start:tokens]
        assert np.array_equal(engine.tokens(layer, blocks), wanted)


def test_the_kernel_and_torch_make_the_same_pages() -> None:
    """The readable reference: tokens taken by index, in the page's order."""
    engine = Engine(size=16)
    blocks, tokens = [3, 1, 4, 15, 9, 2], 90
    run = pages_on_device(tokens)
    engine.read(Span(blocks, 0, tokens, run))
    pages = tensor_of(run, torch.float16, (-1, *PAGES.shape))
    at = torch.arange(tokens, device=DEVICE)
    rows = torch.tensor(blocks, device=DEVICE)[at // 16]
    for layer, memory in enumerate(engine.blocks.layers):
        for half, whole in enumerate(engine.backend.halves(memory)):
            assert torch.equal(pages[at // 64, layer, half, at % 64], whole[rows, at % 16])


def test_memory_is_cleared_where_it_is_asked_for_and_nowhere_else() -> None:
    """R30: the ends of several halves in one go; zero when it returns."""
    memory = TorchDevice(DEVICE)(64)
    memory.tensor.fill_(7)
    Run(memory, 4, 60).clear(8, 4, 16, 3)
    found = memory.tensor.cpu().numpy()
    assert np.flatnonzero(found == 0).tolist() == [
        *range(12, 16),
        *range(28, 32),
        *range(44, 48),
    ]
    memory.bind()


def test_too_little_memory_is_said_in_sizes() -> None:
    """What it is for, how much, and where."""
    with pytest.raises(MemoryError, match=r"handed over want 1\.0 EiB|handed over want .*memory"):
        TorchDevice(DEVICE)(1 << 60)


def test_pages_are_addressed_alike_wherever_they_lie() -> None:
    """A run as an array: by the first byte."""
    run = pages_on_device(65)
    assert address_of_pages(run) == tensor_of(run, torch.int16, (-1, *PAGES.shape)).data_ptr()
    array = np.zeros(4, np.uint16)
    assert address_of_pages(array) == array.ctypes.data
