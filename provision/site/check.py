"""Cross checks of a site file: what no single value tells. Nothing is connected to."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from provision.profiles.gpu import measured_models
from provision.site.hostlist import HostlistError, expand, fold
from provision.site.jumps import JumpError, below, site_chain
from provision.site.models import SECTIONS, Access, Group, Node, NodeSettings, Site, SiteFile, merge
from provision.site.names import cluster_fault, group_fault, host_faults, is_dns_name
from provision.site.problem import Key, Problem, dotted, nearest, one_of, shown
from provision.site.translate import translate

Address = IPv4Address | IPv6Address

# role -> the component that it is a part of
ROLE_COMPONENTS = {"worker": "slurm", "login": "slurm", "monitor": "prometheus", "storage": "storage"}
# component -> the roles without which it is nowhere
NEEDED_ROLES = {"slurm": ("worker",), "prometheus": ("monitor",)}

UNSCHEDULED = "nothing hands out work on these nodes; `provision burnin` can try them over ssh"

# rules that say that something is not there: not to be believed while that part of the file cannot be read
ABSENT_ROLES = frozenset({"missing-head", "role-without-component", "component-without-role"})
ABSENT_HOSTS = frozenset({"unknown-host", "unknown-group"})


def address(text: str) -> Address:
    """`text` as an address; an IPv4-mapped one is the IPv4 address that it means. Raises ValueError."""
    found = ip_address(text)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def structure_problems(file: SiteFile) -> Iterator[Problem]:
    """What keeps `file` from being read as a cluster: host lists, address lists, settings that differ."""
    for name, group in file.groups.items():
        yield from _host_list_problems(name, group)
        yield from _override_problems(
            file, ("groups", name), group, file.access.model_dump(exclude_unset=True)
        )
    hosts = {name: _hosts(group) for name, group in file.groups.items()}
    for name, node in file.nodes.items():
        access = file.access.model_dump(exclude_unset=True)
        for group_name, group in file.groups.items():
            if name in hosts[group_name]:
                access = merge(access, group.access)
        yield from _override_problems(file, ("nodes", name), node, access)


def _hosts(group: Group) -> frozenset[str]:
    try:
        return frozenset(expand(group.hosts))
    except HostlistError:
        return frozenset()  # reported with its group


def _host_list_problems(name: str, group: Group) -> Iterator[Problem]:
    try:
        hosts = expand(group.hosts)
    except HostlistError as error:
        expected = "a host list such as gpu-[001-016],login-1"
        yield Problem("host-list", ("groups", name, "hosts"), shown(group.hosts), expected, why=str(error))
        return
    if group.addresses is None:
        return
    key: Key = ("groups", name, "addresses")
    try:
        addresses = expand(group.addresses)
    except HostlistError as error:
        expected = "a list of addresses such as 10.1.0.[11-26]"
        yield Problem("address-list", key, shown(group.addresses), expected, why=str(error))
        return
    if len(addresses) != len(hosts):
        yield Problem(
            "address-count", key, f"{len(addresses)} addresses", f"{len(hosts)}, as many as there are hosts"
        )


def _override_problems(
    file: SiteFile, at: Key, part: Group | NodeSettings, access: Mapping[str, Any]
) -> Iterator[Problem]:
    """Mistakes in the keys of `access` and `settings` that differ for a group or a node."""
    if part.access:
        yield from _validated(Access, access, part.access, (*at, "access"))
    for component, values in part.settings.items():
        key = (*at, "settings", component)
        if component not in SECTIONS:
            by_section = {section[-1]: name for name, section in SECTIONS.items()}
            close = by_section.get(component) or nearest(component, SECTIONS)
            yield Problem(
                "unknown-component",
                key,
                shown(component),
                None if close else one_of(SECTIONS),
                nearest=close,
                at_key=True,
            )
            continue
        section = Site(file, Path(), {}).section(component)
        if section is None:
            named = ".".join(SECTIONS[component])
            why = f"{component} is not part of this cluster: `{named}` is not in the file"
            yield Problem("unknown-component", key, why=why, at_key=True)
            continue
        yield from _validated(type(section), section.model_dump(exclude_unset=True), values, key)


def _validated(
    model: type[Any], base: Mapping[str, Any], values: Mapping[str, Any], key: Key
) -> Iterator[Problem]:
    merged = merge(base, values)
    try:
        model.model_validate(merged)
    except ValidationError as error:
        yield from translate(error, merged, model, key)


def site_problems(site: Site) -> Iterator[Problem]:
    """Everything that is wrong or doubtful in a cluster that could be read."""
    yield from _name_problems(site)
    yield from _role_problems(site)
    yield from _group_problems(site)
    yield from _address_problems(site)
    yield from _network_problems(site)
    yield from _access_problems(site)
    yield from _hook_problems(site)
    if not site.with_role("head"):
        return  # what components check is about a cluster that has one
    for component in SECTIONS:
        if site.enabled(component):
            module = import_module(f"provision.components.{component}.exports")
            if hasattr(module, "problems"):
                yield from module.problems(site)


def _name_problems(site: Site) -> Iterator[Problem]:
    fault = cluster_fault(site.cluster)
    if fault:
        yield Problem(
            "cluster-name", ("cluster",), shown(site.cluster), nearest=fault.proposal, why=fault.why
        )
    for group in site.file.groups:
        fault = group_fault(group)
        if fault:
            yield Problem("group-name", ("groups", group), shown(group), why=fault.why, at_key=True)
    schedulers = {"kubernetes"} if site.with_role("control-plane") else {"slurm"}
    by_folded: dict[str, str] = {}
    for node in site.nodes.values():
        for fault in host_faults(node.name, schedulers):
            yield Problem(
                "host-name",
                ("groups", node.group, "hosts"),
                shown(node.name),
                nearest=fault.proposal,
                why=fault.why,
                warning=fault.warning,
            )
        other = by_folded.setdefault(node.name.lower(), node.name)
        if other != node.name:
            why = f"{other} and {node.name} are one name in DNS"
            yield Problem("host-name", ("groups", node.group, "hosts"), shown(node.name), why=why)
    for name in site.file.nodes:
        if name not in site.nodes:
            close = nearest(name, site.nodes)
            yield Problem(
                "unknown-host",
                ("nodes", name),
                shown(name),
                "a host of one of the groups",
                nearest=close,
                at_key=True,
            )


def _role_problems(site: Site) -> Iterator[Problem]:
    if not site.with_role("head"):
        yield Problem("missing-head", ("groups",), "no group with the role head", "one", at_key=True)
    for name, group in site.file.groups.items():
        for index, role in enumerate(group.roles):
            key = ("groups", name, "roles", index)
            if role in ROLE_COMPONENTS and not site.enabled(ROLE_COMPONENTS[role]):
                section = ".".join(SECTIONS[ROLE_COMPONENTS[role]])
                yield Problem(
                    "role-without-component",
                    key,
                    shown(role),
                    f"`{section}` in the file, which this role is a part of",
                    why=UNSCHEDULED if role == "worker" else None,
                    warning=role == "worker",
                )
            elif role == "control-plane":
                why = "this role is part of Kubernetes, which is not part of this cluster"
                yield Problem("role-without-component", key, shown(role), why=why)
    for component, needed in NEEDED_ROLES.items():
        for missing in needed:
            if site.enabled(component) and not site.with_role(missing):
                yield Problem(
                    "component-without-role",
                    SECTIONS[component],
                    f"no group with the role {missing}",
                    "one: without it there is nowhere to run",
                    at_key=True,
                )
    for node in site.with_role("head"):
        if node.has("worker"):
            yield Problem(
                "head-is-worker",
                ("groups", node.groups[-1], "roles"),
                why=f"{node.name} is head and worker: jobs compete with the services of the cluster",
                warning=True,
            )


def _group_problems(site: Site) -> Iterator[Problem]:
    for name in site.file.groups:
        by_model: dict[str, list[str]] = defaultdict(list)
        by_count: dict[int, list[str]] = defaultdict(list)
        for node in site.in_group(name):
            if node.gpu:
                by_model[node.gpu.model].append(node.name)
                by_count[node.gpu.count].append(node.name)
        if len(by_model) > 1:
            listed = "; ".join(f"{model}: {fold(names)}" for model, names in by_model.items())
            yield Problem(
                "mixed-gpu-models", ("groups", name), listed, "one GPU model in a group", at_key=True
            )
        elif len(by_count) > 1:
            listed = "; ".join(f"{count}: {fold(names)}" for count, names in by_count.items())
            yield Problem(
                "mixed-gpu-counts",
                ("groups", name),
                f"numbers of GPUs that differ ({listed})",
                warning=True,
                at_key=True,
            )
    yield from _unknown_models(site)
    yield from _conflicts(site)


def _unknown_models(site: Site) -> Iterator[Problem]:
    """A model without numbers can be provisioned; a burn-in cannot tell whether its GPUs are fast enough."""
    for name, group in site.file.groups.items():
        if group.gpu is not None and group.gpu.model not in measured_models():
            yield Problem(
                "unknown-gpu-model",
                ("groups", name, "gpu", "model"),
                shown(group.gpu.model),
                f"one of {', '.join(measured_models())}",
                nearest(group.gpu.model, measured_models()),
                "of another model no speed is known: its burn-in ends as unknown until burnin.limits says more",
                warning=True,
            )


def _conflicts(site: Site) -> Iterator[Problem]:
    """The same host in several groups is fine, unless they say different things about it."""
    said: dict[tuple[str, str], tuple[str, object]] = {}
    for name, group in site.file.groups.items():
        hosts = expand(group.hosts)
        addresses = expand(group.addresses) if group.addresses else [None] * len(hosts)
        for host, written in zip(hosts, addresses, strict=True):
            facts: dict[str, object] = {"addresses": written, "gpu": group.gpu, "hardware": group.hardware}
            facts |= {f"access.{key}": value for key, value in group.access.items()}
            for what, value in facts.items():
                if value is None:
                    continue
                earlier = said.setdefault((host, what), (name, value))
                if earlier[1] != value:
                    yield Problem(
                        "conflicting-host",
                        ("groups", name, *what.split(".")),
                        why=f"{host} also stands in group {earlier[0]}, which says something else about it",
                    )


def _written_addresses(site: Site) -> Iterator[tuple[Node, Key, str]]:
    """Every address in the file: the node it belongs to, where it is written, its text."""
    for node in site.nodes.values():
        own = site.file.nodes.get(node.name, NodeSettings())
        if own.address:
            yield node, ("nodes", node.name, "address"), own.address
        elif node.address:
            group = next(group for group in node.groups if site.file.groups[group].addresses)
            yield node, ("groups", group, "addresses"), node.address
        for network, text in own.addresses.items():
            yield node, ("nodes", node.name, "addresses", network), text
        if own.bmc:
            yield node, ("nodes", node.name, "bmc"), own.bmc


def _address_problems(site: Site) -> Iterator[Problem]:
    owners: dict[Address | str, Node] = {}
    for node, key, text in _written_addresses(site):
        found: Address | str
        try:
            found = address(text)
        except ValueError:
            if not is_dns_name(text) or key[-1] not in ("address", "addresses", "bmc"):
                yield Problem("address", key, shown(text), "an IPv4 or IPv6 address", why=f"of {node.name}")
                continue
            found = text.lower()
        else:
            if found.is_unspecified or found.is_multicast or found.is_loopback:
                yield Problem(
                    "address", key, shown(text), "the address that others reach it by", why=f"of {node.name}"
                )
                continue
        owner = owners.setdefault(found, node)
        if owner.name != node.name:
            yield Problem(
                "duplicate-address", key, why=f"address {found} used by {owner.name} and {node.name}"
            )
        elif (key[-1] == "bmc") and node.address and _same(node.address, found):
            yield Problem("duplicate-address", key, why=f"{node.name} and its BMC have one address, {found}")


def _same(text: str, other: Address | str) -> bool:
    try:
        return address(text) == other
    except ValueError:
        return text.lower() == other


def _network_problems(site: Site) -> Iterator[Problem]:
    networks = site.file.networks
    written = networks.management
    management = networks.of_nodes
    keys: list[Key] = (
        [("networks", "management")]
        if isinstance(written, str)
        else [("networks", "management", index) for index in range(len(management))]
    )
    nets = {"management": list(zip(keys, management, strict=True))}
    nets["bmc"] = [(("networks", "bmc"), networks.bmc)] if networks.bmc else []
    known: dict[str, list[Any]] = {"management": [], "bmc": []}
    for kind, listed in nets.items():
        for key, text in listed:
            try:
                known[kind].append(ip_network(text))
            except ValueError:
                close = _network_of(text)
                yield Problem("network", key, shown(text), "a network such as 10.1.0.0/16", nearest=close)
    for kind, inside in known.items():
        if not inside or len(inside) != len(nets[kind]):
            continue
        outside: dict[Key, list[str]] = defaultdict(list)
        for node, key, text in _written_addresses(site):
            if (key[-1] == "bmc") != (kind == "bmc") or key[-2] == "addresses":
                continue
            try:
                found = address(text)
            except ValueError:
                continue
            if not any(found in network for network in inside):
                outside[key].append(f"{node.name} ({found})")
        for key, names in outside.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield Problem(
                "outside-network",
                key,
                f"{', '.join(names[:3])}{more}",
                f"addresses in {one_of(map(str, inside))} (networks.{kind})",
                warning=True,
            )


def _network_of(text: str) -> str | None:
    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        return None


def _access_problems(site: Site) -> Iterator[Problem]:
    reported: set[str] = set()
    own = [node for node in site.nodes.values() if node.access.local]
    if len(own) > 1:
        yield Problem(
            "access-local",
            _access_key(site, own[1], "local"),
            "true",
            "one node at most",
            why=f"{own[0].name} and {own[1].name} cannot both be the machine that this runs on",
        )
    for node in site.nodes.values():
        try:
            site_chain(site, node)
        except JumpError as error:
            if str(error) not in reported:
                reported.add(str(error))
                yield Problem(
                    "jump-loop",
                    _access_key(site, node, "jump"),
                    None if node.access.jump is None else shown(node.access.jump),
                    why=str(error),
                    action="`access: {jump: none}` says that a host is reached directly",
                )
        for name, path in (("key", node.access.key), ("ssh_config", node.access.ssh_config)):
            if path is None:
                continue
            file = below(site, path)
            key = _access_key(site, node, name)
            if dotted(key) in reported:
                continue
            reported.add(dotted(key))
            if not os.path.isfile(file):
                yield Problem("access-file", key, shown(str(path)), f"a file at {file}", warning=True)
            elif not os.access(file, os.R_OK):
                yield Problem("access-file", key, shown(str(path)), "a file that you may read", warning=True)


def _access_key(site: Site, node: Node, name: str) -> Key:
    """Where the value of `access.name` that holds for `node` is written."""
    own = site.file.nodes.get(node.name)
    if own and name in own.access:
        return ("nodes", node.name, "access", name)
    for group in reversed(node.groups):
        if name in site.file.groups[group].access:
            return ("groups", group, "access", name)
    return ("access", name)


def _hook_problems(site: Site) -> Iterator[Problem]:
    for index, hook in enumerate(site.file.hooks):
        key: Key = ("hooks", index)
        if (hook.before is None) == (hook.after is None):
            yield Problem("hook", key, why="a hook runs either `before` or `after` a component")
        for when, component in (("before", hook.before), ("after", hook.after)):
            if component is not None and component not in SECTIONS:
                close = nearest(component, SECTIONS)
                yield Problem(
                    "unknown-component",
                    (*key, when),
                    shown(component),
                    None if close else one_of(SECTIONS),
                    nearest=close,
                )
            elif component is not None and not site.enabled(component):
                why = f"{component} is not part of this cluster, so that this hook never runs"
                yield Problem("hook", (*key, when), shown(component), why=why, warning=True)
        playbook = below(site, hook.playbook)
        if not os.path.isfile(playbook):
            yield Problem("hook", (*key, "playbook"), shown(str(hook.playbook)), f"a playbook at {playbook}")
