"""What others may know of ssh: its drop-in, as pairs and as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from provision.components.ssh.settings import SshSettings
from provision.site.problem import Problem

if TYPE_CHECKING:
    from provision.site.models import Site

DROP_IN = "/etc/ssh/sshd_config.d/00-provision.conf"  # of several files the first to name a keyword wins


def options(ssh: SshSettings) -> dict[str, str]:
    """Keywords of sshd_config and their values."""
    return {
        "PermitRootLogin": ssh.root_login,
        "PubkeyAuthentication": "yes",
        "PasswordAuthentication": _word(ssh.password_authentication),
        "KbdInteractiveAuthentication": _word(ssh.password_authentication),
        "X11Forwarding": _word(ssh.x11_forwarding),
        "ClientAliveInterval": str(ssh.client_alive_interval),
        "ClientAliveCountMax": str(ssh.client_alive_count),
        "MaxStartups": ssh.max_startups,
        "MaxSessions": str(ssh.max_sessions),
        "UseDNS": "no",
    }


def drop_in(ssh: SshSettings) -> str:
    return "".join(f"{keyword} {value}\n" for keyword, value in options(ssh).items())


def effective(output: str) -> dict[str, str]:
    """Keyword in lower case -> value, from the output of `sshd -T`; of repeated keywords the first."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword.lower(), value.strip())
    return found


def same_value(read: str | None, wanted: str) -> bool:
    """Whether sshd means the same: it has two words for "prohibit-password"."""
    return read == wanted or (wanted == "prohibit-password" and read == "without-password")


def problems(site: Site) -> Iterator[Problem]:
    """Settings that would lock out the user that nodes are reached as."""
    for node in site.nodes.values():
        by_ssh = not node.access.local
        if (
            by_ssh
            and node.access.user == "root"
            and site.settings("ssh", node, SshSettings).root_login == "no"
        ):
            yield Problem(
                "root-login",
                ("ssh", "root_login"),
                read="no",
                expected="prohibit-password",
                why=f"{node.name} is reached as root: this would lock you out",
                action="reach nodes as another user (access.user) with sudo, or allow root's keys",
            )
            return


def _word(value: bool) -> str:
    return "yes" if value else "no"
