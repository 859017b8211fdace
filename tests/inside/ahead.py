"""A process whose clock is ahead of the machine's by what a file says, as after hours of rest."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path


def start(file: Path) -> None:
    """`time.monotonic` is ahead by the seconds in that file, a double, from now on."""
    measured, unpack = time.monotonic, struct.Struct("d").unpack_from
    with file.open("rb") as opened:
        ahead = mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)
    time.monotonic = lambda: measured() + float(unpack(ahead)[0])
