"""What `validate` says of two replicas that may not exchange KV cache; nothing is launched."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.cluster import PDCTL, topology_text
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.engine


def validate(folder: Path, prefill: Path, decode: Path, *, edit: str = "") -> tuple[int, Any]:
    """Exit code and report of `pdctl validate --json` for p0 on one copy and d0 on another."""
    text = topology_text("mismatch", prefill, bind="127.0.0.1:18999", roles={"p0": "prefill"})
    _, _, replica = topology_text(
        "mismatch", decode, bind="127.0.0.1:18999", roles={"d0": "decode"}
    ).partition("[[replicas]]")
    file = folder / "topology.toml"
    file.write_text(f"{text}\n[[replicas]]{replica}\n{edit}")
    done = subprocess.run(
        [PDCTL, "validate", file, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def flip_one_byte(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    changed = tensors[name].copy()
    changed.view(np.uint8).reshape(-1)[7] ^= 1
    save_file({**tensors, name: changed}, file, metadata={"format": "pt"})


def change_tokenizer(copy: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        first, second, *_ = sorted(vocab, key=vocab.__getitem__)[300:]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    edit_json(copy / "tokenizer.json", swap)


def change_template(copy: Path) -> None:
    file = copy / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def change_theta(copy: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["rope_theta"] = 500000.0
        if content.get("rope_parameters"):
            content["rope_parameters"]["rope_theta"] = 500000.0

    edit_json(copy / "config.json", change)


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "copy"))


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (flip_one_byte, "weights", "model.layers.1.mlp.down_proj.weight"),
        (change_tokenizer, "tokenizer", "tokenizer.json"),
        (change_template, "chat_template", "template"),
        (change_theta, "positions", "rope_theta"),
    ],
)
def test_a_difference_is_named_by_field_and_replicas(
    change: Callable[[Path], None],
    field: str,
    words: str,
    checkpoints: dict[str, Path],
    copy: Path,
    tmp_path: Path,
) -> None:
    """R54: exit 3; the field, what differs in it, and both replicas, before any launch."""
    change(copy)
    code, report = validate(tmp_path, checkpoints["llama"], copy)
    assert code == 3, report
    found = [d for d in report["diagnostics"] if d["code"] == f"contract.{field}"]
    assert found, report
    told = json.dumps(found)
    assert "p0" in told
    assert "d0" in told
    assert words in told


def test_a_cosmetic_edit_and_a_resharded_copy_pass(
    checkpoints: dict[str, Path], copy: Path, tmp_path: Path
) -> None:
    """The contract compares meaning, not bytes of config.json or the cut of the shards."""
    edit_json(copy / "config.json", lambda c: c.update(transformers_version="0.0", torch_dtype="x"))
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    half = len(names) // 2
    parts = {
        "model-00001-of-00002.safetensors": names[half:],
        "model-00002-of-00002.safetensors": names[:half],
    }
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, copy / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, part in parts.items() for n in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    code, report = validate(tmp_path, checkpoints["llama"], copy)
    assert code == 0, report
    assert report["valid"]


def test_a_checkpoint_that_mlx_reads_wrongly_is_refused_by_field(
    checkpoints: dict[str, Path], copy: Path, tmp_path: Path
) -> None:
    """rope_theta only under rope_parameters: mlx-lm would run with 10000, and text stays
    plausible. Where the installed mlx-lm reads it rightly, validation passes."""

    def move(content: dict[str, Any]) -> None:
        theta = content.pop("rope_theta")
        content["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}

    edit_json(copy / "config.json", move)
    code, report = validate(tmp_path, copy, copy)
    if code == 0:
        pytest.skip("this mlx-lm reads rope_parameters")
    assert code == 3, report
    assert any(d["code"] == "contract.positions" for d in report["diagnostics"])
    assert "rope_theta" in json.dumps(report)
