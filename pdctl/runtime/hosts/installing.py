"""How pdctl comes into another interpreter: from what this machine's was installed from."""

from __future__ import annotations

import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

import pdctl
from pdctl import __version__

IN_ENGINES = ("msgspec", "numpy", "xxhash")
"""What pdctl needs inside an engine's process; an engine's own packages are left as they are."""


class _Direct(msgspec.Struct, frozen=True):
    """`direct_url.json` of an installed package (PEP 610)."""

    url: str


def origin() -> Path | None:
    """The checkout that this pdctl runs from, else the folder or wheel that it was installed
    from; None where that is not there any more, or was never on this machine."""
    checkout = Path(pdctl.__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout
    try:
        told = metadata.distribution("pdctl").read_text("direct_url.json")
        url = urlsplit(msgspec.json.decode(told or "{}", type=_Direct).url)
    except (metadata.PackageNotFoundError, msgspec.MsgspecError):
        return None
    source = Path(unquote(url.path))
    return source if url.scheme == "file" and source.exists() else None


def install(python: str, *, host: str | None, extra: str = "", alone: bool = False) -> str:
    """A hint that brings this very pdctl into an interpreter.

    Args:
        python: as its host's shell would run it.
        host: of the interpreter; None: this machine.
        extra: of pdctl's optional dependencies, as `mlx`.
        alone: into an engine's environment: without pdctl's dependencies but those inside one.
    """
    source = origin()
    if source is None:
        where = f"on {host}" if host is not None else "there"
        return f"install pdctl {__version__} {where}, from what this one was installed from"
    place = str(source) if host is None else f"./{source.name}"
    package = shlex.quote(f"{place}[{extra}]" if extra else place)
    command = f"{python} -m pip install {package}"
    if alone:
        needed = f"{python} -m pip install {' '.join(IN_ENGINES)}"
        command = f"{needed} && {python} -m pip install --no-deps {package}"
    return command if host is None else f"copy {source} to {host}, and there: {command}"
