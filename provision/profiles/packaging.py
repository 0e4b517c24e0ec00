"""How packages are asked for and installed, by family of distributions. Shell text and its parsing; pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from provision.profiles.repository import DOCA, NVIDIA, RepositoryTools, apt, dnf

LOCK_TIMEOUT = 300  # seconds to wait for another package manager run on the node
BUILD_LOG = "/var/lib/provision/dkms-make.log"  # kept of a kernel module that did not build


@dataclass(frozen=True)
class PackageManager:
    """The package manager of a family."""

    query: str  # prints the packages it knows
    installed: Callable[[str], set[str]]  # its output -> names of packages that are whole; ValueError
    install: Callable[[Iterable[str]], str]  # shell text
    remove: Callable[[Iterable[str]], str]
    whole: str  # exits 1, naming them, where packages are half way between two states
    make_whole: str
    offer: Callable[[Sequence[str]], str]  # shell text: what the sources offer, as `parse_offer` reads it
    command: Callable[[Mapping[str, str]], str]  # how a person would install exactly these versions
    exact: Callable[[ExactSet], str]  # shell text: exits 1 where the set is not there to the patch level
    make_exact: Callable[
        [ExactSet], str
    ]  # shell text: makes it so in one transaction, or leaves what there was
    repository: RepositoryTools  # NVIDIA's, of drivers and CUDA
    doca: RepositoryTools  # NVIDIA's, of DOCA
    version_of: Callable[[str], str]  # shell text: prints a package's installed version
    upgradable: str  # shell text: prints the packages that an upgrade of the system would move
    owner: Callable[
        [Sequence[str]], str
    ]  # shell text: prints an installed package with one of these paths, or nothing


@dataclass(frozen=True)
class ExactSet:
    """Packages of one version: a driver's, of which one that moves alone breaks the rest."""

    wanted: Mapping[str, str]  # package -> pattern of its version, as a shell's; "*": any
    version: str  # pattern for whatever else belongs to the set
    members: Sequence[
        str
    ]  # patterns of packages that belong to it, where their version looks like a driver's
    apart: Sequence[str]  # patterns of those that do not all the same


def parse_offer(output: str) -> dict[str, list[str]]:
    """Package -> versions, the newest first, of lines `NAME | VERSION | ...` as `apt-cache madison` prints them."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 2 and all(fields[:2]) and fields[1] not in found.setdefault(fields[0], []):
            found[fields[0]].append(fields[1])
    return found


@dataclass(frozen=True)
class PackageState:
    """A package as dpkg knows it: what is wanted ("hold") and what is ("unpacked")."""

    name: str
    want: str
    error: str
    state: str
    version: str | None  # None: known and never installed

    @property
    def installed(self) -> bool:
        """Whole and usable, whatever is wanted: held ones are, removed ones with configuration are not."""
        return self.state == "installed"

    @property
    def broken(self) -> bool:
        """Half way between states: every later installation would fail."""
        return self.error != "ok" or self.state not in ("installed", "config-files", "not-installed")


DPKG_QUERY = r"dpkg-query -W -f='${Package} ${Status} ${Version}\n'"


def parse_dpkg(output: str) -> list[PackageState]:
    """The packages that DPKG_QUERY printed. Raises ValueError naming a line that is not of its form."""
    found = []
    for line in output.splitlines():
        words = line.split()
        if len(words) not in (4, 5):
            raise ValueError(f"not a line of dpkg-query: {line!r}")
        name, want, error, state = words[:4]
        found.append(PackageState(name, want, error, state, words[4] if len(words) == 5 else None))
    return found


def parse_rpm(output: str) -> set[str]:
    """Names, one a line, as `rpm -qa --qf '%{NAME}\\n'` prints them."""
    return set(output.split())


# What the sources offer, read into a folder of its own: nothing on the node changes by asking.
_APT_OFFER = """d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && mkdir "$d/partial" || exit 2
o="-o Dir::State::Lists=$d -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache="
apt-get -qq $o update >&2 || exit 2
apt-cache $o madison -- {names}"""
_DNF_OFFER = """form='%{{name}} | %{{version}}-%{{release}} |'
o=$(dnf -q repoquery --showduplicates --qf "$form" -- {names}) || exit 2
printf '%s\n' "$o" | sort -rV"""


def _exact(part: str, wanted: ExactSet) -> str:
    """The script exact-PART.sh for this set."""
    read = files("provision.profiles").joinpath
    lines = "".join(f"{name} {version}\n" for name, version in wanted.wanted.items())
    return (
        f"version={shlex.quote(wanted.version)}\n"
        f"members={shlex.quote(' '.join(wanted.members))}\n"
        f"apart={shlex.quote(' '.join(wanted.apart))}\n"
        f"log={BUILD_LOG}\n"
        f"wanted() {{ cat <<'EOF'\n{lines}EOF\n}}\n"
        + read("exact.sh").read_text()
        + read(f"exact-{part}.sh").read_text()
    )


# Daemons are started by the step that configured them, not by the installation: a daemon without its
# configuration fails, and a failed unit is a false alarm. Debian asks policy-rc.d; another's is left alone.
_APT_FUNCTIONS = """set -u
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ] || grep -q '# provision' $policy; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\\n# provision: nothing is started while packages are installed\\nexit 101\\n' >$policy
  chmod 755 $policy
fi
update() {{
  waited=0
  until said=$(apt-get -qq update 2>&1); do
    case $said in *'Could not get lock'*)
      [ $waited -ge {lock} ] || {{ sleep 2; waited=$((waited + 2)); continue; }};;
    esac
    printf '%s\\n' "$said" >&2; return 100
  done
}}
apt() {{
  apt-get -qq -y -o DPkg::Lock::Timeout={lock} -o Dpkg::Options::=--force-confdef \\
    -o Dpkg::Options::=--force-confold -o APT::Install-Recommends=false "$@" 9>&-
}}
"""
_APT = """get() {{ apt {verb} -- {names}; }}
whole() {{ apt check >&2 || apt --fix-broken --no-remove install; }}
[ -n "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -mtime -1 2>/dev/null | head -n 1)" ] || update
get || {{ update && whole && get; }}
"""


def _apt(verb: str, names: Iterable[str]) -> str:
    return _APT_FUNCTIONS.format(lock=LOCK_TIMEOUT) + _APT.format(verb=verb, names=shlex.join(names))


def _dnf(verb: str, names: Iterable[str]) -> str:
    return f"dnf -q -y --setopt=install_weak_deps=False {verb} -- {shlex.join(names)}"


_APT_UPGRADABLE = """o=$(apt-get -s -qq upgrade) || exit 2
printf '%s\n' "$o" | sed -n 's/^Inst \\([^ ]*\\).*/\\1/p'"""
_DNF_UPGRADABLE = """o=$(dnf -q check-update)
case $? in 0 | 100) ;; *) exit 2 ;; esac
printf '%s\n' "$o" | sed -n 's/[.][^. ]* .*//p'"""


def _spec(wanted: Mapping[str, str], joint: str) -> list[str]:
    """Packages with their versions as the package manager's command line takes them."""
    return [name if version == "*" else f"{name}{joint}{version}" for name, version in wanted.items()]


_DPKG_WHOLE = """all=$(dpkg-query -W -f='${Status} ${Package}\\n') || exit 2
broken=$(printf '%s\\n' "$all" | grep -Ev '^[a-z]+ ok (installed|config-files|not-installed) ')
[ -z "$broken" ] || { printf '%s\\n' "$broken" >&2; exit 1; }"""
# Finishes what was interrupted and never removes a package for it. A driver's module that does not build says
# why in its make.log. dpkg itself does not wait for another one.
_DPKG_MAKE_WHOLE = """export DEBIAN_FRONTEND=noninteractive
get() {
  apt-get -qq -y -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold \\
    -o DPkg::Lock::Timeout=%(lock)d --no-remove "$@"
}
left=$((%(lock)d / 2))
until said=$(dpkg --force-confdef --force-confold --configure -a 2>&1); do
  case $said in *locked*) left=$((left - 1)); [ $left -eq 0 ] || { sleep 2; continue; };; esac
  break
done
half=$(dpkg-query -W -f='${Status} ${Package}\\n' | awk '$2 != "ok" || $3 == "half-installed" {print $4}')
[ -z "$half" ] || get --reinstall install $half || exit 1
get --fix-broken install || {
  printf '%%s\\n' "$said" | tail -n 5 >&2
  log=$(ls -t /var/lib/dkms/*/*/build/make.log 2>/dev/null | head -n 1)
  [ -z "$log" ] || { echo "the end of $log:"; tail -n 15 "$log"; } >&2
  exit 1
}""" % {"lock": LOCK_TIMEOUT}  # noqa: UP031 - the shell's own braces
_RPM_WHOLE = """twice=$(dnf -q repoquery --duplicates) || exit 2
[ -z "$twice" ] || { printf '%s\\n' "$twice" >&2; exit 1; }"""
# By the database: the file itself need not be there. What update-alternatives keeps is in no package's list.
_DPKG_OWNER = """found=$(dpkg-query -S -- {paths} 2>/dev/null)
[ $? -le 1 ] || exit 2
name=$(printf '%s\\n' "$found" | sed -n '/^diversion by /d; s/: .*//p' | head -n 1)
[ -n "$name" ] || name=$(grep -lsxF {lines} /var/lib/dpkg/alternatives/* | sed 's,.*/,the alternative ,; q')
echo "$name"
"""
_RPM_OWNER = """rpm -q rpm >/dev/null || exit 2
for f in {paths}; do
  name=$(rpm -qf --qf '%{{NAME}}\\n' -- "$f" 2>/dev/null) && {{ echo "$name" | head -n 1; exit 0; }}
done
grep -lsxF {lines} /var/lib/alternatives/* | sed 's,.*/,the alternative ,; q'
"""


def _owner(script: str, paths: Sequence[str]) -> str:
    return script.format(paths=shlex.join(paths), lines=" ".join(f"-e {shlex.quote(path)}" for path in paths))


MANAGERS: dict[str, PackageManager] = {
    "debian": PackageManager(
        query=DPKG_QUERY,
        installed=lambda output: {package.name for package in parse_dpkg(output) if package.installed},
        install=lambda names: _apt("install", names),
        remove=lambda names: _apt("remove", names),
        whole=_DPKG_WHOLE,
        make_whole=_DPKG_MAKE_WHOLE,
        offer=lambda names: _APT_OFFER.format(names=shlex.join(names)),
        command=lambda wanted: "apt-get install " + " ".join(_spec(wanted, "=")),
        exact=lambda wanted: _exact("dpkg-test", wanted),
        make_exact=lambda wanted: _APT_FUNCTIONS.format(lock=LOCK_TIMEOUT) + _exact("dpkg-make", wanted),
        repository=apt(NVIDIA),
        doca=apt(DOCA),
        version_of=lambda name: f"dpkg-query -W -f='${{Version}}' -- {shlex.quote(name)}",
        upgradable=_APT_UPGRADABLE,
        owner=lambda paths: _owner(_DPKG_OWNER, paths),
    ),
    "redhat": PackageManager(
        query="rpm -qa --qf '%{NAME}\\n'",
        installed=parse_rpm,
        install=lambda names: _dnf("install", names),
        remove=lambda names: _dnf("remove", names),
        whole=_RPM_WHOLE,
        make_whole="dnf -q -y remove --duplicates",
        offer=lambda names: _DNF_OFFER.format(names=shlex.join(names)),
        command=lambda wanted: "dnf install " + " ".join(_spec(wanted, "-")),
        exact=lambda wanted: _exact("rpm-test", wanted),
        make_exact=lambda wanted: _exact("rpm-make", wanted),
        repository=dnf(NVIDIA),
        doca=dnf(DOCA),
        version_of=lambda name: f"rpm -q --qf '%{{VERSION}}-%{{RELEASE}}' -- {shlex.quote(name)}",
        upgradable=_DNF_UPGRADABLE,
        owner=lambda paths: _owner(_RPM_OWNER, paths),
    ),
}
