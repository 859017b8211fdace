"""SGLang beside MLX in one cluster, launched as a user does."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.cluster import ENGINE_PYTHON, Cluster, engine_env, topology_text
from engines.sglang_replicas import CPU_ENV, OPTIONS, PYTHON, needs_sglang
from tiny import digits, make_checkpoint

pytestmark = [pytest.mark.engine, needs_sglang]

PAIRS = ("sp>sd", "sp>md", "mp>sd")


def replica_text(name: str, role: str, model_dir: Path) -> str:
    sglang = name[0] == "s"
    env = {k: v for k, v in CPU_ENV.items() if k != "PDCTL_RUN"} if sglang else engine_env()
    config = OPTIONS if sglang else {}
    return f"""
[[replicas]]
name = "{name}"
engine = "{"sglang" if sglang else "mlx"}"
role = "{role}"
model = "{model_dir}"
compute_dtype = "float32"
python = "{PYTHON if sglang else ENGINE_PYTHON}"
env = {{ {", ".join(f'{key} = "{value}"' for key, value in env.items())} }}
engine_config = {{ {", ".join(f"{key} = {as_toml(value)}" for key, value in config.items())} }}
"""


def as_toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    roles = {"sp": "prefill", "sd": "decode", "mp": "prefill", "md": "decode"}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pdctl-t") as folder:
        model_dir = make_checkpoint(Path(folder) / "llama", "llama")
        made = Cluster(Path(folder), model_dir)
        text = topology_text(made.name, model_dir, bind=made.bind, roles={})
        replicas = (replica_text(name, role, model_dir) for name, role in roles.items())
        made.topology.write_text(text.partition("[hosts")[0] + "".join(replicas))
        with made:
            yield made


@pytest.mark.parametrize("tokens", [65, 700])
def test_every_pair_with_an_end_of_sglang_answers_alike(cluster: Cluster, tokens: int) -> None:
    """S7, S10, S11: each went through its canary at `up`; SGLang's own pair has no other engine
    to compare with."""
    fields = {"cache_salt": f"alike {tokens}", "pdctl_cache": False, "max_tokens": 12}
    alone = cluster.completion(digits(tokens), "md", **fields).json()["choices"][0]["text"]
    for path in PAIRS:
        answer = cluster.completion(digits(tokens), path, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pdctl-path"] == path
        assert answer.json()["choices"][0]["text"].strip() == alone.strip()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("sp>sd", "logprobs", 2),
        ("mp>sd", "min_tokens", 2),
        ("mp>sd", "regex", "[0-9]+"),
        ("sp>md", "echo", True),
    ],
)
def test_what_a_pair_cannot_honour_is_refused_before_it_is_scheduled(
    cluster: Cluster, path: str, field: str, value: object
) -> None:
    """R66: with the parameter and the pair."""
    answer = cluster.completion(digits(40), path, **{field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert path in error["message"]


def test_half_of_sglang_answers_nothing_alone(cluster: Cluster) -> None:
    """DESIGN §7: no path leads to it."""
    answer = cluster.completion(digits(40), "sd")
    assert answer.status_code == 400
    assert "sp>sd" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_scheduler_that_is_killed_comes_back_and_serves(cluster: Cluster) -> None:
    """R61, U14: the process that owns the KV memory; its replica is started again and takes
    traffic after its canary."""
    before = cluster.replica("sd")
    first = psutil.Process(before["pid"])
    family = first.children(recursive=True)
    scheduler = next(process for process in family if "sched" in process.name())
    os.kill(scheduler.pid, signal.SIGKILL)
    cluster.wait("sd to leave", lambda: cluster.replica("sd")["state"] != "ready", 60)
    cluster.wait("sd to come back", lambda: cluster.replica("sd")["state"] == "ready", 150)
    assert cluster.replica("sd")["pid"] != before["pid"]
    cluster.wait(
        "the pair's canary",
        lambda: cluster.completion(digits(130), "sp>sd").status_code == 200,
        60,
    )
