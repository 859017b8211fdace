"""Progress on a terminal and elsewhere; an interruption that ends it at once."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny import make_checkpoint

from pdctl.cli import render

PDCTL = Path(sys.executable).with_name("pdctl")


def show(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    monkeypatch.setattr(render, "stderr", lambda: console)
    with render.steps() as watcher:
        watcher.step("reading")
        watcher.host("gpu1", "checking ports")
        watcher.host("gpu1", "fingerprinting")
        watcher.host("studio", "checking ports")
        watcher.hashing("gpu1:/models/x", 2 << 30, 4 << 30)
        watcher.hashing("gpu1:/models/x", 4 << 30, 4 << 30)
    return out.getvalue()


def test_elsewhere_every_step_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show(monkeypatch, terminal=False).splitlines()
    assert lines == [
        "reading …",
        "gpu1: checking ports …",
        "gpu1: fingerprinting …",
        "studio: checking ports …",
        "gpu1:/models/x: hashed 2.0 GiB of 4.0 GiB",
        "gpu1:/models/x: hashed 4.0 GiB of 4.0 GiB",
    ]


def test_a_terminal_has_a_row_per_host_and_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last picture: what each host does now; only a directory shows bytes."""
    picture = show(monkeypatch, terminal=True)
    last = picture[picture.rindex("gpu1: fingerprinting") :].split("\x1b[?25h")[0]
    rows = [row.strip() for row in last.splitlines()[:3]]
    assert rows[0].startswith("gpu1: fingerprinting")
    assert rows[1].startswith("studio: checking ports")
    assert rows[2].startswith("hashing gpu1:/models/x")
    assert rows[2].endswith("4.0/4.0 GiB")
    assert "bytes" not in rows[0]


def huge(folder: Path) -> Path:
    """A checkpoint whose weights are 400 GiB of holes: many minutes of hashing, no disk."""
    make_checkpoint(folder, "llama")
    size = 400 << 30
    entry = {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, 8 + len(header) + size)
    return folder


def test_an_interruption_ends_hashing_at_once(tmp_path: Path) -> None:
    """Exit code 130 within seconds, although hosts are asked on other threads."""
    model = huge(tmp_path / "model")
    file = tmp_path / "topology.toml"
    file.write_text(
        f'schema = 1\nname = "huge"\n[model]\nname = "m"\ncontext_length = 1024\n'
        f'[[replicas]]\nname = "o0"\nengine = "mlx"\nrole = "both"\nmodel = "{model}"\n'
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        (str(PDCTL), "validate", str(file)),
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "fingerprinting" in line:
                break
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
        assert "Traceback" not in running.stderr.read()
