"""Asks all machines at once; nothing on them is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from provision.engine.remote import RemoteError, RootShell, connect
from provision.hardware.machine import QUESTIONS, Machine, machine
from provision.site.models import Node, Site

AT_ONCE = 32
Reach = Callable[[Site, Node, str | None], RootShell]


def ask(
    site: Site,
    nodes: Sequence[Node],
    *,
    sudo_password: str | None = None,
    timeout: float = 60.0,
    done: Callable[[str], None] = lambda name: None,
    reach: Reach = lambda site, node, password: connect(site, node, sudo_password=password),
) -> dict[str, Machine | RemoteError]:
    """What each of `nodes` has, or why it could not be asked. `done` is called from several threads."""

    def one(node: Node) -> Machine | RemoteError:
        try:
            shell = reach(site, node, sudo_password)
            try:
                return machine(shell.run_many([question.command for question in QUESTIONS], timeout=timeout))
            finally:
                shell.close()
        except RemoteError as error:
            return error
        finally:
            done(node.name)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip([node.name for node in nodes], pool.map(one, nodes), strict=True))
