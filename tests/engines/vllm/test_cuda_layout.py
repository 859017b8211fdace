"""How the layout of vLLM's blocks on a GPU is found, and proved."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines.vllm.cuda_engine import FORMS, PAGES, Backend, Engine  # noqa: E402

from pdctl.engines.vllm.cuda_layout import layout_of, like  # noqa: E402
from pdctl.engines.vllm.cuda_proof import check  # noqa: E402
from pdctl.handoff.page import PageGeometry  # noqa: E402


@pytest.mark.parametrize(("form", "order"), FORMS)
def test_the_proof_passes(form: str, order: str) -> None:
    """What the backend writes is what pages hold, and what they write is what it wrote."""
    engine = Engine(form, order, size=32)
    check(engine.blocks, attention(engine.backend, engine.backend), engine.pages)


def test_the_proof_finds_swapped_halves() -> None:
    """A backend that writes K where its shape says V is refused, by name."""
    engine = Engine("halves_first", "NHD", size=32)

    class Swapped(Backend):
        def halves(self, memory: Any) -> Any:
            return tuple(reversed(super().halves(memory)))

    with pytest.raises(ValueError, match=r"TEST_halves_first NHD.* packed in an unknown way"):
        check(engine.blocks, attention(engine.backend, Swapped("halves_first", "NHD")), PAGES)


def attention(backend: Backend, impl: Backend) -> Any:
    return type("Attention", (), {"attn_backend": backend, "impl": impl})()


def test_an_unknown_shape_is_refused_by_name() -> None:
    """A backend with dimensions that pdctl does not know is no guess."""
    with pytest.raises(ValueError, match=r"vLLM's TEST_flat keeps KV as \(10007, 48, 2288\)"):
        Engine("flat")


def test_memory_that_is_not_as_the_backend_says_is_refused() -> None:
    """Four heads and blocks of four would look alike: the backend's own shape decides."""
    backend = Backend("packed", "NHD")
    pages = PageGeometry(layers=1, kv_heads=16, head_dim=64)
    fits = backend.memory(8, 16, pages, torch.float16)
    assert layout_of(backend, [fits], pages, 16).name == "TEST_packed NHD packed"
    other = PageGeometry(layers=1, kv_heads=8, head_dim=64)
    with pytest.raises(ValueError, match=r"TEST_packed registered \(8, 16, 16, 128\)"):
        layout_of(backend, [fits], other, 16)


@pytest.mark.parametrize(("form", "order"), FORMS)
def test_a_twin_lies_as_its_model_does(form: str, order: str) -> None:
    """Memory for the proof has its dimensions in the same order."""
    backend = Backend(form, order)
    memory = backend.memory(8, 16, PAGES, torch.float16)
    twin = like(memory, backend, 3)
    ours, theirs = (layout_of(backend, [m] * 3, PAGES, 16) for m in (twin, memory))
    assert (ours.name, ours.head_stride, ours.slot_stride) == (
        theirs.name,
        theirs.head_stride,
        theirs.slot_stride,
    )
