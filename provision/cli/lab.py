"""`provision lab`: a throwaway cluster on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Rows
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from provision.cli import complete
from provision.cli.common import INTERRUPTED, WRONG_INPUT, JsonOption, print_json
from provision.lab import InputError, Lab, LabError
from provision.lab.faults import FAULTS
from provision.lab.host import require_root
from provision.lab.progress import Progress
from provision.lab.state import DEFAULT_MODEL
from provision.report.model import Document, Finding, NodeResult, Verdict, worst

app = typer.Typer(
    help="A throwaway cluster of systemd containers on this machine: real ssh, apt, systemd, Slurm.",
    epilog="Example: [bold]provision lab up[/bold] · [bold]provision lab ssh lab-head sinfo[/bold]"
    " · [bold]provision lab down[/bold]",
    no_args_is_help=True,
)
console = Console(stderr=True)
INTERRUPTED_ADVICE = "interrupted; run the same command again to go on"

State = Annotated[
    Path | None,
    typer.Option(
        "--state", envvar="PROVISION_LAB_DIR", help="Folder of the lab.", show_default=".lab in the checkout"
    ),
]
NodeName = Annotated[
    str,
    typer.Argument(help="A node, such as lab-gpu-1.", metavar="NODE", autocompletion=complete.lab_nodes),
]


class Plain(Progress):
    """One line a step, for logs."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def say(self, subject: str, text: str) -> None:
        console.print(
            f"{time.monotonic() - self.started:6.1f}s {subject}: {text}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class Live(Progress):
    """One row a node or layer, for a terminal."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.tasks: dict[str, TaskID] = {}

    def say(self, subject: str, text: str) -> None:
        if subject not in self.tasks:
            self.tasks[subject] = self.rows.add_task("", total=None, subject=subject, text=text)
        self.rows.update(self.tasks[subject], text=text[: max(20, console.width - 30)])

    detail = say


@contextmanager
def working(state: Path | None, verb: str = "", json: bool = False) -> Iterator[Lab]:
    """The lab with progress on standard error; its errors become exit statuses 1 and 2, and documents in `json`."""
    try:
        require_root()
        if console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.fields[subject]}"),
                TextColumn("{task.fields[text]}", markup=False),
            )
            with Rows(*columns, TimeElapsedColumn(), console=console) as rows:
                yield Lab(state, progress=Live(rows))
        else:
            yield Lab(state, progress=Plain())
    except LabError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        wrong_input = isinstance(error, InputError)
        if json:
            print_json(_failed(verb, "input" if wrong_input else "lab", str(error)))
        raise typer.Exit(WRONG_INPUT if wrong_input else 1) from error
    except KeyboardInterrupt:
        console.print(INTERRUPTED_ADVICE)
        if json:
            print_json(_failed(verb, "lab", INTERRUPTED_ADVICE))
        raise typer.Exit(INTERRUPTED) from None


def _failed(verb: str, check: str, why: str) -> Document:
    finding = Finding(verdict=Verdict.FAIL, check=check, subject="lab", why=why)
    return Document(verb=f"lab {verb}", site="lab", verdict=Verdict.FAIL, findings=[finding])


def answer(verb: str, started: float, names: list[str], json: bool, text: str) -> None:
    """Say that `verb` has done its work on the nodes `names`: one JSON document, or `text`."""
    document = Document(
        verb=f"lab {verb}",
        site="lab",
        verdict=Verdict.PASS,
        seconds=round(time.monotonic() - started, 1),
        nodes={name: NodeResult(verdict=Verdict.PASS) for name in names},
    )
    if json:
        print_json(document)
    else:
        typer.echo(text)


@app.command(
    epilog="Example: [bold]provision lab up --workers 6[/bold]"
    " · then [bold]provision up inventories/lab.yml[/bold]"
)
def up(
    workers: Annotated[
        int | None, typer.Option(help="Workers lab-gpu-1 ...", show_default="as it is; at first 2")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Simulated GPUs of each worker.", show_default="as it is; at first 2")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model of the simulated GPUs.", show_default=f"as it is; at first {DEFAULT_MODEL}"),
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(help="Debian archive to build from.", show_default="the machine's own, else Debian's"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of packages (provision/lab/layers.yml), comma-separated.", show_default="all"
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Take down what is there and start from nothing.")] = False,
    state: State = None,
    json: JsonOption = False,
) -> None:
    """Make the lab, or complete and mend the one that is there, until all nodes answer ssh."""
    started = time.monotonic()
    with working(state, "up", json) as lab:
        lab.up(workers, gpus, model, mirror, layers.split(",") if layers else None, fresh)
        names = list(lab.nodes)
        config = lab.paths.ssh_config
    seconds = time.monotonic() - started
    text = f"lab is up: {len(names)} nodes answer ssh after {seconds:.1f} s (ssh -F {config} {names[0]})"
    answer("up", started, names, json, text)


@app.command(epilog="Example: [bold]provision lab down[/bold]")
def down(
    cache: Annotated[
        bool, typer.Option(help="Remove the machine's cache of layers and packages as well.")
    ] = False,
    state: State = None,
    json: JsonOption = False,
) -> None:
    """Remove the lab: processes, network, files. Nothing of it stays on this machine."""
    started = time.monotonic()
    with working(state, "down", json) as lab:
        lab.down(cache)
    answer("down", started, [], json, "lab is down")


@app.command(epilog="Example: [bold]provision lab status --json[/bold]")
def status(state: State = None, json: JsonOption = False) -> None:
    """What the nodes of the lab are doing. Exit status 1 unless all of them run."""
    started = time.monotonic()
    with working(state, "status", json) as lab:
        nodes = list(lab.nodes.values())
        states = {node.name: lab.state_of(node.name) for node in nodes}
    results = {
        name: NodeResult(
            verdict=Verdict.PASS if now == "running" else Verdict.FAIL,
            reason=None if now == "running" else now,
        )
        for name, now in states.items()
    }
    document = Document(
        verb="lab status",
        site="lab",
        verdict=worst(result.verdict for result in results.values()),
        seconds=round(time.monotonic() - started, 1),
        nodes=results,
        details={node.name: {"address": node.address, "state": states[node.name]} for node in nodes},
    )
    if json:
        print_json(document)
    elif not nodes:
        typer.echo("there is no lab: run `provision lab up`")
    else:
        table = Table("node", "address", "IPv6", "role", "GPUs", "state")
        for node in nodes:
            table.add_row(
                node.name, node.address, node.address6, node.role, str(node.gpus), states[node.name]
            )
        Console().print(table)
    raise typer.Exit(document.exit_status)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: [bold]provision lab ssh lab-head sinfo[/bold] · forward a port:"
    " [bold]provision lab ssh lab-head -- -N -L 9090:localhost:9090[/bold]",
)
def ssh(
    node: NodeName,
    words: Annotated[
        list[str] | None, typer.Argument(help="Command, or after -- options of ssh.", metavar="[CMD...]")
    ] = None,
    root: Annotated[bool, typer.Option("--root", help="Log in as root instead of ops.")] = False,
    state: State = None,
) -> None:
    """Log in to a node, or run a command there."""
    with working(state) as lab:
        name = lab.node(node).name
    user = ["-l", "root"] if root else []
    os.execvp("ssh", ["ssh", "-F", str(lab.paths.ssh_config), *user, name, *(words or [])])


_KINDS = "  \n".join(
    f"[bold]{' '.join([f'{fault.name}[/bold]', *(f'--{option}' for option in fault.options)])}: {fault.doc}"
    for fault in FAULTS.values()
)


@app.command(
    epilog="Example: [bold]provision lab fault fill-disk lab-gpu-1 --path /var/log[/bold]"
    " · and back: [bold]provision lab fault fill-disk lab-gpu-1 --undo[/bold]",
    help=f"Break a node on purpose, or mend it with --undo.\n\n{_KINDS}",
)
def fault(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", autocompletion=complete.faults, help="What goes wrong, see above."),
    ],
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="Take the fault back.")] = False,
    path: Annotated[str | None, typer.Option(help="File or folder on the node.", show_default=False)] = None,
    by: Annotated[str | None, typer.Option(help="Time, such as 10m or -90s.", show_default=False)] = None,
    seconds: Annotated[float | None, typer.Option(help="How long.", show_default=False)] = None,
    package: Annotated[str | None, typer.Option(help="Debian package.", show_default=False)] = None,
    xid: Annotated[int | None, typer.Option(help="NVIDIA error number.", show_default=False)] = None,
    gpu: Annotated[int | None, typer.Option(help="Index of the GPU.", show_default=False)] = None,
    link: Annotated[int | None, typer.Option(help="Number of the NVLink.", show_default=False)] = None,
    unit: Annotated[str | None, typer.Option(help="Service of systemd.", show_default=False)] = None,
    message: Annotated[str | None, typer.Option(help="What the kernel reports.", show_default=False)] = None,
    count: Annotated[int | None, typer.Option(help="How often.", show_default=False)] = None,
    times: Annotated[int | None, typer.Option(help="How many times.", show_default=False)] = None,
    state: State = None,
    json: JsonOption = False,
) -> None:
    started = time.monotonic()
    given = {
        "path": path,
        "by": by,
        "seconds": seconds,
        "package": package,
        "xid": xid,
        "gpu": gpu,
        "link": link,
        "unit": unit,
        "message": message,
        "count": count,
        "times": times,
    }
    options = {name: value for name, value in given.items() if value is not None}
    with working(state, "fault", json) as lab:
        lab.fault(kind, node, undo, **options)
    text = f"{node}: {kind} is taken back" if undo else FAULTS[kind].told(node, **options)
    answer("fault", started, [node], json, text)


@app.command(epilog="Example: [bold]provision lab snapshot clean[/bold]")
def snapshot(
    name: Annotated[str, typer.Argument(help="Name to keep the disks under.")],
    state: State = None,
    json: JsonOption = False,
) -> None:
    """Keep the disks of all nodes under a name; the nodes are shut down for it and started again."""
    started = time.monotonic()
    with working(state, "snapshot", json) as lab:
        lab.snapshot(name)
        names = list(lab.nodes)
    answer("snapshot", started, names, json, f"snapshot {name} taken")


@app.command(epilog="Example: [bold]provision lab restore clean[/bold]")
def restore(
    name: Annotated[str, typer.Argument(help="A snapshot that was taken.")],
    state: State = None,
    json: JsonOption = False,
) -> None:
    """Put the disks of all nodes back as a snapshot has them, and boot from them."""
    started = time.monotonic()
    with working(state, "restore", json) as lab:
        lab.restore(name)
        names = list(lab.nodes)
    answer("restore", started, names, json, f"snapshot {name} restored")
