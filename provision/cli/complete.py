"""What a shell is offered where a word is begun: names that exist here and now. What cannot be read is not offered."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from provision.site.load import site_names


def sites(incomplete: str) -> list[str]:
    """Names in the folder of site files."""
    return _beginning(incomplete, site_names())


def components(incomplete: str) -> list[str]:
    """Names of components."""
    from provision.components.registry import COMPONENTS

    return _beginning(incomplete, COMPONENTS)


def playbooks(incomplete: str) -> list[str]:
    """This project's own playbooks; paths are the shell's own matter."""
    from provision.engine.playbook import playbook_names

    return _beginning(incomplete, playbook_names())


def lab_nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Nodes of the lab, by the state folder that is given or meant."""
    from provision.lab import Lab, LabError

    state = context.params.get("state")
    try:
        return _beginning(incomplete, Lab(Path(state) if state else None).nodes)
    except (LabError, OSError):
        return []


def faults(incomplete: str) -> list[tuple[str, str]]:
    """Kinds of faults, with what they do."""
    from provision.lab.faults import FAULTS

    return [(name, FAULTS[name].doc) for name in _beginning(incomplete, FAULTS)]


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
