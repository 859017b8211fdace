"""The rate of a plain copy over loopback: what the floor of a handoff over it is computed with."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time

import numpy as np

PIECE_BYTES = 512 << 10
REPETITIONS, WARM_UPS = 7, 2
CHILD_S = 60.0


def _receive(port: int) -> None:
    """Reads `size` bytes as often as it is told to, and answers each with one byte."""
    scratch = memoryview(bytearray(PIECE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connected:
        while header := connected.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "little")
            while left:
                left -= connected.recv_into(scratch[: min(left, PIECE_BYTES)])
            connected.sendall(b"k")


def rates(sizes: list[int]) -> dict[int, float]:
    """Bytes per second by size: one connection, two processes, no header and no checksum; from
    the first byte to the receiver's answer, the median of several."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = multiprocessing.get_context("spawn").Process(
            target=_receive, args=(listener.getsockname()[1],)
        )
        child.start()
        listener.settimeout(CHILD_S)
        connected, _ = listener.accept()
    with connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = {size: size / _copy_s(connected, size) for size in sizes}
    child.join(10)
    return found


def _copy_s(connected: socket.socket, size: int) -> float:
    source = memoryview(np.random.default_rng(0).bytes(size))
    taken = []
    for _ in range(WARM_UPS + REPETITIONS):
        began_s = time.perf_counter()
        connected.sendall(size.to_bytes(8, "little"))
        connected.sendall(source)
        assert connected.recv(1) == b"k"
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[WARM_UPS:])
