"""Registers every verb with the command line, in the order in which `--help` shows them."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add all verbs to `app`."""
