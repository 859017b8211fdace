"""Memory of a torch device for pages and pieces: an NVIDIA GPU's, or, treated alike, the host's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdctl.handoff.device import MemoryKind, Pages, Run
from pdctl.topology.sizes import approximate_size


class TorchDevice:
    """A `DeviceMaker`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = MemoryKind.DEVICE if device.type == "cuda" else MemoryKind.HOST

    def __call__(self, size: int) -> TorchMemory:
        try:
            # an engine may be inside its inference mode, whose tensors no other thread may write
            with torch.inference_mode(False):
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise MemoryError(
                f"pages that are handed over want {approximate_size(size)} of {self._device}'s "
                f"memory, and {self._free()} is free"
            ) from error
        return TorchMemory(memory)

    def _free(self) -> str:
        if self.kind is MemoryKind.HOST:
            return "not as much"
        free, _ = torch.cuda.mem_get_info(self._device)
        return approximate_size(free)


class TorchMemory:
    """A `DeviceMemory`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Args:
        tensor: uint8, contiguous, of one dimension.
        """
        self.tensor = tensor
        self.kind = MemoryKind.DEVICE if tensor.is_cuda else MemoryKind.HOST
        self.address = tensor.data_ptr()
        self.size = tensor.nbytes
        self.index = tensor.device.index or 0
        self._stream = torch.cuda.Stream(tensor.device) if tensor.is_cuda else None

    def bind(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.tensor.device)

    def clear(self, offset: int, size: int, every: int, times: int) -> None:
        rows = torch.as_strided(self.tensor, (times, size), (every, 1), offset)
        if self._stream is None:
            rows.zero_()
            return
        with torch.cuda.stream(self._stream):
            rows.zero_()
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        event.synchronize()


def tensor_of(pages: Pages, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Pages or a piece, wherever they lie, as a tensor over the same memory.

    Args:
        dtype: of pages, 16 bits wide.
        shape: of all of them.
    """
    if isinstance(pages, Run):
        memory = pages.memory
        assert isinstance(memory, TorchMemory)
        whole = memory.tensor[pages.offset : pages.offset + pages.size]
        return whole.view(dtype).view(*shape)
    return torch.from_numpy(pages.view(np.int16)).view(dtype).view(*shape)
