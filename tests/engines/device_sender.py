"""A sender in a process of its own, whose pages lie on a torch device: `device_sender.py DEVICE
TOKENS…`. It is steered as `handoff/nixl_sender.py` is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from engines.device_ends import opening
from handoff.ends import Prefill, kv
from handoff.nixl_sender import run
from handoff.test_nixl import GEOMETRY

from pdctl.engines.device import TorchDevice, tensor_of
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.opening import open_sender


def fill(prefill: Prefill, count: int) -> None:
    assert prefill.outbound is not None
    source = kv(count, GEOMETRY)
    pages = tensor_of(prefill.outbound.pages(), torch.int16, source.shape)
    pages.copy_(torch.from_numpy(source.view("<i2")))
    if pages.is_cuda:
        torch.cuda.synchronize()


def main(device: str, tokens: list[int]) -> None:
    made = TorchDevice(torch.device(device))
    board = CounterBoard()
    sender = open_sender(
        opening(sends=True), os.environ, board, lambda room, cause, detail: None, device=made
    )
    run(sender, tokens, fill)


if __name__ == "__main__":
    main(sys.argv[1], [int(each) for each in sys.argv[2:]])
