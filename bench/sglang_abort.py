"""How long an abort of a prefill leg holds SGLang's scheduler.

SGLang takes a request's blocks back as soon as `PrefillLeg.abort` has returned; so that waits
for the copy out of them that is under way (at most `PART_BYTES` of pages), and for nothing else.
Here a prompt of 2048 tokens is exported by a real leg over a real handoff, out of memory laid
out as SGLang's; at a random moment of it the leg is aborted, and the call is timed.

    SGLANG_ENVIRONMENT/bin/python bench/sglang_abort.py [--aborts 100] [--output FILE]

Run by an environment that has SGLang; no server is started. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
warnings.simplefilter("ignore")

from handoff.ends import Ends  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402

from pdctl.engines.interface import Leg  # noqa: E402
from pdctl.engines.sglang.exchange import Exchange  # noqa: E402
from pdctl.engines.sglang.pool import SlotPool  # noqa: E402
from pdctl.engines.sglang.sending import PART_BYTES, PrefillLeg  # noqa: E402
from pdctl.handoff.page import PageGeometry  # noqa: E402
from pdctl.handoff.transport.tcp import TcpTransport  # noqa: E402

BLOCKS = 32
MODELS = {
    "SmolLM2-135M": PageGeometry(layers=30, kv_heads=3, head_dim=64),
    "Qwen2.5-0.5B": PageGeometry(layers=24, kv_heads=2, head_dim=64),
    "Qwen3-8B": PageGeometry(layers=36, kv_heads=8, head_dim=128),
}


def exchange_of(ends: Ends, pages: PageGeometry, dtype: torch.dtype) -> Exchange:
    shape = (BLOCKS * pages.page_tokens, pages.kv_heads, pages.head_dim)
    keys, values = ([torch.randn(shape).to(dtype) for _ in range(pages.layers)] for _ in range(2))
    memory = SimpleNamespace(k_buffer=keys, v_buffer=values, page_size=pages.page_tokens)
    session = SimpleNamespace(sender=ends.sender, board=ends.sent, replica="p0")
    made = Exchange(None, None)
    rows = SimpleNamespace(output_ids=torch.zeros(1, 1, dtype=torch.int32))
    scheduler = SimpleNamespace(disagg_metadata_buffers=rows)
    made.join(session, SlotPool(memory, pages), scheduler)
    return made


def aborted_ms(ends: Ends, exchange: Exchange, export_s: float) -> float:
    """One leg, from its admission to its abort."""
    found = ends.leg()
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    leg = Leg(**fields)
    sending = PrefillLeg(exchange, "", leg.room)
    sending.begin(leg, list(range(BLOCKS * 64)))
    while sending.poll() != KVPoll.WaitingForInput:
        time.sleep(0.001)
    sending.init(BLOCKS, 0)
    sending.send(range(BLOCKS))
    time.sleep(random.uniform(0, export_s))
    began = time.perf_counter()
    sending.abort()
    return 1e3 * (time.perf_counter() - began)


def whole_export_s(exchange: Exchange, pages: PageGeometry) -> float:
    into = pages.empty(BLOCKS * pages.page_tokens)
    began = time.perf_counter()
    exchange.pool.read(range(BLOCKS), 0, pages.page_tokens, into)
    return time.perf_counter() - began


def measured(pages: PageGeometry, dtype: torch.dtype, aborts: int) -> dict[str, Any]:
    ends = Ends(TcpTransport(), pages, budget_bytes=8 << 30)
    try:
        exchange = exchange_of(ends, pages, dtype)
        export_s = whole_export_s(exchange, pages)
        taken = sorted(aborted_ms(ends, exchange, export_s) for _ in range(aborts))
    finally:
        ends.close()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_bytes": BLOCKS * pages.page_bytes,
        "export_ms": round(1e3 * export_s, 1),
        "abort_ms": {
            "median": round(statistics.median(taken), 2),
            "p95": round(taken[int(0.95 * (len(taken) - 1))], 2),
            "max": round(taken[-1], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        {"model": name, **measured(pages, dtype, asked.aborts)}
        for name, pages in MODELS.items()
        for dtype in (torch.float16, torch.float32)
    ]
    report = {
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "part_bytes": PART_BYTES,
        "aborts": asked.aborts,
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
