"""Registers every verb with the command line, in the order in which `--help` shows them."""

from __future__ import annotations

import typer

from provision.cli import apply, burnin, check, import_, init, lab, report, run, up, verify


def register(app: typer.Typer) -> None:
    """Add all verbs to `app`."""
    app.command("init")(init.init)
    app.command("check")(check.check)
    app.add_typer(import_.app, name="import")
    app.command("up")(up.up)
    app.command("status")(up.status)
    app.command("plan")(apply.plan)
    app.command("apply")(apply.apply)
    app.command("verify")(verify.verify)
    app.command("burnin")(burnin.burnin)
    app.command("run")(run.run)
    app.command("report")(report.report)
    app.add_typer(lab.app, name="lab")
