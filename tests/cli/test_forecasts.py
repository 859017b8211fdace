"""What `pdctl plan` predicts, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from topology.texts import GOOD

from pdctl.cli.app import main
from pdctl.runtime.cost.record import Costs, PathRecord, Sample, encode, identity
from pdctl.topology.load import loads
from pdctl.topology.plan import derive


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "topology.toml"
    path.write_text(GOOD)
    return path


def measured(home: Path) -> None:
    """p0 is three times slower than d0, over a quick link."""
    topology, _ = loads(GOOD)
    assert topology is not None
    plan = derive(topology)

    def record(path: str, token_s: float, fixed_s: float) -> PathRecord:
        samples = tuple(
            Sample(
                tokens=n,
                ttft_s=fixed_s + token_s * n,
                at=0.0,
                prefill_s=token_s * n if fixed_s else None,
                transfer_s=fixed_s / 2 if fixed_s else None,
            )
            for n in (51, 184, 744)
        )
        return PathRecord(
            identity=identity(plan, path),
            contract="c",
            versions=("0.32.2",) * (1 + (">" in path)),
            samples=samples,
            steps_s=(0.03,),
            round_trip_s=0.0004 if fixed_s else None,
        )

    costs = Costs(paths={"d0": record("d0", 1e-3, 0.0), "p0>d0": record("p0>d0", 3e-3, 0.01)})
    folder = home / "pdctl" / topology.name
    folder.mkdir(parents=True)
    (folder / "costs.json").write_bytes(encode(costs))


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    assert not caught.value.code
    return capsys.readouterr().out


def test_where_nothing_was_measured_plan_says_so_and_how(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, "plan", file, "--offline")
    assert "predicted" not in out
    assert "not measured yet: d0, p0>d0. After `pdctl up`, run `pdctl bench studio`" in out
    assert out.count("p0>d0. ") == 1
    assert "nothing is known" not in out


def test_plan_predicts_what_was_measured_and_says_why_a_split_does_not_pay(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(tmp_path / "state")
    out = told(capsys, "plan", file, "--offline")
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("744 "))
    assert (row[0], row[2], row[3:]) == ("744", "(1)", ["2242", "(1)"])
    assert float(row[1]) == pytest.approx(744, rel=0.02)
    step = next(line for line in out.splitlines() if "per token then" in line)
    assert step.split()[3:] == ["30", "(2)", "30", "(2)"]
    assert "(n): by so many requests of about that length" in out
    assert (
        "mlx → mlx (p0>d0) never pays here: prefill is 3 × slower than d0's own at 744 tokens"
    ) in out
    assert "  round trip 0.4 ms; a handoff costs 5 ms whatever its length" in out
    assert "not measured yet" not in out


def test_the_same_as_json(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(tmp_path / "state")
    forecast = json.loads(told(capsys, "plan", file, "--offline", "--json"))["forecast"]
    assert forecast["lengths"] == [51, 184, 744]
    assert forecast["unmeasured"] == []
    (pair,) = forecast["pairs"]
    assert (pair["path"], pair["alone"], pair["break_even_tokens"]) == ("p0>d0", "d0", None)
