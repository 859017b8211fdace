"""`python -m pdctl.engines.vllm.server`: vLLM's OpenAI server, as a replica of a cluster.

It takes that server's own options. `vllm serve` itself needs metadata that the CPU builds
lack; its module is what that command runs. The connector, in the worker's process, attaches to
the agent (`session.py`); this process holds no secret.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from pdctl.engines.program import check_started_by_agent, serve

SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """R60: of torch's process groups, gloo's listen for anybody at the address that the host's
    name leads to, often the network's; those of one process need no more than loopback."""
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def main() -> None:
    check_started_by_agent()
    keep_to_loopback(os.environ)
    serve(SERVER_MODULE, "vLLM")


if __name__ == "__main__":
    main()
