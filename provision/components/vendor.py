"""Repositories of vendors, each trusted by its own key alone. Distributions say where entry and key are."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from provision.engine import ops
from provision.engine.deploy import Context


@dataclass(frozen=True)
class Vendor:
    """Who makes packages: `name` begins its names in profiles/distributions.yml."""

    name: str
    key_url: str
    fingerprint: str  # of the primary key


# Grafana documentation, "Install Grafana on Debian or Ubuntu": Grafana, Loki and Alloy.
GRAFANA = Vendor("grafana", "https://apt.grafana.com/gpg.key", "B53AE77BADB630A683046005963FA27710458545")
# Elastic documentation, Beats, "Repositories for APT and YUM".
ELASTIC = Vendor(
    "elastic",
    "https://artifacts.elastic.co/GPG-KEY-elasticsearch",
    "46095ACC8548582C1A2699A9D27D666CD88E42B4",
)


def repository(on: Context, vendor: Vendor) -> None:
    """The vendor's repository on this node."""
    source, text, key = (on.profile.path(f"{vendor.name}.{part}") for part in ("source", "entry", "key"))
    ops.packages(*on.profile.packages("vendor-repository"))
    ops.ensure(
        f"key of {vendor.name}",
        test=key_test(vendor, key),
        make=key_make(vendor, key),
        requires="gpg",
        owns=(key,),
    )
    ops.file(source, text)


def key_test(vendor: Vendor, path: str) -> str:
    """Shell: exits 0 when the file at `path` holds the vendor's key and no other."""
    return (
        f'[ -s {quote(path)} ] && [ "$(gpg --show-keys --with-colons {quote(path)} | awk -F: '
        f'\'$1 == "pub" {{ p = 1 }} $1 == "fpr" && p {{ print $10; p = 0 }}\')" = {vendor.fingerprint} ] || exit 1'
    )


def key_make(vendor: Vendor, path: str) -> str:
    """Shell: fetches the key; one with another fingerprint never arrives."""
    new = f"{path}.new"
    return (
        f"set -e; umask 022; curl --fail --silent --show-error --location --max-time 60 --output {quote(new)} "
        f"{vendor.key_url}; ( {key_test(vendor, new)} ) || {{ echo 'the key at {vendor.key_url} is not "
        f"{vendor.fingerprint}' >&2; rm -f {quote(new)}; exit 1; }}; mv -f {quote(new)} {quote(path)}"
    )
