"""`pdctl fingerprint`: the contract of one local checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.errors import TopologyError
from pdctl.topology.model import Dtype


def fingerprint(
    model_dir: Annotated[Path, typer.Argument(help="A checkpoint's directory.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Served as; the checkpoint's own by default.")
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(min=1, help="Served context; the checkpoint's positions by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the contract as JSON.")] = False,
) -> None:
    """Show the contract of one local checkpoint: each field, and the digest."""
    from pdctl.cli import render
    from pdctl.topology import fingerprint as fingerprints
    from pdctl.topology.checkpoint import check_context, read_checkpoint

    folder = model_dir.expanduser()
    checkpoint, found = read_checkpoint(folder)
    if checkpoint is None:
        raise TopologyError(found[0].summary, hint=found[0].hint)
    length = context_length or checkpoint.max_positions
    for problem in check_context(checkpoint, length):
        raise TopologyError(problem.summary, hint=problem.hint)
    with render.steps() as watcher:
        watcher.step(f"fingerprinting {folder}")
        content = fingerprints.fingerprint(
            folder,
            checkpoint,
            progress=lambda done, total: watcher.hashing(str(folder), done, total),
        )
    stored = Dtype(content.stored_dtype) if content.stored_dtype in set(Dtype) else Dtype.FLOAT16
    contract = fingerprints.make_contract(
        checkpoint, content, dtype=dtype or stored, context_length=length
    )
    if as_json:
        sizes = {name: getattr(contract, name) for name in ("token_kv_bytes", "page_bytes")}
        render.print_json({"contract": contract, "digest": contract.digest, **sizes})
        return
    console = render.stdout()
    for name in contract.__struct_fields__:
        console.print(f"{name:<14} {_text(getattr(contract, name))}", soft_wrap=True)
    console.print(f"{'digest':<14} {contract.digest}", soft_wrap=True)


def _text(value: object) -> str:
    import msgspec

    if isinstance(value, msgspec.Struct):
        return ", ".join(f"{name} {getattr(value, name)}" for name in value.__struct_fields__)
    return str(value)
