"""How packages are asked for and installed, by family of distributions. Shell text and its parsing; pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LOCK_TIMEOUT = 300  # seconds to wait for another package manager run on the node


@dataclass(frozen=True)
class PackageManager:
    """The package manager of a family."""

    query: str  # prints the installed packages
    parse: Callable[[str], set[str]]  # its output -> names of packages that are whole
    install: Callable[[Iterable[str]], str]  # shell text
    remove: Callable[[Iterable[str]], str]


def parse_dpkg(output: str) -> set[str]:
    """Names with status "installed", whatever is wanted of them: held ones are, half-configured ones are not.

    Lines are "name status", as `dpkg-query -W -f '${Package} ${db:Status-Status}\\n'` prints them.
    """
    pairs = (line.split() for line in output.splitlines())
    return {words[0] for words in pairs if len(words) == 2 and words[1] == "installed"}


def parse_rpm(output: str) -> set[str]:
    """Names, one a line, as `rpm -qa --qf '%{NAME}\\n'` prints them."""
    return set(output.split())


# Daemons are started by the step that configured them, not by the installation: a daemon without its
# configuration fails, and a failed unit is a false alarm. Debian asks policy-rc.d; another's is left alone.
_APT = """set -u
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ] || grep -q '# provision' $policy; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\\n# provision: nothing is started while packages are installed\\nexit 101\\n' >$policy
  chmod 755 $policy
fi
update() {{
  waited=0
  until apt-get -qq update 2>/tmp/.provision-apt.$$; do
    if grep -q 'Could not get lock' /tmp/.provision-apt.$$ && [ $waited -lt {lock} ]; then
      sleep 2; waited=$((waited + 2)); continue
    fi
    cat /tmp/.provision-apt.$$ >&2; rm -f /tmp/.provision-apt.$$; return 100
  done
  rm -f /tmp/.provision-apt.$$
}}
get() {{
  apt-get -qq -y -o DPkg::Lock::Timeout={lock} -o Dpkg::Options::=--force-confdef \\
    -o Dpkg::Options::=--force-confold -o APT::Install-Recommends=false {verb} -- {names} 9>&-
}}
[ -n "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -mtime -1 2>/dev/null | head -n 1)" ] || update
get || {{ update && get; }}
"""


def _apt(verb: str, names: Iterable[str]) -> str:
    return _APT.format(lock=LOCK_TIMEOUT, verb=verb, names=shlex.join(names))


def _dnf(verb: str, names: Iterable[str]) -> str:
    return f"dnf -q -y --setopt=install_weak_deps=False {verb} -- {shlex.join(names)}"


MANAGERS: dict[str, PackageManager] = {
    "debian": PackageManager(
        query="dpkg-query -W -f '${Package} ${db:Status-Status}\\n'",
        parse=parse_dpkg,
        install=lambda names: _apt("install", names),
        remove=lambda names: _apt("remove", names),
    ),
    "redhat": PackageManager(
        query="rpm -qa --qf '%{NAME}\\n'",
        parse=parse_rpm,
        install=lambda names: _dnf("install", names),
        remove=lambda names: _dnf("remove", names),
    ),
}
