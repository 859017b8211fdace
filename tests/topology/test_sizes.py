"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.topology.sizes import approximate_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 << 20),
        ("4 GiB", 4 << 30),
        ("1.5KiB", 1536),
        ("4096", 4096),
        ("7B", 7),
        (64, 64),
    ],
)
def test_a_size_is_text_with_a_unit_or_plain_bytes(text: object, expected: int) -> None:
    """KiB, MiB and GiB are powers of 1024; whole numbers are bytes."""
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "3MB", "3mib", "-1", "1e3", "0", 0, -5, True, 1.5, None, "0.3B", "٣MiB", "9" * 30],
)
def test_anything_else_is_refused(text: object) -> None:
    """Units of 1000, signs, zero, fractions of a byte and other types are no sizes."""
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)


@given(st.text() | st.integers() | st.floats() | st.none())
def test_only_value_error_comes_out(value: object) -> None:
    """Whatever comes in, the answer is a size above zero or a ValueError."""
    try:
        assert parse_size(value) > 0
    except ValueError as error:
        assert str(error)  # noqa: PT017


def test_approximate_sizes_read_well() -> None:
    assert [approximate_size(n) for n in (3, 2048, 269 << 20)] == ["3 B", "2.0 KiB", "269.0 MiB"]
