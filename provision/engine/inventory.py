"""The site file as Ansible sees it: inventory and variables."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from pydantic import ValidationError

from provision.components.base import exports as base
from provision.engine.ssh import destination, ssh_options
from provision.site.hidden import Hidden, SecretMissing, reveal
from provision.site.models import Node, Site
from provision.site.secrets import arrives_as_root

# Marks what a task starts on a node (ansible_collections/provision/run): a cancelled run finds it again.
SHELL = "provision.run.marked"


def inventory(site: Site) -> dict[str, Any]:
    """The whole site as an Ansible inventory: a group for each group and each role of the site file.

    A group that has the name of a role holds the nodes of both.
    """
    members: dict[str, dict[str, None]] = {}
    for node in site.nodes.values():
        for name in [node.group, *sorted(node.roles)]:
            members.setdefault(name, {})[node.name] = None
    return {
        "all": {
            "hosts": {node.name: host_variables(site, node) for node in site.nodes.values()},
            "vars": {
                "provision_cluster": site.cluster,
                "provision_head": site.head.name,
                "provision_site": str(site.path),
                "provision_command": [sys.executable, "-m", "provision"],
                "provision_scheduler": "slurm" if site.enabled("slurm") else None,
                "provision_held": list(base.held(base.site_wide(site))),
            },
            "children": {name: {"hosts": {host: {} for host in hosts}} for name, hosts in members.items()},
        }
    }


def host_variables(site: Site, node: Node) -> dict[str, Any]:
    """How Ansible reaches a node (by the one definition of a connection), and what the site file says of it."""
    return {
        "ansible_connection": "local" if node.access.local else "ssh",
        "ansible_host": destination(node).partition("@")[2],
        "ansible_port": node.access.port,
        "ansible_user": node.access.user,
        "ansible_ssh_common_args": shlex.join(ssh_options(site, node)),
        "ansible_become": not arrives_as_root(node),
        "ansible_shell_type": SHELL,
        "provision_node": {
            "name": node.name,
            "group": node.group,
            "roles": sorted(node.roles),
            "gpu": node.gpu.model_dump() if node.gpu else None,
        },
    }


def variables(site: Site) -> tuple[dict[str, Any], list[str]]:
    """The site file's `variables` with secrets filled in, and the secrets' texts (to keep out of what is shown).

    A variable is a secret when it is `{secret: {file: ...}}` or `{secret: {env: ...}}`. Raises SecretMissing.
    """
    found: dict[str, Any] = {}
    secrets: list[str] = []
    for name, value in site.file.variables.items():
        if isinstance(value, dict) and set(value) == {"secret"}:
            found[name] = _secret(site, name, value["secret"])
            secrets.append(found[name])
        else:
            found[name] = value
    return found, secrets


def _secret(site: Site, name: str, source: Any) -> str:
    key = f"variables.{name}.secret"
    try:
        hidden = Hidden.model_validate(source)
    except ValidationError:
        raise SecretMissing(f"{site.path}: {key}: expected {{file: PATH}} or {{env: NAME}}") from None
    return reveal(site, hidden, key)
