"""SGLang's KV memory on a CPU, copied as on a GPU: by the kernel, in Triton's interpreter, and as
late as a stream beside the model's may do it."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any


def patch(module: ModuleType) -> None:
    from engines.cuda_sides import ONE_AT_A_TIME
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    @functools.wraps(run)
    def alone(*given: Any, **named: Any) -> None:
        """SGLang gives blocks out with kernels of its own, in the scheduler's thread."""
        with ONE_AT_A_TIME:
            run(*given, **named)

    GridExecutor.__call__ = alone
    module.open_pool = opened


def opened(scheduler: Any, pages: Any) -> Any:
    from engines.cuda_sides import Late
    from engines.sglang.cuda_pools import slots_of

    from pdctl.engines.sglang.cuda_proof import check

    memory = scheduler.token_to_kv_pool_allocator.get_kvcache()
    slots = slots_of(memory, pages, scheduler.req_to_token_pool.req_to_token, Late())
    check(slots, memory, pages)
    logging.getLogger("pdctl.engines.sglang").info("%d layers are copied as on a GPU", pages.layers)
    return slots
