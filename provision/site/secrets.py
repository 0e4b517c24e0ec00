"""The sudo password: asked for once, or taken from the environment; never an argument, never written down."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Iterable

from provision.site.hostlist import fold
from provision.site.models import Node, Site
from provision.site.problem import Problem, SiteError

VARIABLE = "PROVISION_SUDO_PASSWORD"


def sudo_password(site: Site, nodes: Iterable[Node]) -> str | None:
    """The sudo password for `nodes`; None where none of them needs one (`access.sudo_password`).

    From PROVISION_SUDO_PASSWORD, else asked for once on the terminal. Raises SiteError where there is
    neither, or where the answer is empty.
    """
    needing = [node.name for node in nodes if node.access.sudo_password and not arrives_as_root(node)]
    if not needing:
        return None
    password = os.environ.get(VARIABLE)
    if password:
        return password
    where = fold(needing)
    if not sys.stdin.isatty():
        raise SiteError(
            [_missing(site, f"{where} needs a sudo password, and there is no terminal to ask on")]
        )
    password = getpass.getpass(f"sudo password for {where}: ")
    if not password:
        raise SiteError([_missing(site, f"{where} needs a sudo password, and none was given")])
    return password


def arrives_as_root(node: Node) -> bool:
    """Whether a session on `node` begins with root's rights."""
    return os.geteuid() == 0 if node.access.local else node.access.user == "root"


def _missing(site: Site, why: str) -> Problem:
    action = f"set {VARIABLE}, or `sudo_password: false` where sudo asks for none"
    return Problem("sudo-password", ("access", "sudo_password"), why=why, action=action).at(str(site.path))
