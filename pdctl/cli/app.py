"""The command line: builds it, runs it, and is the one place where errors become exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from pdctl import __version__
from pdctl.cli.manual import MANUAL
from pdctl.cli.verbs import VERBS, Verb
from pdctl.errors import PdctlError, UsageError

TRACEBACK_ENV = "PDCTL_TRACEBACK"
INTERRUPTED = 130
USAGE_ERROR: Any = typer.BadParameter.__base__
"""What every complaint about a command line is: click's, of which typer may bring its own."""

DESCRIPTION = """Serve one language model with prefill on one engine and decode on another.

A TOML topology names hosts, engines and roles; `pdctl init` writes one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line and exits: 0 ok, 1 runtime failure, 2 usage or topology error,
    3 contract mismatch, 4 host not fit, 5 launch failed, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        run = application(given)
        code = run(given or ["--help"], prog_name="pdctl", standalone_mode=False)
    except USAGE_ERROR as error:
        _refuse(error)
    except PdctlError as error:
        _tell(error.message, error.hint)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            _unexpected(error)
        _tell("no space is left to write to", "free some, or write elsewhere")
        _abandon_stdout()
        sys.exit(PdctlError.exit_code)
    except Exception as error:  # The process boundary: nobody above could do better.
        _unexpected(error)
    sys.exit(code or (0 if given else UsageError.exit_code))


def application(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line that is needed for these arguments: the verb that they name is loaded,
    the others are only listed."""
    app = typer.Typer(
        name="pdctl",
        help=DESCRIPTION,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    completed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    for verb in VERBS.values():
        if verb.name == wanted or verb.name in completed.split():
            manual = MANUAL.get(verb.name)
            epilog = manual.epilog if manual else None
            app.command(verb.name, cls=verb.load_class(), epilog=epilog)(verb.load())
        else:
            app.command(verb.name)(_listed(verb))
    return app


def _listed(verb: Verb) -> Callable[..., Any]:
    def not_loaded() -> None:
        raise AssertionError(f"{verb.name} was listed and then run")

    not_loaded.__doc__ = verb.help
    return not_loaded


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pdctl {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _refuse(error: Any) -> NoReturn:
    """A command line that can't be: in this program's own form, not in the library's."""
    sentence = error.format_message().rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "pdctl"
    _tell(f"{sentence[:1].lower()}{sentence[1:]}", f"{command} --help")
    sys.exit(UsageError.exit_code)


def _unexpected(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK_ENV):
        raise error
    _tell(
        f"unexpected {type(error).__name__}: {error}",
        f"this is a fault of pdctl; {TRACEBACK_ENV}=1 shows where it happened",
    )
    sys.exit(PdctlError.exit_code)


def _open_closed_streams() -> None:
    """Started with `>&-`, Python has no stream there at all, and a file opened later would get
    its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _abandon_stdout() -> None:
    """What is still buffered can't be written; the interpreter would try once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(message: str, hint: str | None) -> None:
    from pdctl.cli.render import show_error

    show_error(message, hint)


if __name__ == "__main__":
    main()
