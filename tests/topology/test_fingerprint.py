"""Fingerprints: content counts and nothing else; remembered, and never wrongly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pdctl.topology import digests
from pdctl.topology.checkpoint import read_checkpoint
from pdctl.topology.contract import Contract
from pdctl.topology.digests import DigestCache
from pdctl.topology.fingerprint import (
    Fingerprint,
    FingerprintError,
    check_dtype,
    fingerprint,
    make_contract,
)
from pdctl.topology.model import Dtype

WEIGHTS = "model.safetensors"


def taken(folder: Path, cache: DigestCache) -> Fingerprint:
    checkpoint, found = read_checkpoint(folder)
    assert checkpoint is not None, found
    return fingerprint(folder, checkpoint, cache=cache)


def contract(folder: Path, cache: DigestCache) -> Contract:
    checkpoint, _ = read_checkpoint(folder)
    assert checkpoint is not None
    return make_contract(checkpoint, taken(folder, cache), dtype=Dtype.FLOAT16, context_length=2048)


def edit_json(path: Path, **changes: Any) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content, indent=7, sort_keys=True))


def reshard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for part in range(3):
        name = f"model-0000{part + 1}-of-00003.safetensors"
        chosen = {k: tensors[k] for k in sorted(tensors, reverse=True)[part::3]}
        save_file(chosen, folder / name)
        weight_map |= dict.fromkeys(chosen, name)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def respell_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    config["torch_dtype"] = "float32"
    config["_name_or_path"] = "elsewhere"
    (folder / "config.json").write_text(json.dumps(config, sort_keys=True))


def move_template(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=text + "\n", padding_side="left")


def respell_tokenizer(folder: Path) -> None:
    edit_json(folder / "tokenizer.json")


@pytest.mark.parametrize("change", [reshard, respell_config, move_template, respell_tokenizer])
def test_a_copy_that_means_the_same_has_the_same_contract(
    change: Callable[[Path], None], tiny_llama: Path, copy: Path, cache: DigestCache
) -> None:
    """Sharding, order in files, cosmetic edits and places of the template do not count; R56."""
    change(copy)
    assert contract(copy, cache).digest == contract(tiny_llama, cache).digest


def flip_a_byte(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"].view(np.uint8)[3] ^= 1
    save_file(tensors, folder / WEIGHTS)


def reshape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(2, -1)
    save_file(tensors, folder / WEIGHTS)


def add_a_tensor(folder: Path) -> None:
    save_file({**load_file(folder / WEIGHTS), "extra": np.zeros(3, np.float16)}, folder / WEIGHTS)


def change_eps(folder: Path) -> None:
    edit_json(folder / "config.json", rms_norm_eps=1e-6)


def swap_two_ids(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def add_merges(folder: Path) -> None:
    (folder / "merges.txt").write_text("a b\n")


def change_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + " ")


def change_theta(folder: Path) -> None:
    edit_json(folder / "config.json", rope_theta=5e5)


def change_positions(folder: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=4096)


def change_eos(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (flip_a_byte, "weights"),
        (reshape, "weights"),
        (add_a_tensor, "weights"),
        (change_eps, "weights"),
        (swap_two_ids, "tokenizer"),
        (add_merges, "tokenizer"),
        (change_eos, "tokenizer"),
        (change_template, "chat_template"),
        (change_theta, "positions"),
        (change_positions, "positions"),
    ],
)
def test_each_change_of_content_changes_its_field_alone(
    change: Callable[[Path], None],
    field: str,
    tiny_llama: Path,
    copy: Path,
    cache: DigestCache,
) -> None:
    """R54: one changed byte, token id, template or rope value shows in exactly one field."""
    change(copy)
    left, right = contract(tiny_llama, cache), contract(copy, cache)
    differing = [n for n in left.__struct_fields__ if getattr(left, n) != getattr(right, n)]
    assert differing == [field]
    assert left.digest != right.digest


def test_a_stored_head_of_tied_embeddings_does_not_count(
    tiny_llama: Path, copy: Path, cache: DigestCache
) -> None:
    """Some copies of a tied checkpoint store lm_head.weight, others don't; no engine reads it."""
    edit_json(copy / "config.json", tie_word_embeddings=True)
    stored = taken(copy, cache).weights
    tensors = load_file(copy / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, copy / WEIGHTS)
    assert taken(copy, cache).weights == stored
    assert stored != taken(tiny_llama, cache).weights


def test_a_second_fingerprint_reads_no_weights(
    copy: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R55: remembered digests are used; not one byte of a tensor is read again."""
    first = taken(copy, cache)
    assert first.read_bytes == first.total_bytes > 0

    def forbidden(*_: object) -> int:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(digests.os, "preadv", forbidden)
    second = taken(copy, DigestCache(cache._folder))
    assert second.read_bytes == 0
    assert second.weights == first.weights


def test_a_changed_file_is_hashed_again(copy: Path, cache: DigestCache) -> None:
    """Same path, size and mtime, other bytes: the change time gives it away."""
    first = taken(copy, cache)
    before = (copy / WEIGHTS).stat()
    with (copy / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(copy / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (copy / WEIGHTS).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = taken(copy, cache)
    assert second.read_bytes > 0
    assert second.weights != first.weights


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\xff\xfe", b'{"version": 1}', b"[" * 5000])
def test_a_garbled_cache_is_as_good_as_none(garbage: bytes, copy: Path, cache: DigestCache) -> None:
    first = taken(copy, cache)
    for entry in cache._folder.iterdir():
        entry.write_bytes(garbage)
    second = taken(copy, cache)
    assert second.read_bytes > 0
    assert second.weights == first.weights
    assert [p for p in cache._folder.iterdir() if p.suffix != ".json"] == []


def test_an_unwritable_cache_costs_only_time(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert taken(copy, DigestCache(tmp_path / "file" / "cache")).read_bytes > 0


def test_the_cache_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative XDG_CACHE_HOME is invalid by its specification and ignored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digests.cache_dir() == tmp_path / "pdctl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert digests.cache_dir() == Path.home() / ".cache" / "pdctl"


def test_progress_ends_at_the_total(copy: Path, cache: DigestCache) -> None:
    """Progress rises and its last call says that all is done."""
    checkpoint, _ = read_checkpoint(copy)
    assert checkpoint is not None
    calls: list[tuple[int, int]] = []
    found = fingerprint(
        copy, checkpoint, cache=cache, progress=lambda *call: calls.append(call), workers=3
    )
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (found.total_bytes, found.total_bytes)


def test_a_file_that_changes_meanwhile_is_an_error(copy: Path, cache: DigestCache) -> None:
    """The identity is checked again after hashing, so a digest of two halves is never kept."""
    checkpoint, _ = read_checkpoint(copy)
    assert checkpoint is not None

    def touch(*_: object) -> None:
        os.utime(copy / WEIGHTS, ns=(1, 1))

    with pytest.raises(FingerprintError, match="changed while it was read"):
        fingerprint(copy, checkpoint, cache=cache, progress=touch)
    assert taken(copy, cache).read_bytes > 0


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"\x00" * 7, "truncated"),
        (b"\xff" * 64, "truncated"),
        ((20).to_bytes(8, "little") + b"not json at all, no!", "garbled header"),
        (header({"a": 3}), "entry for tensor a is garbled"),
        (header({"a": {"dtype": "F17", "shape": [], "data_offsets": [0, 2]}}), "garbled"),
        (header({"a": entry(0, 4, [2])}) + b"12", "is truncated"),
        (header({"a": entry(0, 4, [2])}) + b"123456", "after its last tensor"),
        (header({"a": entry(0, 4, [3])}) + b"1234", "tensor a has 4 bytes"),
        (header({"a": entry(0, 4, [2]), "b": entry(2, 6, [2])}) + b"123456", "b overlaps"),
        (header({"a": entry(0, 4, [2]), "b": entry(6, 10, [2])}) + b"0" * 10, "hole before it"),
    ],
)
def test_broken_safetensors_are_named(
    content: bytes, words: str, copy: Path, cache: DigestCache
) -> None:
    """Truncated, overlapping and garbage files give a sentence with the file's name."""
    (copy / WEIGHTS).write_bytes(content)
    with pytest.raises(FingerprintError, match=r"model\.safetensors") as caught:
        taken(copy, cache)
    assert words in caught.value.message


def test_missing_and_doubled_weights_are_named(copy: Path, cache: DigestCache) -> None:
    reshard(copy)
    (copy / "model-00002-of-00003.safetensors").rename(copy / "gone")
    with pytest.raises(FingerprintError, match=r"model-00002-of-00003\.safetensors is missing"):
        taken(copy, cache)
    (copy / "gone").rename(copy / "model-00002-of-00003.safetensors")
    save_file({"model.norm.weight": np.zeros(256, np.float16)}, copy / WEIGHTS)
    with pytest.raises(FingerprintError, match=r"model\.norm\.weight stands in more"):
        taken(copy, cache)
    for path in copy.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(FingerprintError, match="holds no safetensors file"):
        taken(copy, cache)


def test_quantised_tensors_are_refused_by_name(copy: Path, cache: DigestCache) -> None:
    """R53: even when config.json is silent about it."""
    save_file({"model.norm.weight": np.zeros(4, np.uint32)}, copy / WEIGHTS)
    with pytest.raises(FingerprintError, match=r"tensor model\.norm\.weight is U32"):
        taken(copy, cache)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_garbled_tokenizer_is_named(name: str, copy: Path, cache: DigestCache) -> None:
    (copy / name).write_text("{")
    with pytest.raises(FingerprintError, match=name):
        taken(copy, cache)


def test_a_cast_is_warned(copy: Path, cache: DigestCache) -> None:
    """R33: a checkpoint stored in another dtype than it is served in."""
    content = taken(copy, cache)
    assert content.stored_dtype == "float16"
    assert check_dtype(content, Dtype.FLOAT16) == []
    (warning,) = check_dtype(content, Dtype.BFLOAT16)
    assert warning.severity == "warning"
    assert "is float16 and is served as bfloat16" in warning.summary
