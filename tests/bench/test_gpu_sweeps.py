"""Sweeps take whole rounds, end in time, and write what they have, whatever failed."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import make_checkpoint

from pdctl.runtime.bench.client import Sample
from pdctl.runtime.bench.prompts import Prompt, PromptSource


class Scripted:
    """A way that answers at once with a TTFT of its own."""

    def __init__(self, name: str, ttft_ms: float, error: str | None = None) -> None:
        self.name, self._ttft_s, self._error = name, ttft_ms / 1e3, error
        self.asked: list[int] = []

    async def take(self, session: Any, prompt: Prompt, key: str, output_tokens: int = 6) -> Any:
        from gpu_ways import Taken

        self.asked.append(prompt.tokens)
        return Taken(
            Sample(
                started_s=0.0,
                ttft_s=self._ttft_s,
                e2el_s=self._ttft_s + 0.05,
                output_tokens=output_tokens,
                text="same",
                error=self._error,
            )
        )


class Ticking:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shape "tiny" in it, which is there whole."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = make_checkpoint(folder / "tiny", "llama")
    (made / "model.safetensors.index.json").touch()
    return folder


@pytest.fixture(scope="module")
def source(checkpoints: Path) -> PromptSource:
    return PromptSource.of_checkpoint(checkpoints / "tiny", seed=0)


@pytest.fixture
def options(checkpoints: Path, tmp_path: Path) -> Callable[..., argparse.Namespace]:
    """As the program's own command line gives them."""

    def made(program: Any, *words: str) -> argparse.Namespace:
        pythons = [w for e in ("vllm", "sglang", "mlx") for w in (f"--{e}-python", "true")]
        places = ["--output", str(tmp_path / "results"), "--checkpoints", str(checkpoints)]
        found = program.parsed([*pythons, *places, *words])
        assert isinstance(found, argparse.Namespace)
        return found

    return made


def written(folder: Path) -> tuple[dict[str, Any], str]:
    (path,) = (folder / "results").glob("*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_pairs_take_turns_and_a_way_that_fails_is_asked_no_more(
    options: Callable[..., argparse.Namespace], source: PromptSource
) -> None:
    """Warm-ups are not counted; the others' samples are complete."""
    import gpu_pairs
    from gpu_budget import Budget

    good, broken = Scripted("vd", 10.0), Scripted("vp>vd", 20.0, error="502: gone")
    cells: Any = {}
    asked = options(gpu_pairs, "--lens", "51,64", "--rounds", "4")
    asyncio.run(gpu_pairs.sweep([good, broken], source, asked, Budget(60.0), cells))
    assert good.asked == [51] * 5 + [64] * 5
    assert broken.asked == [51] * 2 + [64] * 2
    assert len(cells[64]["vd"].good) == 4
    assert cells[64]["vp>vd"].summary() == {"errors": ["502: gone"] * 2}


def test_pairs_that_are_out_of_time_name_what_is_left(
    options: Callable[..., argparse.Namespace], source: PromptSource
) -> None:
    """A length of which not one counted round was taken is not among the results."""
    import gpu_pairs
    from gpu_budget import Budget

    budget, cells = Budget(7.0, Ticking()), {}
    asked = options(gpu_pairs, "--lens", "51,64", "--rounds", "4")
    asyncio.run(gpu_pairs.sweep([Scripted("vd", 10.0)], source, asked, budget, cells))
    assert set(cells) == {51}
    assert any(name.startswith("64 tokens from round 0") for name in budget.left_out)


def test_pairs_write_figures_with_what_failed_and_what_was_left_out(
    options: Callable[..., argparse.Namespace],
    source: PromptSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_pairs
    from gpu_budget import Budget

    monkeypatch.setattr(gpu_pairs, "rates", lambda sizes: dict.fromkeys(sizes, 4e9))
    asked, budget = options(gpu_pairs, "--lens", "64", "--rounds", "2"), Budget(60.0)
    run = gpu_pairs.Run(asked, budget, "tiny", tmp_path / "logs")
    ways = [Scripted("vllm", 10.0), Scripted("vd", 11.0), Scripted("vp>vd", 30.0)]
    ways.append(Scripted("vpi>vdi", 24.0))
    asyncio.run(gpu_pairs.sweep(ways, source, asked, budget, run.cells))
    budget.allows("8000 tokens", 1e9)
    run.write(
        SimpleNamespace(up_s=1.0, failed={"native-1": "exit 5: up\nerror: not ready\n\nhint: logs"})
    )
    whole, page = written(tmp_path)
    assert whole["rows"]["64"]["vp>vd"]["of_floor"] == pytest.approx(30 / 20)
    assert "vp>vd against vpi>vdi, medians of differences: +25.0% at 64." in page
    assert "Left out for want of time: 8000 tokens." in page
    assert "native-1 did not come up: error: not ready" in page


def test_an_idle_cost_is_looked_at_until_it_is_decided(
    options: Callable[..., argparse.Namespace], source: PromptSource, tmp_path: Path
) -> None:
    """Ways without scatter are decided as soon as there are enough pairs."""
    import gpu_idle
    from gpu_budget import Budget

    ways = [Scripted("ordinary eager", 40.0), Scripted("apart eager", 40.2)]
    ways.append(Scripted("inside eager", 44.0))
    found: Any = {}
    asked, budget = options(gpu_idle, "--lens", "51"), Budget(60.0)
    asyncio.run(gpu_idle.sweep(ways, source, asked, budget, found))
    assert gpu_idle.LEAST <= len(found[51]["ordinary eager"].taken) <= 2 * gpu_idle.LEAST
    decided = {name: each["decided"] for name, each in gpu_idle.losses(found[51]).items()}
    assert decided == {"apart eager": "within", "inside eager": "over"}
    started = SimpleNamespace(up_s=1.0, failed={})
    gpu_idle.write_found(asked, budget, "tiny", started, found)
    whole, page = written(tmp_path)
    assert whole["losses"]["51"]["inside eager"]["loss"] == pytest.approx(0.1)
    assert "| inside eager | +10.0%" in page


def test_a_load_goes_round_by_round_and_is_shown_by_clients(
    options: Callable[..., argparse.Namespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_load
    from gpu_budget import Budget

    words = ("--lens", "40,64", "--requests", "8", "--concurrency", "4,1")
    words = (*words, "--lone-requests", "4")
    asked = options(gpu_load, *words)
    good, broken = Scripted("vp>vd tcp", 10.0), Scripted("sp>sd tcp", 10.0, error="502: gone")
    monkeypatch.setattr(gpu_load, "ways", lambda started: iter([good, broken]))
    run = gpu_load.Run(asked, Budget(60.0), "tiny", tmp_path / "logs")
    asyncio.run(run.rounds(SimpleNamespace(targets={}), Budget(60.0)))
    run.write()
    whole, page = written(tmp_path)
    assert [len(rounds) for rounds in whole["ways"]["vp>vd tcp"].values()] == [2, 2]
    # warm-ups, two rounds at four clients, two at one
    assert len(good.asked) == 4 + 2 * 8 + 2 * 4
    assert [len(rounds) for rounds in whole["ways"]["sp>sd tcp"].values()] == [1, 1]
    assert "| sp>sd tcp | failed | failed |" in page


def test_shared_documents_are_shown_beside_the_engines_own_cache(
    options: Callable[..., argparse.Namespace], tmp_path: Path
) -> None:
    import gpu_sharing
    from gpu_budget import Budget
    from gpu_report import Cell

    found = {name: Cell() for name in gpu_sharing.WAYS}
    ttft = {"none": 100.0, "own": 20.0, "cold on": 104.0, "store": 30.0}
    for name, way in ((name, Scripted(name, ms)) for name, ms in ttft.items()):
        for _ in range(30):
            found[name].add(asyncio.run(way.take(None, Prompt(text="", tokens=1), "")))
    run = gpu_sharing.Run(options(gpu_sharing), Budget(60.0), "tiny", tmp_path / "logs")
    run.documents = {"mlx": {4438: gpu_sharing.figures_of(found)}}
    run.turns = {"mlx": {"mlx on, prefix": [{"hit_rate": 0.5}, {"hit_rate": 0.7}]}}
    run.write(SimpleNamespace(up_s=1.0, failed={}))
    whole, page = written(tmp_path)
    assert whole["documents"]["mlx"]["4438"]["store_to_own"] == 1.5
    assert whole["documents"]["mlx"]["4438"]["cold"]["decided"] == "within"
    assert "| mlx on, prefix | –, – | –, – | –, – | 0.5, 0.7 |" in page
