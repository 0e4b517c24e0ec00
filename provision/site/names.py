"""Which names machines and clusters may have. Nothing is ever renamed silently: a better name is proposed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from ipaddress import ip_address

LONGEST_LABEL = 63  # RFC 1123; Linux takes host names up to 64
_CLUSTER = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_GROUP = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
_RESERVED = {"localhost", "localhost.localdomain", "all", "none", "default"}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a name."""

    why: str
    proposal: str | None = None
    warning: bool = False


def host_faults(name: str, schedulers: Collection[str] = ()) -> Iterator[Fault]:
    """What is wrong with `name` as that of a node under `schedulers` ("slurm", "kubernetes")."""
    if name.isdigit():
        yield Fault("a name of digits only is taken for a number by Slurm and Kubernetes", f"node-{name}")
        return
    if _is_address(name):
        yield Fault("an address, not a name: hosts are names, their addresses stand under `addresses`")
        return
    if name.lower() in _RESERVED:
        yield Fault("this name has a meaning of its own")
        return
    labels = name.split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        proposal = ".".join(re.sub(r"[^A-Za-z0-9-]+", "-", label).strip("-") for label in labels).strip(".")
        yield Fault(
            "names are letters, digits and inner hyphens (RFC 1123)",
            proposal
            if proposal and proposal != name and all(map(_LABEL.fullmatch, proposal.split(".")))
            else None,
        )
        return
    if max(map(len, labels)) > LONGEST_LABEL or len(name) > LONGEST_LABEL:
        yield Fault(f"longer than {LONGEST_LABEL} characters, more than DNS and Linux allow")
    if name != name.lower():
        if "kubernetes" in schedulers:
            yield Fault("Kubernetes wants lower case (RFC 1123)", name.lower())
        else:
            yield Fault("Slurm compares with the spelling of `hostname -s`", name.lower(), warning=True)
    if len(labels) > 1:
        yield Fault(
            "a name with a domain: Slurm compares with the short name that `hostname -s` prints",
            labels[0],
            warning=True,
        )


def cluster_fault(name: str) -> Fault | None:
    """What is wrong with `name` as that of a cluster: Slurm's accounting knows lower case only."""
    if _CLUSTER.fullmatch(name):
        return None
    proposal = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")
    why = "a cluster's name is a lower-case letter, then lower-case letters, digits, - and _; 40 at most"
    return Fault(why, proposal if _CLUSTER.fullmatch(proposal) else None)


def group_fault(name: str) -> Fault | None:
    """What is wrong with `name` as that of a group of nodes."""
    if _GROUP.fullmatch(name):
        return None
    return Fault("a group's name is a letter, then letters, digits, - and _; 63 at most")


def is_dns_name(text: str) -> bool:
    """Whether `text` can be looked up in DNS: not an address, and not a mistyped one such as 10.1.0.300."""
    labels = text.removesuffix(".").split(".")
    return len(text) <= 253 and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """`host` as it stands before a port: an IPv6 address in brackets, all else as it is."""
    return f"[{host}]" if _is_address(host) and ":" in host else host
