"""What verbs share: options, opening a site file, narrowing to some nodes, answering."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from provision.cli import complete
from provision.errors import InputError
from provision.report.model import Document, Finding, Verdict
from provision.site.hostlist import HostlistError, expand
from provision.site.load import find, load
from provision.site.models import Node, Site
from provision.site.problem import Problem, SiteError, nearest
from provision.site.secrets import sudo_password

# exit statuses; 0 and 1 are those of a document
WRONG_INPUT = 2
INTERRUPTED = 130

_in_json: ContextVar[str | None] = ContextVar("in_json", default=None)  # the verb that answers in JSON


SiteArgument = Annotated[
    str,
    typer.Argument(
        metavar="SITE", help="A site file, or the name of one in inventories/.", autocompletion=complete.sites
    ),
]
LimitOption = Annotated[
    str | None,
    typer.Option(
        "--limit",
        "-l",
        metavar="NODES",
        help="Only these: a host list, names of groups or roles; gpu-[1-4],head.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on the standard output.")]
ComponentOption = Annotated[
    list[str] | None,
    typer.Option(
        "--component",
        "-c",
        metavar="NAME",
        autocompletion=complete.components,
        help="Only this component; may be given several times.",
    ),
]
OperationTimeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=1,
        help="Give up on any operation after this long, package installs too.",
    ),
]


def open_site(name: str) -> Site:
    """The cluster that SITE means; a wrong file is answered with all its mistakes and exit status 2."""
    try:
        return load(find(name))
    except SiteError as error:
        _refuse_site(error, name)


def limited(site: Site, limit: str | None) -> list[Node]:
    """The nodes that `--limit` means, in the order of the site file; unknown ones end with exit status 2."""
    try:
        return select(site, limit)
    except HostlistError as error:
        refuse(f"--limit {limit}: {error}")


def select(site: Site, limit: str | None) -> list[Node]:
    """The nodes named by `limit`: a host list whose names are nodes, groups or roles; all for None.

    Raises HostlistError: not a host list, a name that is none of the three, no node left.
    """
    if limit is None:
        return list(site.nodes.values())
    chosen: set[str] = set()
    roles = sorted({role for node in site.nodes.values() for role in node.roles})
    for name in expand(limit):
        if name in site.nodes:
            chosen.add(name)
        elif name in site.file.groups:
            chosen |= {node.name for node in site.in_group(name)}
        elif name in roles:
            chosen |= {node.name for node in site.with_role(name)}
        else:
            close = nearest(name, [*site.nodes, *site.file.groups, *roles])
            advice = f'did you mean "{close}"?' if close else f"groups are {', '.join(site.file.groups)}"
            raise HostlistError(f'"{name}" is no node, group or role of {site.cluster}; {advice}')
    return [node for node in site.nodes.values() if node.name in chosen]


def ask_sudo_password(site: Site, nodes: Iterable[Node]) -> str | None:
    """The sudo password for `nodes`, None where none is needed; one that is missing ends with exit status 2."""
    try:
        return sudo_password(site, nodes)
    except SiteError as error:
        _refuse_site(error, site.cluster)


def _refuse_site(error: SiteError, name: str) -> NoReturn:
    _print_refusal(error.findings, name)
    print_problems(error.problems, Console(stderr=True))
    raise typer.Exit(WRONG_INPUT) from error


def keep(document: Document, site: Site) -> None:
    """Keep `document` for `provision report`; what cannot be kept is answered all the same."""
    from provision.report import store

    try:
        store.save(document, site)
    except OSError as error:
        typer.echo(f"warning: the answer is not kept for `provision report`: {error}", err=True)


def answer(document: Document, as_json: bool) -> NoReturn:
    """Print what a verb found out, and end with its exit status; that of a run that was interrupted is its own."""
    if as_json:
        print_json(document)
    else:
        from provision.report import terminal

        terminal.show(document)
    raise typer.Exit(INTERRUPTED if document.details.get("interrupted") else document.exit_status)


def print_json(document: Document) -> None:
    """`document` on the standard output, as the contract in docs/json.md has it."""
    sys.stdout.write(document.model_dump_json(indent=2) + "\n")


def print_problems(problems: Iterable[Problem], console: Console) -> None:
    """One line a problem, FILE:LINE:COLUMN first, as editors know it; coloured in a terminal only."""
    for problem in problems:
        line = Text(str(problem))
        line.highlight_regex(r"(?<=: )error(?=: )", "bold red")
        line.highlight_regex(r"(?<=: )warning(?=: )", "bold yellow")
        console.print(line, soft_wrap=True)


def refuse(message: str) -> NoReturn:
    """The input is wrong: say why, exit status 2."""
    _print_refusal([Finding(verdict=Verdict.FAIL, check="input", subject="command line", why=message)])
    line = Text("error: ", style="bold red")
    line.append(message, style="default")
    Console(stderr=True).print(line, soft_wrap=True)
    raise typer.Exit(WRONG_INPUT)


def answering(verb: str, function: Callable[..., None]) -> Callable[..., None]:
    """`function` as the verb `verb`: an InputError ends it with exit status 2.

    What is refused is a document where one was asked for by `--json`.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> None:
        token = _in_json.set(verb if options.get("as_json") else None)
        try:
            function(*arguments, **options)
        except InputError as error:
            refuse(str(error))
        finally:
            _in_json.reset(token)

    call.__doc__ = _unwrapped(function.__doc__ or "")
    return call


def _unwrapped(text: str) -> str:
    """Each paragraph on a line of its own: `--help` breaks lines where the terminal does."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


def _print_refusal(findings: list[Finding], site: str | None = None) -> None:
    verb = _in_json.get()
    if verb is not None:
        print_json(Document(verb=verb, site=site, verdict=Verdict.FAIL, findings=findings))
