"""What this machine is and has: the programs the lab needs, its Debian mirror, its cgroup hierarchy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from provision.lab.command import InputError, LabError

PROGRAMS = {  # program -> Debian and Ubuntu package
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "nft": "nftables",
    "nc": "netcat-openbsd",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SUITE = re.compile(
    r"(bullseye|bookworm|trixie|forky|sid|oldstable|stable|testing|unstable)(/|-updates|-security)?$"
)


@dataclass(frozen=True)
class Mirror:
    """Where Debian packages come from: the archive, and the security archive where there is one."""

    url: str
    security: str | None = None


@dataclass(frozen=True)
class AptSource:
    """One (URI, suite) of an apt source with its components."""

    uri: str
    suite: str
    components: tuple[str, ...]


def missing_packages(which: Callable[[str], str | None] = shutil.which, keyring: Path = KEYRING) -> list[str]:
    """The packages to install before a lab can be made here."""
    missing = {package for program, package in PROGRAMS.items() if which(program) is None}
    if which("gcc") is None:
        missing |= {"gcc", "libc6-dev"}
    if not keyring.exists():
        missing.add("debian-archive-keyring")
    return sorted(missing)


def require_root() -> None:
    """Raise InputError for who can neither make a lab nor reach into one."""
    if os.geteuid() != 0:
        raise InputError("the lab needs root on this machine (containers, network namespaces): use sudo")


def require() -> None:
    """Raise InputError unless this machine can make a lab."""
    require_root()
    missing = missing_packages()
    if missing:
        raise InputError(f"missing here: {' '.join(missing)}; run: apt-get install -y {' '.join(missing)}")

    if not Path("/dev/fuse").exists():
        raise InputError(
            "this machine has no /dev/fuse, which the nodes' shared file system needs: modprobe fuse"
        )


def capabilities(status: Path = Path("/proc/self/status")) -> int:
    """The capabilities of this process as a bit mask; even root may lack some."""
    line = next(line for line in status.read_text().splitlines() if line.startswith("CapEff:"))
    return int(line.split()[1], 16)


def cgroup_hierarchies(mountinfo: str) -> list[tuple[Path, str]]:
    """Where the control group hierarchies of this machine are mounted, each with cgroup or cgroup2 (v1, v2)."""
    mounts = [
        (Path(fields[4]), line.split(" - ", 1)[1].split()[0])
        for line in mountinfo.splitlines()
        if (fields := line.split())
    ]
    return [
        (point, kind)
        for point, kind in mounts
        if kind in ("cgroup", "cgroup2") and point.is_relative_to("/sys/fs/cgroup")
    ]


def cgroup_root(mountinfo: str) -> tuple[Path, bool]:
    """The mount point of cgroup v2 and whether the machine is hybrid (v1 controllers beside it)."""
    hierarchies = cgroup_hierarchies(mountinfo)
    unified = [point for point, kind in hierarchies if kind == "cgroup2"]
    if not unified:
        raise LabError(
            "this machine has no cgroup v2 hierarchy below /sys/fs/cgroup: "
            "boot with systemd.unified_cgroup_hierarchy=1"
        )
    return unified[0], any(kind == "cgroup" for _, kind in hierarchies)


def apt_sources(directory: Path = Path("/etc/apt")) -> list[AptSource]:
    """All binary package sources that apt uses on this machine, in the order in which apt reads them."""
    files = [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]
    found: list[AptSource] = []
    for file in files:
        if file.is_file() and file.suffix == ".sources":
            found += _deb822(file.read_text())
        elif file.is_file() and file.suffix == ".list":
            found += _one_line(file.read_text())
    return found


def debians_own(program: Path | None = None) -> Mirror:
    """The mirror that mmdebstrap takes when it is told none, read from the program itself. Raises InputError."""
    found = program or Path(shutil.which("mmdebstrap") or "/usr/bin/mmdebstrap")
    match = re.search(
        r"""\$mirror\s*=\s*["'](https?://[^"']+/debian)["']""", found.read_text(errors="replace")
    )
    if match is None:
        raise InputError(f"apt uses no Debian mirror here and {found} names none: give one with --mirror URL")
    return Mirror(match.group(1), f"{match.group(1)}-security")


def debian_mirror(sources: Iterable[AptSource]) -> Mirror | None:
    """The Debian archive among `sources`; None where there is none (an Ubuntu machine)."""
    debian = [
        source
        for source in sources
        if source.uri.startswith(("http://", "https://"))
        and _SUITE.match(source.suite)
        and "main" in source.components
    ]
    archives = [s.uri.rstrip("/") for s in debian if not s.suite.rstrip("/").endswith("security")]
    security = [s.uri.rstrip("/") for s in debian if s.suite.rstrip("/").endswith("-security")]
    archives.sort(
        key=lambda uri: not uri.endswith("/debian")
    )  # an unofficial archive may carry Debian's suite names
    return Mirror(archives[0], security[0] if security else None) if archives else None


def find_mirror(wanted: str | None, suite: str) -> Mirror:
    """The mirror to build from: `wanted`, else the machine's, else (no Debian in its apt sources) Debian's own.

    Raises InputError where it has no `suite`.
    """
    if wanted is not None:
        if not wanted.startswith(("http://", "https://")):
            raise InputError(f"--mirror {wanted}: expected an address that starts with http:// or https://")
        beside = re.sub(r"/debian$", "/debian-security", wanted.rstrip("/"))
        mirror = Mirror(wanted.rstrip("/"), beside if beside != wanted.rstrip("/") else None)
    else:
        mirror = debian_mirror(apt_sources()) or debians_own()
    if not _has(f"{mirror.url}/dists/{suite}/InRelease"):
        raise InputError(
            f"{mirror.url}: no suite {suite} there (or no answer); name another mirror with --mirror"
        )
    if mirror.security is not None and not _has(f"{mirror.security}/dists/{suite}-security/InRelease"):
        return Mirror(mirror.url)
    return mirror


def _has(url: str) -> bool:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=20):
            return True
    except (OSError, HTTPException, ValueError):  # no answer, a wrong one, or no address at all
        return False


def _one_line(text: str) -> Iterator[AptSource]:
    for line in text.splitlines():
        words = re.sub(r"\[[^]]*\]", " ", line.split("#", 1)[0]).split()
        if len(words) >= 3 and words[0] == "deb":
            yield AptSource(words[1], words[2], tuple(words[3:]))


def _deb822(text: str) -> Iterator[AptSource]:
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", plain):
        fields: dict[str, list[str]] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields.setdefault(key, []).extend(line.split())
            elif ":" in line:
                name, value = line.split(":", 1)
                key = name.strip().lower()
                fields[key] = value.split()
        if fields.get("enabled", ["yes"])[0].lower() == "no" or "deb" not in fields.get("types", []):
            continue
        for uri in fields.get("uris", []):
            for suite in fields.get("suites", []):
                yield AptSource(uri, suite, tuple(fields.get("components", [])))
