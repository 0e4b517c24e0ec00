"""The way to a node through jump hosts, resolved before anything is connected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from provision.site.models import Node, Site


class JumpError(ValueError):
    """A chain of jump hosts that never arrives, or a configuration of it that cannot be read."""


def chain(host: str, jump_of: Callable[[str], str | None]) -> list[str]:
    """The hosts that a connection to `host` goes through, in order, without `host` itself.

    `jump_of` gives what is written for a host: "a,b" goes through a, then b, and only a's own jump hosts
    count, as OpenSSH does it; None and "none" are direct. Raises JumpError on a loop.
    """
    return _chain(host, jump_of, ())


def _chain(host: str, jump_of: Callable[[str], str | None], passed: tuple[str, ...]) -> list[str]:
    if host in passed:
        raise JumpError(
            f"{host} is reached through itself: {' <- '.join((*passed[passed.index(host) :], host))}"
        )
    written = jump_of(host)
    if written is None or written.strip().lower() == "none":
        return []
    hops = [hop.strip() for hop in written.split(",")]
    if not all(hops):
        raise JumpError(f'a jump host without a name in "{written}"')
    if host in map(bare, hops[1:]):
        raise JumpError(f'{host} is reached through itself by "{written}"')
    return [*_chain(bare(hops[0]), jump_of, (*passed, host)), *hops]


def bare(hop: str) -> str:
    """The host in "user@host:port" or "ssh://user@[address]:port"."""
    host = hop.removeprefix("ssh://").rpartition("@")[2]
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def site_chain(site: Site, node: Node) -> list[str]:
    """The jump hosts on the way to `node`, by site file and OpenSSH configuration. Raises JumpError."""

    def jump_of(host: str) -> str | None:
        known = site.nodes.get(host)
        written = known.access.jump if known else None
        if written is None and node.access.ssh_config is not None:
            return config_jump(below(site, node.access.ssh_config), host)
        return written

    return chain(node.name, jump_of)


def config_jump(path: Path, host: str) -> str | None:
    """ProxyJump for `host` in the OpenSSH configuration at `path`; None where there is none or no file."""
    if not os.path.isfile(path):  # False for any text; Path.is_file raises for some
        return None
    from paramiko import SSHConfig  # takes long to import, and few sites need it
    from paramiko.ssh_exception import ConfigParseError

    try:
        found = SSHConfig.from_path(str(path)).lookup(host).get("proxyjump")
    except (ConfigParseError, OSError, UnicodeDecodeError) as error:
        raise JumpError(f"{path} cannot be read: {error}") from error
    return str(found) if found is not None else None


def below(site: Site, path: Path) -> Path:
    """A path of the site file: relative to the file; `~` is the admin's home."""
    return site.directory / os.path.expanduser(path)
