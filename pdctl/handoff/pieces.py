"""Pieces of a prompt's pages, where they lie."""

from __future__ import annotations

import numpy as np

from pdctl.handoff.device import Pages, Run
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PagePart


def piece_of(pages: Pages, geometry: PageGeometry, part: PagePart) -> memoryview | Run:
    """Its bytes; of several pages, from the first one's to the last one's. In a device's memory,
    slots that were not granted are cleared here (R30), which waits for the device."""
    before_last = (part.pages - 1) * geometry.page_bytes
    size = before_last + part.layers * geometry.layer_bytes
    start = part.page * geometry.page_bytes + part.first_layer * geometry.layer_bytes
    if not isinstance(pages, Run):
        return pages.reshape(-1).view(np.uint8)[start : start + size].data
    piece = pages.part(start, size)
    half = geometry.layer_bytes // 2
    granted = half // geometry.page_tokens * part.slots
    if granted < half:
        piece.clear(before_last + granted, half - granted, half, 2 * part.layers)
    return piece
