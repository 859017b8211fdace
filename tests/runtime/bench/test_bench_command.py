from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer
from anyio.from_thread import start_blocking_portal
from click.testing import Result
from runtime.bench.bench_router import FakeRouter, plan, replica_plan, topology
from tokenizers import Tokenizer
from typer.testing import CliRunner

from pdctl.cli.bench import BenchCommand, bench
from pdctl.errors import ClusterError, PdctlError, TopologyError, UsageError
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.target import running, tokenizer_directory
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import Dtype, Role

app = typer.Typer()
app.command(cls=BenchCommand)(bench)

QUICK = ["--input-lens", "51,66", "--output-len", "3", "--num-prompts", "2", "--num-warmups", "1"]


def record(
    url: str | None, model: Path, *, phase: str = "running", ssh: str | None = None
) -> ClusterRecord:
    ends = (replica_plan("p0", Role.PREFILL), replica_plan("d0", Role.DECODE))
    planned = plan(*(msgspec.structs.replace(end, model=str(model)) for end in ends))
    return ClusterRecord(
        run="r" * 32,
        phase=phase,
        created_at=0.0,
        topology_path="/elsewhere.toml",
        topology=topology(planned, ssh),
        plan=planned,
        contract=Contract(
            weights="w",
            tokenizer="t",
            chat_template="c",
            attention=Attention(kind="full", layers=1, kv_heads=1, head_dim=16),
            positions=Positions(rope_theta=1e4, max_positions=1024, context_length=1024),
            dtype=Dtype.FLOAT16,
        ),
        url=url,
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = StateDir.of("studio")
    (tmp_path / "state").mkdir()
    folder.make()
    return folder


@pytest.fixture
def router(
    state: StateDir, tokenizer: Tokenizer, prompts: PromptSource, tmp_path: Path
) -> Iterator[FakeRouter]:
    """A running cluster "studio": a router in a thread, a record, a checkpoint's tokenizer."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fake = FakeRouter(lambda text: len(prompts.ids(text)))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(fake.serving()) as url,
    ):
        state.write(record(url, tmp_path))
        yield fake


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["studio", *arguments])


def test_json_on_stdout_has_a_point_per_path_and_place(router: FakeRouter) -> None:
    result = run(*QUICK, "--concurrency", "1,2", "--json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    found = [(p["pd_input_len"], p["pd_concurrency"], p["pd_path"]) for p in points]
    assert found == [(n, c, path) for c in (1, 2) for n in (51, 66) for path in ("d0", "p0>d0")]
    for p in points:
        pair = p["pd_path"] == "p0>d0"
        assert p["completed"] == p["num_prompts"] == 2 * p["pd_concurrency"]
        assert p["pd_imported_tokens"] == (p["pd_input_len"] - 1 if pair else 0)
        assert [mark for mark in p["pd_marks"] if mark["kind"] != "steal"] == []
    assert points[0]["pd_versions"]["d0"] == "mlx 1"


def test_tables_go_to_stdout_and_progress_to_stderr(router: FakeRouter) -> None:
    result = run(*QUICK)
    assert "median TTFT (ms)" in result.stdout
    assert result.stderr.splitlines()[:2] == ["51 tokens", "66 tokens"]


def test_results_are_saved_only_where_asked(router: FakeRouter, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run(*QUICK, "--result-dir", str(kept))
    assert not kept.exists()
    run(*QUICK, "--result-dir", str(kept), "--save-result")
    assert sorted(path.suffix for path in kept.iterdir()) == [".html"] + [".json"] * 4 + [".md"]


def test_a_wrong_counter_and_another_text_are_marked_in_the_output(router: FakeRouter) -> None:
    router.extra_tokens = 1
    router.words_of["p0>d0"] = ["one", " two", " four"]
    points = json.loads(run(*QUICK, "--json").stdout)["points"]
    kinds = [{mark["kind"] for mark in p["pd_marks"]} - {"steal"} for p in points]
    assert kinds == [set(), {"moved", "text"}] * 2


def test_ctrl_c_prints_and_saves_what_was_measured_and_exits_130(
    router: FakeRouter, tmp_path: Path
) -> None:
    router.stall_at = 8
    router.stalled = lambda: os.kill(os.getpid(), signal.SIGINT)
    kept = tmp_path / "kept"
    result = run(*QUICK, "--json", "--save-result", "--result-dir", str(kept))
    assert result.exit_code == 130
    body = json.loads(result.stdout)
    assert body["interrupted"]
    assert [p["pd_rounds"] for p in body["points"]] == [2, 2]
    assert len(list(kept.iterdir())) == 4


def test_cells_without_an_answer_are_shown_and_fail(router: FakeRouter) -> None:
    """Exit 0 says that there is a figure in every cell."""
    router.refuse["p0>d0"] = (502, {"message": "gone", "type": "server_error", "code": "x"})
    result = run(*QUICK, "--json")
    assert isinstance(result.exception, ClusterError)
    assert result.exception.message == "no request came through in 2 of 4 cells"
    assert len(json.loads(result.stdout)["points"]) == 4


def test_a_router_that_dies_keeps_what_was_measured_and_fails(router: FakeRouter) -> None:
    router.status_fails_at = 16
    result = run(*QUICK, "--json")
    assert isinstance(result.exception, PdctlError)
    assert len(json.loads(result.stdout)["points"]) == 2


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--input-lens", "51,x"], "--input-lens"),
        (["--concurrency", "0"], "--concurrency"),
        (["--input-lens", "1024"], "--input-lens 1024"),
        (["--input-lens", "51", "--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_usage_errors_come_before_any_request(
    router: FakeRouter, arguments: list[str], names: str
) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError)
    assert names in result.exception.message
    assert router.asked == []


def test_a_cluster_that_is_not_running_is_an_error_with_the_command_to_start_it(
    state: StateDir,
) -> None:
    with pytest.raises(ClusterError) as caught:
        running("studio")
    assert caught.value.message == 'cluster "studio" is not running'
    assert caught.value.hint == "start it with: pdctl up studio"


def test_a_cluster_that_is_starting_is_not_measured_yet(state: StateDir, tmp_path: Path) -> None:
    state.write(record(None, tmp_path, phase="starting"))
    with pytest.raises(ClusterError, match='cluster "studio" is starting'):
        running("studio")


def test_an_unknown_name_is_a_topology_error(state: StateDir) -> None:
    with pytest.raises(TopologyError):
        running("nowhere")


def test_the_routers_api_key_is_sent(state: StateDir, tmp_path: Path) -> None:
    state.write(record(None, tmp_path))
    state.write_api_key("secret")
    target = running("studio")
    assert target.headers == {"authorization": "Bearer secret"}
    assert target.url == "http://127.0.0.1:8000"


def test_another_hosts_checkpoint_is_not_looked_for_here(
    state: StateDir, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    state.write(record(None, tmp_path))
    assert tokenizer_directory(running("studio")) == tmp_path
    state.write(record(None, tmp_path, ssh="gpu1"))
    with pytest.raises(UsageError) as caught:
        tokenizer_directory(running("studio"))
    assert "--tokenizer" in (caught.value.hint or "")


def lengths(router: FakeRouter) -> list[int]:
    """Tokens of the prompts that were asked for, each length once, in order."""
    counted = [router.tokens_of(body["prompt"]) for _, body in router.asked]
    return list(dict.fromkeys(counted))


def test_a_place_is_on_disk_as_soon_as_it_is_measured(router: FakeRouter, tmp_path: Path) -> None:
    found: list[str] = []

    def look() -> None:
        found.extend(path.name for path in tmp_path.glob("kept/*.json"))
        os.kill(os.getpid(), signal.SIGINT)

    router.stall_at, router.stalled = 8, look
    run(*QUICK, "--save-result", "--result-dir", str(tmp_path / "kept"))
    assert [name.partition("-in")[2] for name in found] == ["51-conc1.json"] * 2


def resumed(router: FakeRouter, kept: Path, *arguments: str) -> Result:
    router.stall_at = None
    router.asked.clear()
    return run(*(arguments or QUICK), "--resume", "--result-dir", str(kept), "--json")


@pytest.fixture
def killed(router: FakeRouter, tmp_path: Path) -> Path:
    """The folder of a sweep that ended after its first length."""
    router.stall_at = 8
    router.stalled = lambda: os.kill(os.getpid(), signal.SIGINT)
    kept = tmp_path / "kept"
    run(*QUICK, "--save-result", "--result-dir", str(kept))
    return kept


def test_what_is_whole_is_not_run_again(router: FakeRouter, killed: Path) -> None:
    result = resumed(router, killed)
    assert result.exit_code == 0, result.output
    assert lengths(router) == [66]
    points = json.loads(result.stdout)["points"]
    assert [(p["pd_input_len"], p["pd_path"]) for p in points] == [
        (n, path) for n in (51, 66) for path in ("d0", "p0>d0")
    ]
    assert sorted(path.suffix for path in killed.iterdir()) == [".html"] + [".json"] * 4 + [".md"]
    resumed(router, killed)
    assert router.asked == []


@pytest.mark.parametrize("content", ["", '{"date": "2026', "[]", None])
def test_a_file_that_is_corrupt_or_gone_is_measured_again(
    router: FakeRouter, killed: Path, content: str | None
) -> None:
    file = next(killed.glob("*p0-to-d0-in51*.json"))
    file.unlink() if content is None else file.write_text(content)
    resumed(router, killed)
    assert lengths(router) == [51, 66]
    assert json.loads(file.read_text())["pd_input_len"] == 51


@pytest.mark.parametrize("change", [{"pd_rounds": 1}, {"failed": 1}])
def test_a_point_with_rounds_or_answers_missing_is_measured_again(
    router: FakeRouter, killed: Path, change: dict[str, int]
) -> None:
    file = next(killed.glob("*d0-in51*.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    resumed(router, killed)
    assert lengths(router) == [51, 66]


def test_other_settings_are_refused_by_name(router: FakeRouter, killed: Path) -> None:
    result = resumed(router, killed, *QUICK, "--seed", "7")
    assert isinstance(result.exception, UsageError)
    assert "seed was 0, not 7" in result.exception.message
    assert router.asked == []


def test_resuming_in_an_empty_folder_starts_at_the_beginning(
    router: FakeRouter, tmp_path: Path
) -> None:
    assert resumed(router, tmp_path / "new").exit_code == 0
    assert lengths(router) == [51, 66]


def test_two_folders_are_compared_without_a_cluster(router: FakeRouter, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("before", "after")]
    for folder in folders:
        run(*QUICK, "--save-result", "--result-dir", folder)
    router.asked.clear()
    result = CliRunner().invoke(app, ["--compare", *folders, "--json"])
    assert result.exit_code == 0, result.output
    changes = json.loads(result.stdout)["changes"]
    assert len(changes) == 4 * 3
    assert {change["beyond_scatter"] for change in changes} == {None}
    assert router.asked == []
    assert "beyond scatter" in CliRunner().invoke(app, ["--compare", *folders]).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "TOPOLOGY is missing"), (["studio", "--compare", "a", "b"], "takes no TOPOLOGY")],
)
def test_a_topology_is_given_unless_folders_are_compared(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError)
    assert says in result.exception.message


def goodputs(*arguments: str) -> list[tuple[float | None, dict[str, float]]]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    return [(p["request_goodput"], p["pd_goodput"]) for p in points]


def test_goodput_takes_several_objectives_after_one_option_in_any_place(
    router: FakeRouter,
) -> None:
    asked = {"ttft": 60000.0, "tpot": 50000.0}
    for words in (
        ["studio", *QUICK, "--goodput", "ttft:60000", "tpot:50000"],
        ["--goodput", "ttft:60000", "tpot:50000", "studio", *QUICK],
        ["studio", "--goodput", "ttft:60000", "--goodput", "tpot:50000", *QUICK],
    ):
        found = goodputs(*words)
        assert [limits for _, limits in found] == [asked] * 4
        assert all(rate is not None and rate > 0 for rate, _ in found)
    assert goodputs("studio", *QUICK, "--goodput", "e2el:0")[0][0] == 0
    assert goodputs("studio", *QUICK)[0] == (None, {})
