"""Canonical pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.handoff.page import PageGeometry, pack, unpack

geometries = st.builds(
    PageGeometry,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 4, 8]),
    page_tokens=st.sampled_from([1, 4, 64]),
)


def patterns(geometry: PageGeometry, tokens: int, seed: int) -> tuple[list, list]:
    random = np.random.default_rng(seed)
    shape = (2 * geometry.layers, tokens, geometry.kv_heads, geometry.head_dim)
    values = list(random.integers(1, 1 << 16, shape, dtype=np.uint16))
    return values[: geometry.layers], values[geometry.layers :]


@given(geometries, st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_unpack_is_the_inverse_of_pack(geometry, tokens, seed):
    """Every bit pattern comes back, whatever it means as a float."""
    keys, values = patterns(geometry, tokens, seed)
    got_keys, got_values = unpack(geometry, pack(geometry, keys, values), tokens)
    for ours, theirs in zip(keys + values, got_keys + got_values, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(geometries, st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_slots_past_the_last_token_are_zero(geometry, tokens):
    """R30: the padding of a partial page is zero."""
    pages = pack(geometry, *patterns(geometry, tokens, 0))
    used = tokens - (len(pages) - 1) * geometry.page_tokens
    assert not pages[-1, :, :, used:].any()
    assert pages[-1, :, :, :used].all()


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (129, 3)])
def test_number_of_pages(tokens, pages):
    """R25: one token past a page's end needs a page of its own."""
    geometry = PageGeometry(1, 1, 1)
    assert geometry.pages_for(tokens) == pages
    assert len(pack(geometry, *patterns(geometry, tokens, 0))) == pages


def test_layout_is_layer_then_half_then_slot_then_head():
    """DESIGN §6: [layer][K, V][slot][kv_head][head_dim], little-endian."""
    geometry = PageGeometry(2, 3, 4)
    keys, values = patterns(geometry, 70, 1)
    pages = pack(geometry, keys, values)
    assert pages.dtype.str == "<u2"
    assert pages[1, 0, 1, 5, 2, 3] == values[0][69, 2, 3]
    assert pages[0, 1, 0, 9, 1, 0] == keys[1][9, 1, 0]
    raw = pages[0].tobytes()
    offset = geometry.layer_bytes + 9 * geometry.token_bytes // (2 * geometry.layers) + 8
    assert int.from_bytes(raw[offset : offset + 2], "little") == keys[1][9, 1, 0]


def test_sizes_of_a_known_model():
    """SmolLM2-135M: 23,040 bytes per token, 1,474,560 per page (ENGINES.md)."""
    geometry = PageGeometry(30, 3, 64)
    assert (geometry.token_bytes, geometry.page_bytes) == (23_040, 1_474_560)


@pytest.mark.parametrize(
    "damage",
    [
        lambda keys, values: (keys[:-1], values),
        lambda keys, values: ([keys[0][:-1], *keys[1:]], values),
        lambda keys, values: ([k.astype(np.uint32) for k in keys], values),
        lambda keys, values: ([k[:, :1] for k in keys], values),
    ],
)
def test_arrays_that_do_not_fit_are_refused(damage):
    """What is not exactly the geometry's shape is an error, not a partial copy."""
    geometry = PageGeometry(2, 2, 4)
    keys, values = patterns(geometry, 65, 1)
    with pytest.raises(ValueError, match="expected"):
        pack(geometry, *damage(keys[::-1], values))


def test_too_few_or_too_many_pages_are_refused():
    """R26: unpack takes exactly the pages that the tokens need, never one more."""
    geometry = PageGeometry(1, 1, 4)
    for tokens in (64, 129):
        with pytest.raises(ValueError, match="hold"):
            unpack(geometry, geometry.empty(65), tokens)


@pytest.mark.parametrize("bad", [{"layers": 0}, {"head_dim": -1}, {"dtype": "float32"}])
def test_impossible_geometries_are_refused(bad):
    """A geometry that can't be a page never gets as far as the wire."""
    with pytest.raises(ValueError, match=r"must be|are float16"):
        PageGeometry(**{"layers": 1, "kv_heads": 1, "head_dim": 1, **bad})
