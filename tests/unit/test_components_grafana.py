"""Grafana: what is rendered, and what its dashboards are made of."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as schema
from pydantic import ConfigDict, TypeAdapter, ValidationError

from provision.components import vendor
from provision.components.grafana import exports
from provision.components.grafana.dashboards import DASHBOARDS, Dashboard, build
from provision.site.models import Site, SiteFile


def make_site(tmp_path: Path, **grafana: Any) -> Site:
    document: dict[str, Any] = {
        "cluster": "tiny",
        "groups": {"head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head", "monitor"]}},
        "monitoring": {"grafana": grafana},
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def test_grafana_is_reached_by_tls_and_login_alone(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    dropin = exports.dropin(site.head, exports.settings(site))
    assert 'Environment="GF_SERVER_PROTOCOL=https"\n' in dropin
    assert 'Environment="GF_AUTH_ANONYMOUS_ENABLED=false"\n' in dropin
    assert 'Environment="GF_SERVER_ROOT_URL=https://192.0.2.1:3000/"\n' in dropin
    assert "password:/etc/provision/grafana-password\n" in dropin


def test_grafana_asks_prometheus_with_the_clusters_password(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    (source,) = yaml.safe_load(exports.datasource_yml(site, site.head, b"pw"))["datasources"]
    assert source["url"] == "https://192.0.2.1:9090"
    assert source["secureJsonData"]["basicAuthPassword"] == "pw"
    assert source["secureJsonData"]["tlsCACert"] == "$__file{/etc/provision/tls/ca.crt}"


@pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page.uid)
def test_a_dashboard_has_what_grafana_needs(page: Dashboard) -> None:
    document = json.loads(build(page))
    assert (document["uid"], document["title"]) == (page.uid, page.title)
    assert document["editable"] is False
    names = {variable["name"] for variable in document["templating"].get("list", ())}
    assert names == ({"node"} if page.per_node else set())
    for shown, panel in zip(document["panels"], page.panels, strict=True):
        assert shown["title"] == panel.title
        assert shown["datasource"]["uid"] == "provision-prometheus"
        assert [target["expr"] for target in shown["targets"]] == [expr for expr, _ in panel.queries]
        assert page.per_node or all("$node" not in expr for expr, _ in panel.queries)
        assert 0 < shown["gridPos"]["w"] <= 24


def contains(there: Any, wanted: Any) -> bool:
    """Whether `there` has all of `wanted`, at any depth."""
    if isinstance(wanted, dict):
        return all(key in there and contains(there[key], value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(there) == len(wanted) and all(map(contains, there, wanted))
    return bool(there == wanted)


def strangers(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Values that Grafana's schema, of which the SDK's classes are made, has not at their place."""
    if isinstance(value, list) and any(hasattr(each, "to_json") for each in value):
        for index, each in enumerate(value):
            yield from strangers(each, hint, f"{place}[{index}]")
    elif hasattr(value, "to_json"):
        for name, inner in get_type_hints(type(value)).items():
            yield from strangers(getattr(value, name), inner, f"{place}.{name}")
    else:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        try:
            adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            yield f"{place}: {error}"


@pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page.uid)
def test_a_dashboard_is_of_grafanas_schema(page: Dashboard) -> None:
    """Read by the schema's own classes every key comes back, and every value is of the kind that it must be."""
    register_default_plugins()
    document = json.loads(build(page))
    read = schema.Dashboard.from_json(document)
    assert contains(json.loads(JSONEncoder().encode(read)), document)
    assert list(strangers(read, Any, page.uid)) == []


def test_what_is_not_of_the_schema_is_seen() -> None:
    register_default_plugins()
    document = json.loads(build(DASHBOARDS[0]))
    document["panels"][0]["gridPos"]["w"] = "wide"
    document["panels"][0]["titel"] = "misspelt"
    read = schema.Dashboard.from_json(document)
    assert not contains(json.loads(JSONEncoder().encode(read)), document)
    (stranger,) = strangers(read, Any, "page")
    assert stranger.startswith("page.panels[0].grid_pos.w: ")


def test_a_dashboard_comes_out_the_same_each_time() -> None:
    assert exports.dashboards() == exports.dashboards()
    assert len({page.uid for page in DASHBOARDS}) == len(DASHBOARDS)


def test_a_key_with_another_fingerprint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not a key")
    done = subprocess.run(
        ["sh", "-c", vendor.key_test(vendor.GRAFANA, str(tmp_path / "key"))], capture_output=True, check=False
    )
    assert done.returncode == 1
