"""`pdctl init`: a commented starter topology."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from pdctl.errors import UsageError

STARTERS = ("mlx-to-mlx",)


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("topology.toml"),
    starter: Annotated[
        str, typer.Option("--from", help=f"Which starter: {', '.join(STARTERS)}.")
    ] = STARTERS[0],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented starter topology."""
    if starter not in STARTERS:
        raise UsageError(
            f'there is no starter "{starter}"', hint="starters: " + ", ".join(STARTERS)
        )
    text = files("pdctl.cli").joinpath(f"starters/{starter}.toml").read_text("utf-8")
    target = path.expanduser()
    if target.is_dir():
        target = target / "topology.toml"
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{target} exists already", hint="--force replaces it") from None
    except OSError as error:
        raise UsageError(
            f"{target} can't be written: {error.strerror}",
            hint="give a path in a folder that exists and is yours",
        ) from None
    typer.echo(f"wrote {target}")
    typer.echo(f"next: edit it, then `pdctl validate {target}`", err=True)
