"""Arguments that several verbs have, with what a shell completes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli import completion

TopologyFile = Annotated[
    str,
    typer.Argument(help="A topology file.", metavar="TOPOLOGY", autocompletion=completion.files),
]
TopologyPath = Annotated[
    Path,
    typer.Argument(help="A topology file.", metavar="TOPOLOGY", autocompletion=completion.files),
]
Cluster = Annotated[
    str,
    typer.Argument(
        help="A topology file, or the name of a cluster that was launched here.",
        metavar="TOPOLOGY",
        autocompletion=completion.clusters,
    ),
]
ClusterUnlessComparing = Annotated[
    str | None,
    typer.Argument(
        help="A topology file, or the name of a cluster that was launched here; none with "
        "--compare.",
        metavar="TOPOLOGY",
        autocompletion=completion.clusters,
        show_default=False,
    ),
]
Replica = Annotated[
    str,
    typer.Argument(
        help="The replica's name.", metavar="REPLICA", autocompletion=completion.replicas
    ),
]
ReplicaOrRouter = Annotated[
    str,
    typer.Argument(
        help='The replica\'s name, or "router".',
        metavar="REPLICA",
        autocompletion=completion.processes,
    ),
]
ProcessNames = Annotated[
    list[str] | None,
    typer.Argument(
        help='Replicas, "router", "agent-HOST" or "store-HOST"; all of them by default.',
        metavar="[REPLICA]...",
        autocompletion=completion.processes,
        show_default=False,
    ),
]
