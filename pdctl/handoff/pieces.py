"""A piece of a prompt's pages, where it lies."""

from __future__ import annotations

import numpy as np

from pdctl.handoff.device import Pages, Run
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PagePart


def piece_of(pages: Pages, geometry: PageGeometry, part: PagePart) -> memoryview | Run:
    """Its bytes. In a device's memory, slots that were not granted are cleared here (R30), which
    waits for the device."""
    size = part.layers * geometry.layer_bytes
    start = part.page * geometry.page_bytes + part.first_layer * geometry.layer_bytes
    if not isinstance(pages, Run):
        return pages.reshape(-1).view(np.uint8)[start : start + size].data
    piece = pages.part(start, size)
    half = geometry.layer_bytes // 2
    granted = half // geometry.page_tokens * part.slots
    if granted < half:
        piece.clear(granted, half - granted, half, 2 * part.layers)
    return piece
