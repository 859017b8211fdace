"""The plug-in touches only processes that an agent of pdctl started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.engines.sglang.plugin import started_by_agent
from pdctl.engines.sglang.server import keep_to_itself

AGENTS = {"PDCTL_RUN": "r", "PDCTL_SOCKET": "/tmp/pdctl-0/r/agent.sock", "PDCTL_REPLICA": "p0"}


@pytest.mark.parametrize("missing", sorted(AGENTS))
def test_one_variable_of_the_agents_is_not_enough(missing: str) -> None:
    """R37."""
    assert started_by_agent(AGENTS)
    assert not started_by_agent({k: v for k, v in AGENTS.items() if k != missing})


def test_in_anybody_elses_process_it_imports_no_engine() -> None:
    """R37: SGLang calls it in each of its processes, wherever pdctl is installed beside it."""
    code = (
        "import sys; from pdctl.engines.sglang.plugin import register; register();"
        "sys.exit(any(m.split('.')[0] in ('sglang', 'torch') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={}, check=False).returncode == 0


def test_a_plug_in_that_fails_ends_the_process() -> None:
    """SGLang would log it and serve on without a KV path."""
    code = (
        "import sys; sys.modules['sglang'] = None;"
        "from pdctl.engines.sglang.plugin import register; register()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=AGENTS, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 5
    assert ended.stderr.startswith("error: pdctl's plug-in failed: ")


def test_process_groups_meet_in_a_file_beside_the_agents_socket(tmp_path: Path) -> None:
    """R60: torch's own store would listen on every interface."""
    environment = {"PDCTL_SOCKET": str(tmp_path / "agent.sock"), "PDCTL_REPLICA": "p0"}
    keep_to_itself(environment)
    meeting = environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    assert meeting.startswith(f"file://{tmp_path}/p0-")
    assert environment["TMPDIR"] == str(tmp_path)
    chosen = {**environment, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://"}
    keep_to_itself(chosen)
    assert chosen["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "env://"
