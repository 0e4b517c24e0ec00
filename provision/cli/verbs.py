"""Registers verbs with the command line, in the order in which `--help` shows them.

A verb's module is imported only when it is the one that was called (or when all are shown): start-up is a large part
of the time of a short command.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from provision.cli.common import answering

# verb -> module below provision.cli, and what of it is the verb: a function, or a group of verbs
VERBS: dict[str, tuple[str, str]] = {
    "init": ("init", "init"),
    "check": ("check", "check"),
    "discover": ("discover", "discover"),
    "import": ("import_", "app"),
    "lock": ("lock", "lock"),
    "up": ("up", "up"),
    "status": ("up", "status"),
    "plan": ("apply", "plan"),
    "apply": ("apply", "apply"),
    "verify": ("verify", "verify"),
    "burnin": ("burnin", "burnin"),
    "tune": ("tune", "app"),
    "health": ("health", "health"),
    "inspect": ("inspect", "inspect"),
    "logs": ("logs", "logs"),
    "run": ("run", "run"),
    "report": ("report", "report"),
    "lab": ("lab", "app"),
}


def register(app: typer.Typer, words: Sequence[str]) -> None:
    """Add the verb that the command line `words` begins with, or all verbs where it begins with none."""
    called = words[0] if words and words[0] in VERBS else None
    if list(words) == ["--version"]:
        called = next(iter(VERBS))  # whichever: none of them is asked
    for verb, (module, name) in VERBS.items():
        if called is None or verb == called:
            found = getattr(import_module(f"provision.cli.{module}"), name)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=verb)
            else:
                app.command(verb)(answering(verb, found))
