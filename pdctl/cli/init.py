"""`pdctl init`: a commented starter topology."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli import completion
from pdctl.errors import UsageError

FIRST = "mlx-to-mlx"


def starter_names() -> tuple[str, ...]:
    """Every file of the packaged folder is one."""
    files_there = files("pdctl.cli").joinpath("starters").iterdir()
    names = {file.name.removesuffix(".toml") for file in files_there if file.name.endswith(".toml")}
    return tuple(sorted(names, key=lambda name: (name != FIRST, name)))


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.", metavar="[PATH]")] = Path(
        "topology.toml"
    ),
    starter: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NAME",
            help=f"Which starter: {', '.join(starter_names())}.",
            autocompletion=completion.starters,
        ),
    ] = FIRST,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented starter topology.

    Each starter is a whole deployment that `pdctl validate --offline` accepts as it is; what is
    to be edited is paths, addresses and names. An existing file is left alone."""
    if starter not in starter_names():
        raise UsageError(
            f'there is no starter "{starter}"', hint="starters: " + ", ".join(starter_names())
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
