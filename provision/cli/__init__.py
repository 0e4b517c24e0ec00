"""The command line: one file a verb. A verb parses, calls and prints; it holds no logic."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from provision import __version__

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

app = typer.Typer(
    name="provision",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"provision {__version__}")
        raise typer.Exit


@app.callback()
def provision(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is."),
    ] = False,
) -> None:
    """From racks with a fresh Linux to a GPU cluster that has proved itself."""
    # With a callback, an application of a single verb still wants the verb's name.


def main() -> None:
    """Entry point of the command `provision`."""
    if sys.argv[1:2] in (["plan"], ["apply"], ["up"]) and "--help" not in sys.argv:
        from provision.engine import process

        process.start_ahead()
    from provision.cli import verbs

    verbs.register(app, sys.argv[1:] or completed(os.environ))
    try:
        try:
            app()
        finally:
            print(end="", flush=True)  # what is short is only now written
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries, and fails, again at its end
        print(f"error: the answer cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def completed(environment: Mapping[str, str]) -> list[str]:
    """The words after the command's name that a shell wants completed, as Typer's scripts hand them over. Pure."""
    line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")  # zsh, fish; bash
    return line.split()[1:]
