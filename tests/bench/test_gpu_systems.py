"""Every cluster that the programs for a GPU box launch is a topology without a single problem."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.runtime.checks.validation import check_file
from pdctl.topology.load import read_text

ENGINES = ("vllm", "sglang", "mlx")


def every_system() -> Iterator[Any]:
    import gpu_auto
    import gpu_checks
    import gpu_idle
    import gpu_load
    import gpu_pairs
    import gpu_sharing

    yield from gpu_pairs.systems(ENGINES, gpu_pairs.EXTRAS)
    yield from gpu_pairs.systems(("vllm", "mlx"), ())
    yield from gpu_idle.systems(list(gpu_idle.MODES))
    yield from gpu_load.systems(("native", "tcp", "nixl"), ENGINES)
    yield from gpu_sharing.systems(ENGINES, "8GiB")
    yield from gpu_checks.systems(("vllm", "sglang"), ("nixl", "native"), {"PYTHONPATH": "/tests"})
    yield from gpu_auto.systems("vllm", [0, 117_000_000], 256).values()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_cluster_is_accepted_as_it_is(site: Callable[..., Any], graphs: bool) -> None:
    """No diagnostic of any kind, warnings included, but what says that NIXL has no CUDA yet."""
    from gpu_cluster import topology

    for system in every_system():
        text = topology(system, site(graphs=graphs), "127.0.0.1:8000")
        found = check_file(read_text(text))
        assert [each.summary for each in found if each.severity == "error"] == [], system


def test_replicas_of_a_run_are_alike_but_for_what_is_compared(site: Callable[..., Any]) -> None:
    """Equal KV pools, equal batches; graphs or not as a system says."""
    from gpu_cluster import System, members, topology

    system = System("alike", members("vp vd sp sd"), graphs=True)
    parsed = tomllib.loads(topology(system, site(), "127.0.0.1:8000"))
    config = {each["name"]: each["engine_config"] for each in parsed["replicas"]}
    assert config["vp"] == config["vd"]
    assert config["sp"] == config["sd"]
    assert config["vp"]["kv_cache_memory_bytes"] == 12288 * config["sp"]["max_total_tokens"]
    assert config["vp"]["max_num_seqs"] == config["sp"]["max_running_requests"]
    assert not config["vp"]["enforce_eager"]


def test_prefill_is_on_the_first_device_and_decode_on_the_last(site: Callable[..., Any]) -> None:
    """The second of two ordinary replicas, too; MLX and CPUs have none to be named."""
    from gpu_cluster import System, members, topology

    system = System("placed", members("vp sd md so so2"))

    def devices(**given: Any) -> list[list[int]]:
        parsed = tomllib.loads(topology(system, site(**given), "127.0.0.1:8000"))
        return [each["devices"] for each in parsed["replicas"]]

    assert devices(devices=(0, 1)) == [[0], [1], [], [0], [1]]
    assert devices() == [[0], [0], [], [0], [0]]
    assert devices(device="cpu") == [[]] * 5
    assert devices(device="host") == devices()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("vp>vd", True),
        ("vpi>vdi", True),
        ("vpi>vd", False),
        ("vp>md", True),
        ("vpi>md", True),
        ("mp>vdi", True),
        ("vpq>md", True),
        ("vpq>vd", False),
        ("mp>md", False),
        ("md", True),
    ],
)
def test_pairs_are_asked_for_that_answer_a_question(path: str, asked: bool) -> None:
    """Both data planes of one engine's pair are of one kind."""
    from gpu_pairs import is_asked

    assert is_asked(path) is asked


def test_programs_take_lists_and_say_which_environment_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from gpu_load import parsed

    options = parsed(["--vllm-python", "a", "--sglang-python", "b", "--systems", "tcp/nixl"])
    assert options.systems == [["tcp"], ["nixl"]]
    assert options.lens == [40, 173, 733, 2833]
    with pytest.raises(SystemExit):
        parsed(["--vllm-python", "a"])
    assert "--sglang-python" in capsys.readouterr().err


def test_a_process_is_waited_for_until_it_has_ended() -> None:
    """Also where nobody has taken its exit status yet."""
    from gpu_cluster import runs

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert runs(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not runs(process.pid)
    assert not runs(process.pid)


def test_a_result_is_written_whole_and_names_no_place(tmp_path: Path) -> None:
    """Neither folders nor interpreters of the machine stand in it."""
    import json

    from gpu_pairs import parsed
    from gpu_report import write

    words = ["--engines", "mlx", "--mlx-python", "/no/python", "--output", str(tmp_path)]
    options = parsed(words)
    options.mlx_python = "true"
    write("gpu_pairs", "tiny", "how", options, {"rows": {}}, ["a table"])
    (path,) = tmp_path.glob("*-gpu-pairs-tiny.json")
    found = json.loads(path.read_text())
    assert found["benchmark"] == "gpu_pairs"
    assert found["machine"]["versions"]["mlx"] == {}
    assert str(tmp_path) not in path.read_text()
    assert path.with_suffix(".md").read_text() == "a table\n"
    assert list(tmp_path.glob("*.part")) == []
