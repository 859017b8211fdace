"""Host memory that the GPU may read and write in place (CUDA)."""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
import torch
from numpy.typing import NDArray


def page_locked(size: int) -> NDArray[np.uint8]:
    """Zeroed memory of exactly `size` bytes; unlocked and freed with the last array over it.

    Under unified addressing a registered address is the GPU's too.

    Raises:
        MemoryError: the driver locks no more.
    """
    memory = mmap.mmap(-1, size)
    # read once, in order, by hash and socket: in small pages it is the look-up of each that counts
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    made = np.frombuffer(memory, dtype=np.uint8)
    address = made.ctypes.data
    error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    if int(error) != 0:
        raise MemoryError(f"{size} bytes of host memory can't be locked for the GPU: {error}")
    weakref.finalize(made, _unlock, address).atexit = False
    return made


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
