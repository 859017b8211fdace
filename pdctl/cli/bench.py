"""`pdctl bench`: the prompt-length sweep against a running cluster (DESIGN §8)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from typer.core import TyperCommand

from pdctl.cli import render
from pdctl.cli.arguments import ClusterUnlessComparing
from pdctl.errors import ClusterError, PdctlError, UsageError
from pdctl.runtime.bench.columns import columns
from pdctl.runtime.bench.compare import compare as compare_runs
from pdctl.runtime.bench.compare import comparison_table, newest_runs
from pdctl.runtime.bench.folder import save_points, save_report, writable
from pdctl.runtime.bench.goodput import objectives
from pdctl.runtime.bench.links import Link, measure_links
from pdctl.runtime.bench.measure import Place, Results
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.report import points_of
from pdctl.runtime.bench.resume import Earlier, earlier, in_order, place_of, places, setting_of
from pdctl.runtime.bench.session import run_of, sweep
from pdctl.runtime.bench.settings import (
    DEFAULT_INPUT_LENS,
    Settings,
    check,
    default_input_lens,
    whole_numbers,
)
from pdctl.runtime.bench.summary import Point, Run
from pdctl.runtime.bench.target import Target, running, tokenizer_directory
from pdctl.runtime.bench.terminal import tables
from pdctl.runtime.hosts.reach import Hosts

INTERRUPTED = 130
GOODPUT = "--goodput"


class BenchCommand(TyperCommand):
    """`--goodput ttft:500 tpot:50`, as `vllm bench serve` spells it: one option, any number of
    objectives, each of which has a colon and no slash."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spelt: list[str] = []
        within = False
        for word in args:
            objective = ":" in word and "/" not in word and not word.startswith("-")
            if within and objective and spelt[-1] != GOODPUT:
                spelt.append(GOODPUT)
            within = word == GOODPUT or (within and objective)
            spelt.append(word)
        return list(super().parse_args(ctx, spelt))


def bench(
    topology: ClusterUnlessComparing = None,
    input_lens: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens, with commas between them.",
            show_default=f"{DEFAULT_INPUT_LENS}, as far as they fit the context",
        ),
    ] = None,
    output_len: Annotated[int, typer.Option(help="Tokens to ask for per request.")] = 32,
    concurrency: Annotated[
        str, typer.Option(help="Requests at once; several with commas between them.")
    ] = "1",
    num_prompts: Annotated[int, typer.Option(help="Rounds per cell, warm-ups aside.")] = 5,
    num_warmups: Annotated[int, typer.Option(help="Rounds per cell that are not counted.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS ...",
            help="Objectives in milliseconds, of ttft, tpot and e2el: requests per second that "
            "meet them all are counted.",
            show_default=False,
        ),
    ] = None,
    save_result: Annotated[
        bool,
        typer.Option("--save-result", help="Write a JSON file per point, the tables, and a page."),
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to, with --save-result.")] = Path("."),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the newest run in --result-dir: what it has whole is not run again. "
            "Saves as --save-result does.",
        ),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="BEFORE AFTER",
            help="Measure nothing: compare the newest runs of two result folders.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A checkpoint on this machine, where no replica's is here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the points, or the comparison, as JSON.")
    ] = False,
) -> None:
    """Measure each engine alone against every prefill/decode pair, by prompt length.

    Prompts have exactly the asked number of tokens and share no prefix. A cell whose imported
    tokens are not what the prompt requires, or whose text is not the baseline's, is marked."""
    if compare is not None:
        _compare(topology, *compare, as_json=as_json)
        return
    if topology is None:
        raise UsageError("TOPOLOGY is missing", hint="for example: pdctl bench studio.toml")
    asked = None if input_lens is None else whole_numbers(input_lens, "--input-lens")
    lanes = whole_numbers(concurrency, "--concurrency")
    target = running(topology)
    context_length = target.plan.context_length
    settings = Settings(
        input_lens=asked or default_input_lens(context_length, output_len),
        output_len=output_len,
        concurrency=lanes,
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        seed=seed,
        goodput=objectives(goodput or ()),
    )
    check(settings, context_length)
    directory = tokenizer.expanduser() if tokenizer else tokenizer_directory(target)
    prompts = PromptSource.of_checkpoint(directory, seed=seed)
    kept_in = writable(result_dir.expanduser()) if save_result or resume else None
    before = _earlier(kept_in, target, settings) if kept_in and resume else Earlier()
    _measure(target, settings, prompts, kept_in, before, as_json=as_json)


def _compare(topology: str | None, before: Path, after: Path, *, as_json: bool) -> None:
    if topology is not None:
        raise UsageError(
            f"--compare measures nothing and takes no TOPOLOGY: {topology}",
            hint="for example: pdctl bench --compare results-before results-after",
        )
    found = compare_runs(*newest_runs(before.expanduser(), after.expanduser()))
    if as_json:
        render.print_json(found)
    else:
        render.stdout().print(comparison_table(found))


def _earlier(directory: Path, target: Target, settings: Settings) -> Earlier:
    paths = [column.path for column in columns(target.plan)]
    found = earlier(directory, setting_of(target.plan, settings), settings, paths)
    stderr = render.stderr()
    for name in found.unreadable:
        stderr.print(f"{name} is no result and not counted", markup=False)
    had = render.counted(len(found.places), "place")
    stderr.print(f"{had} of {len(places(settings))} had been measured before")
    return found


def _measure(
    target: Target,
    settings: Settings,
    prompts: PromptSource,
    kept_in: Path | None,
    before: Earlier,
    *,
    as_json: bool,
) -> None:
    """Runs the sweep; whatever it measured is shown and saved, however it ended."""
    date = before.date or time.strftime("%Y%m%d-%H%M%S")
    paths, links = columns(target.plan), _links(target)

    def measured(results: Results) -> tuple[Run, tuple[Point, ...]]:
        run = run_of(target, settings, results, date, links)
        return run, points_of(run, paths, results, prompts.answer_ids)

    def finished(results: Results, place: Place) -> None:
        if kept_in is not None:
            run, points = measured(results)
            save_points(kept_in, run, [p for p in points if place_of(p) == place])

    results, stderr = Results(done=before.places, finished=finished), render.stderr()
    failure: PdctlError | None = None
    try:
        anyio.run(sweep, target, settings, prompts, results, stderr)
    except PdctlError as error:
        failure = error
    run, fresh = measured(results)
    points = tuple(in_order((*before.points, *fresh), settings, [c.path for c in paths]))
    if points or failure is None:
        _show(points, results, as_json=as_json)
    if points and kept_in is not None:
        saved = (*save_points(kept_in, run, fresh), *save_report(kept_in, run, points))
        for path in saved:
            stderr.print(f"wrote {path}")
    _end(points, results, failure, target.plan.cluster)


def _links(target: Target) -> dict[str, Link]:
    """Says of which pairs nothing is known: their floors are prefill's alone."""
    with Hosts(target.topology.hosts) as hosts:
        links = measure_links(target, hosts)
    for sentence in links.missing:
        render.stderr().print(sentence, markup=False, highlight=False, soft_wrap=True)
    return links.found


def _end(
    points: tuple[Point, ...], results: Results, failure: PdctlError | None, cluster: str
) -> None:
    """Exit 0 only where every cell has a figure."""
    if failure is not None:
        raise failure
    if results.interrupted:
        render.stderr().print("interrupted; what is shown was measured before")
        raise typer.Exit(INTERRUPTED)
    failed = [p for p in points if not p.completed]
    if failed:
        raise ClusterError(
            f"no request came through in {len(failed)} of {render.counted(len(points), 'cell')}",
            hint=f"see what {cluster} says: pdctl logs {cluster}",
        )


def _show(points: tuple[Point, ...], results: Results, *, as_json: bool) -> None:
    if as_json:
        render.print_json({"interrupted": results.interrupted, "points": points})
    elif points:
        render.stdout().print(tables(points))
