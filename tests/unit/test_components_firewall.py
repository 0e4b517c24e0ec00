"""The ruleset: who reaches a node from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from provision.components.firewall import checks, exports
from provision.components.firewall.settings import FirewallSettings
from provision.site.models import Site, SiteFile


def make_site(tmp_path: Path, firewall: dict[str, Any] | None = None, **document: Any) -> Site:
    groups = {
        "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head"]},
        "gpu": {"hosts": "g[1-2]", "addresses": "192.0.2.[11-12]", "roles": ["worker"]},
    }
    whole = {"cluster": "tiny", "groups": groups, "firewall": firewall or {}, **document}
    return Site.from_file(SiteFile.model_validate(whole), tmp_path / "tiny.yml")


def rules(site: Site, node: str) -> list[str]:
    return [line.strip() for line in exports.ruleset(site, site.nodes[node]).splitlines()]


def test_the_clusters_networks_reach_every_port(tmp_path: Path) -> None:
    site = make_site(
        tmp_path,
        {"trusted": ["2001:db8:1::/48", "203.0.113.9"]},
        networks={"management": ["192.0.2.0/24", "2001:db8::/64"]},
        nodes={"g1": {"addresses": {"fabric": "198.51.100.11"}}},
    )
    found = rules(site, "h1")
    assert 'ip saddr { 192.0.2.0/24, 198.51.100.11/32, 203.0.113.9/32 } accept comment "cluster"' in found
    assert 'ip6 saddr { 2001:db8::/64, 2001:db8:1::/48 } accept comment "cluster"' in found


def test_without_a_management_network_the_nodes_themselves_do(tmp_path: Path) -> None:
    assert exports.trusted(make_site(tmp_path), make_site(tmp_path).head) == (
        ["192.0.2.1/32", "192.0.2.11/32", "192.0.2.12/32"],
        [],
    )


def test_overlapping_networks_are_one(tmp_path: Path) -> None:
    site = make_site(tmp_path, {"trusted": ["192.0.2.128/25"]}, networks={"management": "192.0.2.0/24"})
    assert exports.trusted(site, site.head) == (["192.0.2.0/24"], [])


def test_ssh_is_always_open_and_so_is_the_session_that_loads_the_rules(tmp_path: Path) -> None:
    site = make_site(tmp_path, access={"port": 2222})
    found = rules(site, "g1")
    assert "ct state vmap { established : accept, related : accept, invalid : drop }" in found
    assert 'tcp dport 22 accept comment "ssh"' in found
    assert 'tcp dport 2222 accept comment "ssh"' in found


def test_ports_are_opened_by_number_range_or_a_components_name_for_them(tmp_path: Path) -> None:
    site = make_site(tmp_path, {"open": ["8443", "60000-60100/udp", "time"]})
    assert exports.openings(site, site.nodes["h1"])[1:] == [
        exports.Opening("8443", "tcp", "site file"),
        exports.Opening("60000-60100", "udp", "site file"),
        exports.Opening("123", "udp", "time"),
    ]
    assert not [opening for opening in exports.openings(site, site.nodes["g1"]) if opening.purpose == "time"]


def test_everything_else_is_dropped(tmp_path: Path) -> None:
    found = rules(make_site(tmp_path), "g1")
    assert "type filter hook input priority filter; policy drop;" in found
    assert [line for line in found if "dport" in line] == [
        'ip6 saddr fe80::/10 udp dport 546 accept comment "DHCPv6 client"',
        'tcp dport 22 accept comment "ssh"',
    ]


def test_only_our_own_table_is_replaced(tmp_path: Path) -> None:
    found = rules(make_site(tmp_path), "g1")
    assert [line for line in found if line.startswith(("table", "delete"))] == [
        "table inet provision {}",
        "delete table inet provision",
        "table inet provision {",
    ]
    assert not [line for line in found if "flush" in line]


def test_a_name_that_no_component_gives_a_port_is_a_problem(tmp_path: Path) -> None:
    (problem,) = exports.problems(make_site(tmp_path, {"open": ["tyme"]}))
    assert (problem.rule, problem.key, problem.nearest) == ("unknown-port", ("firewall", "open", 0), "time")


def test_nodes_whose_network_is_not_known_would_be_shut_out(tmp_path: Path) -> None:
    groups = {"head": {"hosts": "h1", "roles": ["head"]}, "gpu": {"hosts": "g1", "roles": ["worker"]}}
    (problem,) = exports.problems(make_site(tmp_path, groups=groups))
    assert problem.rule == "cluster-network"
    known = make_site(tmp_path, groups=groups, networks={"management": "192.0.2.0/24"})
    assert list(exports.problems(known)) == []


@pytest.mark.parametrize(
    "firewall",
    [
        {"open": ["0"]},
        {"open": ["70000"]},
        {"open": ["90-80"]},
        {"open": ["80/sctp"]},
        {"trusted": ["192.0.2.1/24"]},
    ],
)
def test_values_that_cannot_be_right_are_refused(firewall: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FirewallSettings.model_validate(firewall)


def test_a_rule_added_and_a_rule_lost_are_both_named() -> None:
    wanted = "table inet provision {\n  tcp dport 22 accept\n  udp dport 53 accept\n}\n"
    live = "table inet provision {\n  tcp dport 22 accept\n  tcp dport 23 accept\n}\n"
    assert checks.differences(wanted, live) == (["tcp dport 23 accept"], ["udp dport 53 accept"])
    assert checks.differences(wanted, wanted) == ([], [])
