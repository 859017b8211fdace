"""Byte sizes as people write them: `512MiB`, `1.5 GiB`, `4096`."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)
_MAX_BYTES = 1 << 62


def parse_size(value: object) -> int:
    """Bytes of a size.

    Args:
        value: an int, or text with one of the units KiB, MiB, GiB, or none for bytes.

    Raises:
        ValueError: anything else, a fraction of a byte, zero or less; the text is a reason.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _bounded(value)
    if not isinstance(value, str):
        raise ValueError('a size is a whole number of bytes or text such as "512MiB"')
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f'"{value}" is not a size')
    number, unit = match.groups()
    if unit not in UNITS:
        raise ValueError(f'"{value}" has an unknown unit')
    whole, _, fraction = number.partition(".")
    scaled = int(whole + fraction) * UNITS[unit]
    result, rest = divmod(scaled, 10 ** len(fraction))
    if rest:
        raise ValueError(f'"{value}" is not a whole number of bytes')
    return _bounded(result)


def approximate_size(count_bytes: float) -> str:
    """For reading only: `256.6 MiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        if count_bytes >= UNITS[unit]:
            return f"{count_bytes / UNITS[unit]:.1f} {unit}"
    return f"{count_bytes:.0f} B"


def _bounded(count_bytes: int) -> int:
    if not 0 < count_bytes <= _MAX_BYTES:
        raise ValueError("a size lies above 0 and below 4 EiB")
    return count_bytes
