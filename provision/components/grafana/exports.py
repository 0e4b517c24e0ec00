"""What Grafana is made of, from the site file alone."""

from __future__ import annotations

import secrets as random
from typing import Any

import yaml

from provision.components.certificates import exports as certificates
from provision.components.exported import Port
from provision.components.grafana.dashboards import DASHBOARDS, build
from provision.components.grafana.settings import GrafanaSettings
from provision.components.logs import exports as logs
from provision.components.logs import loki
from provision.components.prometheus import exports as prometheus
from provision.engine.deploy import Secret
from provision.site.models import Node, Site
from provision.site.names import bracketed

PORTS = (Port(3000, "monitor", "Grafana"),)
SECRETS = (Secret("grafana.password", make=lambda: random.token_urlsafe(24).encode()),)

UNIT = "grafana-server"
PASSWORD = "/etc/provision/grafana-password"
DASHBOARD_FOLDER = "/etc/grafana/provision"
DATASOURCE = "/etc/grafana/provisioning/datasources/provision.yml"
PROVIDER = "/etc/grafana/provisioning/dashboards/provision.yml"
DROPIN = f"/etc/systemd/system/{UNIT}.service.d/provision.conf"


def first_monitor(site: Site) -> Node:
    return site.with_role("monitor")[0]


def settings(site: Site) -> GrafanaSettings:
    found = site.section("grafana")
    assert isinstance(found, GrafanaSettings)
    return found


def dashboards() -> dict[str, str]:
    """Path -> JSON of every dashboard."""
    return {f"{DASHBOARD_FOLDER}/{page.uid}.json": build(page) for page in DASHBOARDS}


def provider_yml() -> str:
    """Tells Grafana to read `dashboards`, and to let nobody change them in the browser."""
    document = {
        "apiVersion": 1,
        "providers": [
            {
                "name": "provision",
                "folder": "provision",
                "type": "file",
                "allowUiUpdates": False,
                "options": {"path": DASHBOARD_FOLDER},
            }
        ],
    }
    return yaml.safe_dump(document, sort_keys=False)


def datasource_yml(site: Site, node: Node, password: bytes) -> str:
    """How Grafana asks Prometheus, with the password in clear text: write it as a secret. Loki, where there is one."""
    document = {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "uid": "provision-prometheus",
                "type": "prometheus",
                "access": "proxy",
                "isDefault": True,
                "url": prometheus.url(node, prometheus.SERVER),
                "basicAuth": True,
                "basicAuthUser": prometheus.USER,
                "jsonData": {"tlsAuthWithCACert": True, "httpMethod": "POST"},
                "secureJsonData": {
                    "basicAuthPassword": password.decode(),
                    "tlsCACert": f"$__file{{{certificates.AUTHORITY}}}",
                },
            },
            *_loki(site),
        ],
    }
    return yaml.safe_dump(document, sort_keys=False)


def _loki(site: Site) -> list[dict[str, Any]]:
    """Grafana documentation, "Configure the Loki data source", "Provision the data source"."""
    to = logs.collector(site)
    if to is None or not logs.by_loki(site):
        return []
    _, key = certificates.credentials(UNIT)
    return [
        {
            "name": "Loki",
            "uid": "provision-loki",
            "type": "loki",
            "access": "proxy",
            "url": loki.url(to),
            "jsonData": {"tlsAuth": True, "tlsAuthWithCACert": True},
            "secureJsonData": {
                "tlsCACert": f"$__file{{{certificates.AUTHORITY}}}",
                "tlsClientCert": f"$__file{{{certificates.CERTIFICATE}}}",
                "tlsClientKey": f"$__file{{{key}}}",
            },
        }
    ]


def dropin(node: Node, chosen: GrafanaSettings) -> str:
    """The systemd drop-in: settings in the environment win over grafana.ini, which stays as it came."""
    credential, key = certificates.credentials(UNIT)
    host = bracketed(node.address or node.name)
    environment = {
        "GF_SERVER_PROTOCOL": "https",
        "GF_SERVER_HTTP_ADDR": node.address or "",
        "GF_SERVER_HTTP_PORT": str(chosen.port),
        "GF_SERVER_ROOT_URL": chosen.url or f"https://{host}:{chosen.port}/",
        "GF_SERVER_CERT_FILE": certificates.CERTIFICATE,
        "GF_SERVER_CERT_KEY": key,
        "GF_SECURITY_ADMIN_PASSWORD__FILE": f"/run/credentials/{UNIT}.service/password",
        "GF_SECURITY_COOKIE_SECURE": "true",
        "GF_AUTH_ANONYMOUS_ENABLED": "false",
        "GF_USERS_ALLOW_SIGN_UP": "false",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
    }
    lines = [f'Environment="{name}={value}"' for name, value in environment.items()]
    return "\n".join(["[Service]", credential, f"LoadCredential=password:{PASSWORD}", *lines, ""])
