"""The locks that keep two runs apart, held by the controller while something else than its workers is at nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from provision.engine.preflight import PreflightError, take_lock
from provision.engine.remote import RemoteError, RootShell, connect
from provision.site.models import Node, Site

_AT_ONCE = 32  # nodes


@contextmanager
def held(
    site: Site, nodes: Sequence[Node], *, holder: str, run: str, sudo_password: str | None
) -> Iterator[Mapping[str, PreflightError | RemoteError]]:
    """Hold, within the block, the locks of `nodes` and the lease on the head, as an apply does.

    Gives name -> why not, for those that are not held: a PreflightError names who holds it, a RemoteError says that
    the node cannot be talked to. A node that reboots loses its lock, and is still behind the lease.
    """
    shells: list[RootShell] = []

    def take(node: Node) -> PreflightError | RemoteError | None:
        try:
            shell = connect(site, node, sudo_password=sudo_password)
            shells.append(shell)
            take_lock(shell, holder, run)
        except (PreflightError, RemoteError) as error:
            return error
        return None

    wanted = {node.name: node for node in [*nodes, site.head]}
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        try:
            found = dict(zip(wanted, pool.map(take, wanted.values()), strict=True))
            yield {name: error for name, error in found.items() if error is not None}
        finally:
            list(pool.map(RootShell.close, shells))
