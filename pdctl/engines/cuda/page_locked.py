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
    _register(made)
    weakref.finalize(made, _unlock, made.ctypes.data).atexit = False
    return made


def lock_pages(memory: NDArray[np.uint8]) -> None:
    """Memory that somebody else has made, shared with another process say; unlocked with this very
    array, before that memory is given back.

    Raises:
        MemoryError: the driver locks no more.
    """
    _register(memory)
    weakref.finalize(memory, _unlock, memory.ctypes.data).atexit = False


def _register(memory: NDArray[np.uint8]) -> None:
    error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error) != 0:
        raise MemoryError(
            f"{memory.nbytes} bytes of host memory can't be locked for the GPU: {error}"
        )


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
