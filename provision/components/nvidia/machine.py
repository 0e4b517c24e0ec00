"""What a node says about its kernel, its driver and Secure Boot, before and after the driver is changed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# One read: NAME=VALUE lines. What is not there is an empty value; the program never fails for it.
QUERY = r"""echo "kernel=$(uname -r)"
echo "arch=$(uname -m)"
nouveau=no; [ ! -d /sys/module/nouveau ] || nouveau=yes; echo "nouveau=$nouveau"
version=; [ ! -r /proc/driver/nvidia/version ] || version=$(head -n 1 /proc/driver/nvidia/version)
echo "loaded=$version"
boot=absent
for f in /sys/firmware/efi/efivars/SecureBoot-*; do
  [ ! -e "$f" ] || boot=$(od -An -t u1 -j 4 -N 1 "$f" | tr -d ' ')
done
echo "secure_boot=$boot"
key=; [ ! -s /var/lib/dkms/mok.pub ] || key=$(mokutil --test-key /var/lib/dkms/mok.pub 2>&1 | tail -n 1)
echo "key=$key"
again=no; [ ! -e /run/provision-nvidia-reboot ] || again=yes; echo "reboot=$again"
"""
REBOOT = "/run/provision-nvidia-reboot"  # made where only a reboot helps; gone after it


@dataclass(frozen=True)
class Loaded:
    """The kernel module that runs."""

    version: str
    modules: str  # "open" or "proprietary"


@dataclass(frozen=True)
class Machine:
    kernel: str  # `uname -r`
    arch: str = "x86_64"
    nouveau: bool = False
    loaded: Loaded | None = None
    secure_boot: bool = False
    key: str = "absent"  # of kernel modules that are built here: absent, new, requested, enrolled, unknown
    reboot: bool = False  # an earlier step has found that only a reboot helps


def parse_machine(text: str) -> Machine:
    """What QUERY printed. Raises ValueError naming what is missing or cannot be understood."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    missing = {"kernel", "arch", "nouveau", "loaded", "secure_boot", "key", "reboot"} - values.keys()
    if missing:
        raise ValueError(f"not told: {', '.join(sorted(missing))}")
    if values["secure_boot"] not in ("absent", "0", "1"):
        raise ValueError(f"Secure Boot is {values['secure_boot']!r}, neither on nor off")
    return Machine(
        kernel=values["kernel"],
        arch=values["arch"],
        nouveau=values["nouveau"] == "yes",
        loaded=parse_loaded(values["loaded"]),
        secure_boot=values["secure_boot"] == "1",
        key=parse_key(values["key"]),
        reboot=values["reboot"] == "yes",
    )


_LOADED = re.compile(
    r"NVRM version: NVIDIA UNIX (?P<open>Open )?(?:x86_64|aarch64)?\s*Kernel Module(?: for \S+)?"
    r"\s+(?P<version>\d+\.\d+(?:\.\d+)?)\s"
)


def parse_loaded(line: str) -> Loaded | None:
    """The first line of /proc/driver/nvidia/version; None for an empty one. Raises ValueError for any other."""
    if not line.strip():
        return None
    found = _LOADED.match(f"{line} ")
    if found is None:
        raise ValueError(f"not a line of /proc/driver/nvidia/version: {line!r}")
    return Loaded(found["version"], "open" if found["open"] else "proprietary")


def parse_key(line: str) -> str:
    """What `mokutil --test-key` says of a key; "absent" where there was none to ask about."""
    if not line.strip():
        return "absent"
    if "already enrolled" in line:
        return "enrolled"
    if "enrollment request" in line:
        return "requested"
    return "new" if "is not enrolled" in line else "unknown"


# A module that did not build

_COMMAND = re.compile(r"(?:^|\s)-(?:W|D|I|c\s)")  # a compiler's arguments, among them -Werror
_WORTH = (
    re.compile(r"fatal error: "),
    re.compile(r"(?<!\w)error: "),
    re.compile(r"ERROR: modpost: "),
    re.compile(r"undefined reference to|No such file or directory|No space left on device|command not found"),
    re.compile(r"\*\*\* (?!.*Error \d+\]?$).*"),
    re.compile(r"(?i)(?<!\w)error(?!\w)"),
)


def build_error(log: str) -> tuple[int, str] | None:
    """The line of a make.log that tells why, with its number: the compiler's first error before make's last words."""
    lines = [(at, line) for at, line in enumerate(log.splitlines(), 1) if not _COMMAND.search(line)]
    for pattern in _WORTH:
        for at, line in lines:
            if pattern.search(line):
                return at, line.strip()
    return None
