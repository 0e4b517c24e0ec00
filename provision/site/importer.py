"""An Ansible inventory as a site file, and everything of it that was left out.

Pure: `site_text` turns what Ansible read into YAML and findings. Nothing is guessed in silence: names stay as
they are, secrets are never copied, and what the inventory does not say is named as to be filled in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from provision.report.model import Finding, Verdict
from provision.site.ansible import Inventory
from provision.site.check import address
from provision.site.hostlist import HostlistError, expand, fold
from provision.site.names import cluster_fault, group_fault, is_dns_name
from provision.site.ssh_arguments import translate_arguments

# Groups of DeepOps, Kubespray, the OpenHPC roles and others, "-" written as "_"
SLURM_ROLES = {
    "head": "slurm_master slurm_control slurm_control_node slurm_controller slurm_head slurmctld "
    "slurmservers control controller controllers head heads headnode",
    "worker": "slurm_node slurm_nodes slurm_worker slurm_workers slurm_compute slurmexechosts slurmd compute "
    "computes compute_nodes compute_configured gpu gpus gpu_nodes worker workers",
    "login": "slurm_login login logins login_nodes slurmlogin",
    "storage": "slurm_nfs nfs nfs_server nfs_servers storage",
    "monitor": "slurm_metric monitoring monitor prometheus grafana alertmanager",
}
KUBERNETES_ROLES = {
    "control-plane": "kube_control_plane kube_master k3s_server",
    "worker": "kube_node kube_nodes k3s_agent",
}
_ORDER = ("head", "control-plane", "worker", "login", "storage", "monitor")
_SLURM = {name: role for role, names in SLURM_ROLES.items() for name in names.split()}
_KUBERNETES = {name: role for role, names in KUBERNETES_ROLES.items() for name in names.split()}
# Groups that only collect others, or whose work is part of a role
_COLLECTIVE = {
    "all",
    "ungrouped",
    "k8s_cluster",
    "slurm_cluster",
    "openhpc",
    "cluster",
    "etcd",
    "slurm_nfs_client",
}
_COLLECTIVE |= {"slurm_cache", "kube_cluster"}

_ACCESS = {
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_ssh_private_key_file": "key",
    "ansible_private_key_file": "key",
}
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_ADDRESS = ("ansible_host", "ansible_ssh_host")
_FACT = "ansible_all_ipv4_addresses"
_BECOME_PASSWORD = {"ansible_become_pass", "ansible_become_password", "ansible_sudo_pass"}
_SECRET = re.compile(
    r"pass(word|wd|phrase)?$|secret|token|credential|api_?key|private_key$|vault", re.IGNORECASE
)
# Variables that say how Ansible works, or what this tool does anyway
_UNNEEDED = {
    "ansible_python_interpreter",
    "ansible_interpreter_python_fallback",
    "ansible_become",
    "ansible_become_method",
    "ansible_become_user",
    "ansible_connection",
    "ansible_shell_type",
    "ansible_ssh_pipelining",
    "ansible_pipelining",
    "ansible_ssh_transfer_method",
    "ansible_ssh_retries",
    "ansible_timeout",
}
_EXPECTED = {
    "ansible_become": {"true", "yes", "1"},
    "ansible_become_method": {"sudo"},
    "ansible_become_user": {"root"},
    "ansible_connection": {"ssh", "smart", "paramiko", "paramiko_ssh"},
    "ansible_shell_type": {"sh"},
}


@dataclass
class Imported:
    """The text of a site file and what there is to say about it."""

    cluster: str
    text: str
    findings: list[Finding]


@dataclass
class _Group:
    name: str
    hosts: list[str]
    roles: list[str]


@dataclass
class _Host:
    address: str | None = None
    candidates: list[str] = field(default_factory=list)  # addresses that it has, as Ansible's facts tell
    access: dict[str, Any] = field(default_factory=dict)


def site_text(inventory: Inventory) -> Imported:
    """The site file that says what `inventory` says."""
    return _Importer(inventory).run()


class _Importer:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.findings = list(inventory.findings)

    def run(self) -> Imported:
        if not self.inventory.hosts:
            self.fill_in("groups", "there is no host in this inventory")
        names = self.readable_names()
        groups = self.groups(names)
        hosts = self.hosts(names)
        cluster = self.cluster()
        document: dict[str, Any] = {"cluster": cluster}
        common = _common(hosts.values())
        if common:
            document["access"] = common
        document["groups"], document["nodes"] = self.described(groups, hosts, common)
        if not document["nodes"]:
            del document["nodes"]
        roles = {role for group in groups for role in group.roles}
        document |= self.sections(roles)
        header = (
            f"# From the Ansible inventory {self.inventory.path.name} by `provision import ansible`.\n"
            "# Read it through, fill in what is marked, then: provision check FILE\n"
        )
        text = yaml.safe_dump(
            document, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
        )
        return Imported(cluster, header + text, self.findings)

    # What becomes of hosts and groups

    def readable_names(self) -> list[str]:
        names = []
        for name in self.inventory.hosts:
            try:
                fold([name])
            except HostlistError:
                self.left_out("host", name, "not a name that a machine can have")
            else:
                names.append(name)
        return names

    def groups(self, names: list[str]) -> list[_Group]:
        """Groups of the site file: those of the inventory that mean a role, equal ones put together."""
        slurm = any(_SLURM.get(_plain(group)) and hosts for group, hosts in self.inventory.groups.items())
        found: list[_Group] = []
        for group, members in sorted(self.inventory.groups.items(), key=lambda group: _rank(group[0])):
            hosts = [host for host in members if host in names]
            plain = _plain(group)
            role = _SLURM.get(plain)
            kubernetes = _KUBERNETES.get(plain)
            if not hosts or plain in _COLLECTIVE:
                continue
            if role is None and kubernetes is not None:
                if slurm:
                    why = "Kubernetes beside Slurm is not part of a site file; Slurm's groups were taken"
                    self.left_out("group", group, why)
                    continue
                role = kubernetes
            if role is None:
                self.left_out("group", group, f"no role is known for it ({fold(hosts)})")
                continue
            roles = ["head", role] if role == "control-plane" else [role]
            same = next((other for other in found if set(other.hosts) == set(hosts)), None)
            if same:
                same.roles = [known for known in _ORDER if known in {*same.roles, *roles}]
            else:
                found.append(_Group(self.group_name(group), hosts, roles))
        placed = {host for group in found for host in group.hosts}
        rest = [host for host in names if host not in placed]
        if rest:
            name = next(
                name for name in ("others", "without-role") if name not in {group.name for group in found}
            )
            found.append(_Group(name, rest, []))
            self.fill_in(f"groups.{name}.roles", f"the inventory does not say what {fold(rest)} do")
        return found

    def group_name(self, group: str) -> str:
        if group_fault(group) is None:
            return group
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", group).strip("-_")
        name = name if group_fault(name) is None else f"group-{name}"[:63]
        self.note("group", group, f"is called {name} in the site file", Verdict.WARN)
        return name

    def described(
        self, groups: list[_Group], hosts: dict[str, _Host], common: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The sections `groups` and `nodes`: what all hosts of a group share stands at the group."""
        described: dict[str, Any] = {}
        nodes: dict[str, dict[str, Any]] = {}
        addressed: set[str] = set()
        for group in groups:
            names = expand(fold(group.hosts))
            entry: dict[str, Any] = {"hosts": fold(names)}
            addresses = [hosts[name].address for name in names]
            listable = len(set(addresses)) == len(names) and all(map(_is_address, addresses))
            if listable and not addressed & set(names):
                entry["addresses"] = _in_order([str(text) for text in addresses])
                addressed |= set(names)
            entry["roles"] = group.roles
            shared = _without(_common(hosts[name] for name in names), common)
            if shared:
                entry["access"] = shared
            described[group.name] = entry
        for name, host in hosts.items():
            own: dict[str, Any] = {}
            if host.address is not None and name not in addressed:
                own["address"] = host.address
            said = dict(common)
            for group in groups:
                if name in group.hosts:
                    said |= described[group.name].get("access", {})
            differs = _without(host.access, said)
            if differs:
                own["access"] = differs
            if own:
                nodes[name] = own
        return described, nodes

    def sections(self, roles: set[str]) -> dict[str, Any]:
        sections: dict[str, Any] = {}
        if "storage" in roles:
            sections["storage"] = {}
        if "control-plane" in roles:
            self.fill_in(
                "scheduler", "these are groups of a Kubernetes cluster, which a site file cannot describe yet"
            )
        elif roles & {"worker", "login"}:
            sections["scheduler"] = {"slurm": {}}
        if "monitor" in roles:
            sections["monitoring"] = {}
        return sections

    def cluster(self) -> str:
        """The cluster's name: the one that all hosts agree on, else that of the file."""
        for variable in ("openhpc_cluster_name", "slurm_cluster_name", "cluster_name"):
            said = {
                str(variables[variable])
                for variables in self.inventory.hosts.values()
                if variable in variables
            }
            if len(said) == 1:
                name = said.pop()
                if cluster_fault(name) is None:
                    return name
                self.left_out("variable", variable, f'"{name}" cannot be the name of a cluster')
        path = self.inventory.path.absolute()
        for candidate in (path.stem, path.parent.name):
            plain = candidate.lower().replace(".", "-")
            if candidate not in ("hosts", "inventory") and cluster_fault(plain) is None:
                return plain
        return "cluster"

    # What becomes of variables

    def hosts(self, names: list[str]) -> dict[str, _Host]:
        hosts = {name: _Host() for name in names}
        unknown: dict[str, list[str]] = {}
        notes: dict[tuple[str, str, str, Verdict], list[str]] = {}

        def note(kind: str, what: str, why: str, verdict: Verdict = Verdict.WARN) -> None:
            notes.setdefault((kind, what, why, verdict), []).append(name)

        for name, host in hosts.items():
            for variable, value in self.inventory.hosts[name].items():
                text = "" if value is None else str(value)
                if isinstance(value, dict) and "__ansible_vault" in value:
                    note("secret", variable, "encrypted by ansible-vault; never copied")
                elif variable in _BECOME_PASSWORD:
                    host.access["sudo_password"] = True
                    note("secret", variable, "never copied; sudo's password is asked for, once")
                elif _SECRET.search(variable) and variable not in _ACCESS:
                    note("secret", variable, "a secret; never copied")
                elif "{{" in text and (variable in _ACCESS or variable in _ADDRESS or variable in _ARGUMENTS):
                    note("variable", variable, f"its value is an expression: {text}")
                elif variable in _ACCESS:
                    self.access(host, variable, text, note)
                elif variable in _ADDRESS:
                    self.address(name, host, text, note)
                elif variable == _FACT and isinstance(value, list):
                    host.candidates = [each for each in map(str, value) if not each.startswith("127.")]
                elif variable in _ARGUMENTS:
                    translated = translate_arguments(text)
                    host.access |= translated.access
                    for argument, why in translated.left_out:
                        note("ssh-argument", argument, f"{why} ({variable})")
                    for argument in translated.unneeded:
                        note(
                            "ssh-argument",
                            argument,
                            "not needed: connections are this tool's own",
                            Verdict.SKIP,
                        )
                elif variable in _UNNEEDED:
                    if text.lower() in _EXPECTED.get(variable, {text.lower()}):
                        note("variable", variable, "not needed here", Verdict.SKIP)
                    else:
                        note(
                            "variable",
                            variable,
                            f'"{text}" has no counterpart: nodes are reached by ssh and sudo',
                        )
                elif variable in ("ip", "access_ip") and text == host.address:
                    note("variable", variable, "says the same as ansible_host", Verdict.SKIP)
                elif variable not in ("openhpc_cluster_name", "slurm_cluster_name", "cluster_name"):
                    unknown.setdefault(variable, []).append(name)
        for (kind, what, why, verdict), where in notes.items():
            self.note(kind, what, f"{why}; on {_where(where, len(hosts))}", verdict)
        for variable, where in unknown.items():
            why = f"has no counterpart; on {_where(where, len(hosts))}"
            self.left_out(
                "variable", variable, why, action="if a playbook needs it: `variables` in the site file"
            )
        for name, host in hosts.items():
            if host.address is None and len(host.candidates) > 1:
                addresses = ", ".join(host.candidates)
                self.fill_in(
                    f"nodes.{name}.address",
                    f"{len(host.candidates)} candidate addresses, none chosen: {addresses}",
                )
        if hosts and not any("user" in host.access for host in hosts.values()):
            self.note(
                "access", "user", "not said: Ansible takes your own account, a site file root", Verdict.WARN
            )
        return hosts

    def access(self, host: _Host, variable: str, text: str, note: Any) -> None:
        key = _ACCESS[variable]
        if key == "port":
            if not text.isdigit() or not 0 < int(text) < 65536:
                note("variable", variable, f'"{text}" is not a port')
                return
            host.access["port"] = int(text)
            return
        if key == "key" and not Path(text.strip("'\"")).is_absolute() and not text.startswith("~"):
            note("variable", variable, f'"{text}" is relative: to the site file, from now on')
        host.access[key] = text.strip("'\"")

    def address(self, name: str, host: _Host, text: str, note: Any) -> None:
        if text == name:
            return
        if _is_address(text) or is_dns_name(text):
            host.address = text
        else:
            note("variable", "ansible_host", f'"{text}" is neither an address nor a name')

    # What is said about it

    def left_out(self, kind: str, what: str, why: str, action: str | None = None) -> None:
        self.note(kind, what, f"left out: {why}", Verdict.WARN, action)

    def note(self, kind: str, what: str, why: str, verdict: Verdict, action: str | None = None) -> None:
        self.findings.append(
            Finding(
                verdict=verdict,
                check=f"import-{kind}",
                subject=what,
                why=why,
                action=action,
                source=str(self.inventory.path),
                line=self.inventory.line_of(what.partition("=")[0]),
            )
        )

    def fill_in(self, key: str, why: str) -> None:
        self.findings.append(
            Finding(
                verdict=Verdict.FAIL,
                check="import-fill-in",
                subject=key,
                why=why,
                action=f"fill in `{key}` in the site file",
                source=str(self.inventory.path),
            )
        )


def _rank(group: str) -> int:
    """Heads first: of equal groups, the most telling name stays."""
    role = _SLURM.get(_plain(group)) or _KUBERNETES.get(_plain(group))
    return _ORDER.index(role) if role else len(_ORDER)


def _plain(group: str) -> str:
    return group.lower().replace("-", "_")


def _is_address(text: str | None) -> bool:
    try:
        address(text or "")
    except ValueError:
        return False
    return True


def _in_order(addresses: list[str]) -> str:
    """A list of `addresses` in this order, folded where that keeps it."""
    folded = fold(addresses)
    return folded if expand(folded) == addresses else ",".join(addresses)


def _common(hosts: Iterable[_Host]) -> dict[str, Any]:
    """The access keys that all hosts have with one value."""
    all_access = [host.access for host in hosts]
    if not all_access:
        return {}
    first, *others = all_access
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _without(access: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in access.items() if said.get(key) != value}


def _where(names: list[str], total: int) -> str:
    return "all hosts" if len(names) == total > 1 else fold(names)
