"""Settings of base: what every node has before anything else is installed on it."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from provision.site.base import Settings, matches

_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_SYSCTL = re.compile(r"[a-z0-9_]+([./][A-Za-z0-9_-]+)+")
_PATTERN = re.compile(r"[a-z0-9+.*-]*[a-z0-9][a-z0-9+.*-]*")
_HOME = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+")
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_LOCALE = re.compile(r"C\.UTF-8|[a-z]{2,3}_[A-Z]{2}\.UTF-8")
_SIZE = re.compile(r"[1-9][0-9]*[KMGT]")
_DURATION = re.compile(r"[1-9][0-9]*(s|min|h|day|week|month|year)")


def _public_key(value: str) -> str:
    """One line of an authorized_keys file, options allowed; a private key is refused without showing it."""
    if "PRIVATE KEY" in value:
        raise ValueError("this is a private key; the public one ends in .pub")
    if "\n" in value.strip():
        raise ValueError("one key is one line")
    words = value.split()
    for kind, blob in pairwise(words):
        if kind.startswith(("ssh-", "ecdsa-", "sk-")):
            try:
                inner = base64.b64decode(blob, validate=True)
            except binascii.Error:
                break
            if inner[4 : 4 + len(kind)] == kind.encode():
                return value.strip()
            break
    raise ValueError(f"{value[:40]!r} is not a public key: expected 'ssh-ed25519 AAAA... comment'")


def _address(value: str) -> str:
    return str(ipaddress.ip_address(value))


Account = Annotated[str, matches(_ACCOUNT, "an account name: a-z, 0-9, _ and -, 32 characters at most")]
PublicKey = Annotated[str, AfterValidator(_public_key)]
IpAddress = Annotated[str, AfterValidator(_address)]
Id = Annotated[int, Field(ge=1000, le=2_000_000_000)]  # below 1000 the distribution hands them out


class User(Settings):
    """A person's account, equal on all nodes."""

    uid: Id
    group: Account | None = None  # the primary one; left out: one of the user's own name, with gid = uid
    groups: list[Account] = Field(
        default_factory=list
    )  # further ones: of `base.groups` or the distribution's
    comment: str = Field("", pattern=r"^[^:\n]*$")
    home: Annotated[str, matches(_HOME, "a path like /home/ada")] | None = None  # left out: /home/NAME
    shell: str = Field("/bin/bash", pattern=r"^/[^:\s]+$")
    keys: list[PublicKey] = Field(
        default_factory=list
    )  # public keys that may log in, besides those in the home
    sudo: Literal["password", "nopasswd"] | None = None


class Limits(Settings):
    """Limits of processes, for users and for services."""

    memlock: Literal["unlimited"] | int = "unlimited"  # KiB; RDMA and pinned memory need it unlimited
    nofile: int = Field(131072, ge=1024)


class Journal(Settings):
    """The systemd journal, kept over reboots."""

    size: Annotated[str, matches(_SIZE, "a size like 2G")] = "2G"
    keep_free: Annotated[str, matches(_SIZE, "a size like 2G")] = "2G"
    retention: Annotated[str, matches(_DURATION, "a time like 3month")] = "3month"


class Hold(Settings):
    """Packages that only move when a person or this tool moves them: driver, CUDA and scheduler always."""

    kernel: bool = False  # also the kernel: with a driver that is not rebuilt by itself
    also: list[Annotated[str, matches(_PATTERN, "a package name or pattern like ofed*")]] = Field(
        default_factory=list
    )


class BaseSettings(Settings):
    """The part of a site file that describes base."""

    timezone: Annotated[str, matches(_ZONE, "a time zone like Europe/Zurich")] = "Etc/UTC"
    locale: Annotated[str, matches(_LOCALE, "C.UTF-8 or a locale like en_US.UTF-8")] = "C.UTF-8"
    hosts: dict[str, IpAddress] = Field(default_factory=dict)  # further lines of /etc/hosts: name -> address
    groups: dict[Account, Id] = Field(default_factory=dict)  # name -> gid
    users: dict[Account, User] = Field(default_factory=dict)
    absent_users: list[Account] = Field(default_factory=list)  # removed, their files stay
    sysctl: dict[Annotated[str, matches(_SYSCTL, "a kernel parameter like vm.swappiness")], int | str] = (
        Field(default_factory=dict)
    )
    limits: Limits = Limits()
    journal: Journal = Journal()
    hold: Hold = Hold()
    swap: Literal["keep", "off"] = "keep"
    governor: Literal["performance", "powersave", "schedutil", "ondemand", "keep"] = "performance"
