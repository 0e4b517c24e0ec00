"""How a vendor's repository is set up beside the distribution's own, by family of distributions. Shell text; pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from provision.profiles.packaging import ExactSet


@dataclass(frozen=True)
class RepositoryTools:
    """One entry, one key that is known by its checksum, and nothing of the set that moves by itself.

    `key` is the path of the key with this checksum; `entry` the content of `path` for an address and a key;
    `others` finds (exits 1), or with True puts aside, all other entries below these addresses; `fetch` gets a key:
    (address, checksum, path within the package or None). `pins` gives path and content of a file that holds a set,
    `hold` test and make where that is not done by a file. `stream` gives test and make of a module stream.
    """

    path: str
    key: Callable[[str], str]
    entry: Callable[[str, str], str]
    others: Callable[[Sequence[str], bool], str]
    fetch: Callable[[str, str, str | None], str]
    pins: Callable[[ExactSet], tuple[str, str]] | None = None
    hold: Callable[[ExactSet], tuple[str, str]] | None = None
    stream: Callable[[str], tuple[str, str]] | None = None


@dataclass(frozen=True)
class Publisher:
    """Whose repository it is: what our files for it are called, and how keys of old are."""

    name: str  # "nvidia": our files are provision-nvidia*
    title: str
    keys: tuple[str, ...]  # words in the names of such keys
    suffix: str  # of a key as it is published for apt: gpg, or asc for one in letters
    signs_lists: bool  # of rpm packages, too


NVIDIA = Publisher("nvidia", "NVIDIA", ("nvidia", "cuda"), "gpg", signs_lists=True)
DOCA = Publisher("doca", "NVIDIA DOCA", ("mellanox", "doca"), "asc", signs_lists=False)


def _apt_path(publisher: Publisher) -> str:
    return f"/etc/apt/sources.list.d/provision-{publisher.name}.sources"


def _apt_key(publisher: Publisher, sha256: str) -> str:
    return f"/usr/share/keyrings/provision-{publisher.name}-{sha256[:12]}.{publisher.suffix}"


def _apt_entry(address: str, key: str) -> str:
    return f"Types: deb\nURIs: {address}\nSuites: /\nSigned-By: {key}\n"


def apt_others(publisher: Publisher, addresses: Sequence[str], remove: bool, etc: str = "/etc/apt") -> str:
    """Two entries of one address with different keys stop apt as a whole: find all but ours, and keys of old."""
    pattern = shlex.quote("|".join(_without_scheme(address) for address in addresses))
    ours = shlex.quote(_apt_path(publisher).rpartition("/")[2])
    named = " -o ".join(f"-iname '*{word}*.{kind}'" for kind in ("gpg", "asc") for word in publisher.keys)
    find = f"""cd {shlex.quote(etc)} || exit 2
pattern={pattern}
entries=$(find sources.list sources.list.d -maxdepth 1 -type f \\( -name '*.list' -o -name '*.sources' \\) \\
  ! -name {ours} -exec grep -lE "^[^#]*($pattern)" {{}} + 2>/dev/null)
keys=$(find trusted.gpg.d -maxdepth 1 -type f \\( {named} \\) 2>/dev/null)
"""
    if not remove:
        return find + '[ -z "$entries$keys" ] || { echo "also: $entries $keys" >&2; exit 1; }'
    return (
        find
        + """for file in $entries; do
  if grep -qE '^(deb|URIs)' "$file" && [ -z "$(grep -E '^(deb|URIs)' "$file" | grep -vE "$pattern")" ]; then
    mv --backup=numbered "$file" "$file.before-provision" || exit 1
  else
    sed -i -E "s@^[^#].*($pattern).*@# before provision: &@" "$file" || exit 1
  fi
done
for file in $keys; do mv --backup=numbered "$file" "$file.before-provision" || exit 1; done"""
    )


def _without_scheme(address: str) -> str:
    """An address as a regular expression, whatever it is reached by."""
    return re.escape(re.sub(r"^[a-z]+://", "", address)).replace(r"\-", "-").replace("/", "/")


def _apt_fetch(publisher: Publisher, address: str, sha256: str, within: str | None) -> str:
    """apt's own downloader: it knows the proxies, and keeps nothing whose checksum is another."""
    key = _apt_key(publisher, sha256)
    take = (
        f'dpkg-deb --fsys-tarfile "$d/file" | tar -xO ./{shlex.quote(within)} >"$d/key"'
        if within
        else 'cp "$d/file" "$d/key"'
    )
    return f"""d=$(mktemp -d /var/cache/apt/provision.XXXXXX) && trap 'rm -rf "$d"' EXIT && chmod 755 "$d" || exit 1
said=$(/usr/lib/apt/apt-helper download-file {shlex.quote(address)} "$d/file" SHA256:{sha256} 2>&1) || {{
  printf '%s\\n' "$said" >&2
  exit 1
}}
{take} && [ -s "$d/key" ] && install -m 644 "$d/key" {key}"""


def _apt_pins(publisher: Publisher, wanted: ExactSet) -> tuple[str, str]:
    """The set's versions above every other pin, for dependencies that are not named, too, where they have one."""
    pins: Mapping[str, str] = wanted.wanted
    if wanted.version != "*":
        pins = {" ".join(wanted.members): wanted.version}
    return (
        f"/etc/apt/preferences.d/80-provision-{publisher.name}",
        "\n".join(
            f"Explanation: as the lock file says\nPackage: {names}\nPin: version {version}\nPin-Priority: 1001\n"
            for names, version in pins.items()
        ),
    )


def _dnf_path(publisher: Publisher) -> str:
    return f"/etc/yum.repos.d/provision-{publisher.name}.repo"


def _dnf_key(publisher: Publisher, sha256: str) -> str:
    return f"/etc/pki/rpm-gpg/RPM-GPG-KEY-provision-{publisher.name}-{sha256[:12]}"


def _dnf_entry(publisher: Publisher, address: str, key: str) -> str:
    return (
        f"[provision-{publisher.name}]\nname={publisher.title}\nbaseurl={address}\nenabled=1\ngpgcheck=1\n"
        f"repo_gpgcheck={int(publisher.signs_lists)}\ngpgkey=file://{key}\n"
    )


def _dnf_others(publisher: Publisher, addresses: Sequence[str], remove: bool) -> str:
    pattern = shlex.quote("|".join(_without_scheme(address) for address in addresses))
    find = (
        f"files=$(grep -lE {pattern} /etc/yum.repos.d/*.repo 2>/dev/null | grep -vx {_dnf_path(publisher)}); "
        '[ -n "$files" ] || exit 0; '
    )
    if not remove:
        return find + 'echo "also: $files" >&2; exit 1'
    return find + 'for f in $files; do mv --backup=numbered "$f" "$f.before-provision" || exit 1; done'


def _dnf_fetch(publisher: Publisher, address: str, sha256: str, within: str | None) -> str:
    """The key as it is, or as NVIDIA's own images take it: without the line that names the program that wrote it."""
    key = _dnf_key(publisher, sha256)
    return f"""t=$(mktemp) && trap 'rm -f "$t"' EXIT || exit 1
right() {{ echo '{sha256}  '"$t" | sha256sum -c --quiet "$@" - >&2; }}
curl -fsSL {shlex.quote(address)} >"$t" && {{ right --status || {{ sed -i '/^Version/d' "$t" && right; }}; }} &&
install -m 644 "$t" {key} && rpm --import {key}"""


def _dnf_hold(wanted: ExactSet) -> tuple[str, str]:
    names = [name for name, version in wanted.wanted.items() if version != "*"]
    entries = " ".join(shlex.quote(f"{name}-{wanted.wanted[name]}") for name in names)
    locked = " ".join(shlex.quote(f"^{name}-[0-9:]*{wanted.wanted[name].rstrip('*')}") for name in names)
    return (
        f"have=$(dnf -q versionlock list) || exit 2; for e in {locked}; do "
        'printf \'%s\\n\' "$have" | grep -q "$e" || exit 1; done',
        f"dnf -q versionlock delete {' '.join(shlex.quote(f'{name}-*') for name in names)} >&2; "
        f"dnf -q -y versionlock add {entries}",
    )


def _dnf_stream(name: str) -> tuple[str, str]:
    return (
        f"dnf -q module list --enabled nvidia-driver 2>/dev/null | grep -q '^nvidia-driver  *{name} ' || exit 1",
        f"dnf -q -y module reset nvidia-driver && dnf -q -y module enable nvidia-driver:{name}",
    )


def apt(publisher: Publisher) -> RepositoryTools:
    return RepositoryTools(
        _apt_path(publisher),
        partial(_apt_key, publisher),
        _apt_entry,
        partial(apt_others, publisher),
        partial(_apt_fetch, publisher),
        pins=partial(_apt_pins, publisher),
    )


def dnf(publisher: Publisher) -> RepositoryTools:
    return RepositoryTools(
        _dnf_path(publisher),
        partial(_dnf_key, publisher),
        partial(_dnf_entry, publisher),
        partial(_dnf_others, publisher),
        partial(_dnf_fetch, publisher),
        hold=_dnf_hold,
        stream=_dnf_stream,
    )
