"""Asks all machines at once; nothing on them is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from provision.engine.remote import Output, RemoteError, RootShell, connect
from provision.site.models import Node, Site

AT_ONCE = 32
T = TypeVar("T")
Reach = Callable[[Site, Node, str | None], RootShell]


def ask(
    site: Site,
    nodes: Sequence[Node],
    commands: Sequence[str],
    read: Callable[[Sequence[Output]], T],
    *,
    sudo_password: str | None = None,
    timeout: float = 60.0,
    done: Callable[[str], None] = lambda name: None,
    reach: Reach = lambda site, node, password: connect(site, node, sudo_password=password),
) -> dict[str, T | RemoteError]:
    """What `read` makes of each node's answers to `commands`, or why it could not be asked.

    `done` is called from several threads.
    """

    def one(node: Node) -> T | RemoteError:
        try:
            shell = reach(site, node, sudo_password)
            try:
                return read(shell.run_many(commands, timeout=timeout))
            finally:
                shell.close()
        except RemoteError as error:
            return error
        finally:
            done(node.name)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip([node.name for node in nodes], pool.map(one, nodes), strict=True))
