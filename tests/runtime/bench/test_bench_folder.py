from __future__ import annotations

import json
from pathlib import Path

import pytest
from runtime.bench.bench_points import RUN, good

from pdctl.errors import PdctlError, UsageError
from pdctl.runtime.bench.folder import save_points, save_report, writable


def test_every_point_has_a_json_file(tmp_path: Path) -> None:
    written = save_points(writable(tmp_path / "results"), RUN, good())
    assert [path.name for path in written] == [
        "studio-20260102-030405-d0-in66-conc1.json",
        "studio-20260102-030405-p0-to-d0-in66-conc1.json",
    ]
    assert json.loads(written[1].read_text())["pd_path"] == "p0>d0"


def test_a_run_has_a_markdown_and_an_html_file_and_nothing_else(tmp_path: Path) -> None:
    written = save_report(tmp_path, RUN, good())
    assert {path.name for path in written} == {
        "studio-20260102-030405.md",
        "studio-20260102-030405.html",
    }
    assert set(tmp_path.iterdir()) == set(written)


def test_a_result_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--result-dir .*/file cannot be made: File exists"):
        writable(tmp_path / "file")
    with pytest.raises(PdctlError, match="cannot write results"):
        save_points(tmp_path / "file", RUN, good())
