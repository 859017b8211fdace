from __future__ import annotations

import json
from pathlib import Path

import pytest
from runtime.bench.bench_points import RUN, good

from pdctl.errors import PdctlError, UsageError
from pdctl.runtime.bench.folder import read_points, save_points, save_report, writable


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


def test_a_point_is_read_back_as_it_was_and_what_is_none_is_named(tmp_path: Path) -> None:
    save_points(tmp_path, RUN, good())
    (tmp_path / "a.json").write_text('{"date": "20')
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / ".c.json.part").write_text("")
    points, unreadable = read_points(tmp_path)
    assert sorted(points, key=lambda p: p.pd_path) == sorted(good(), key=lambda p: p.pd_path)
    assert unreadable == ("a.json", "b.json")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the results in .*/none"):
        read_points(tmp_path / "none")
