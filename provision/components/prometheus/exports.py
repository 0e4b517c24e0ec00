"""What monitoring is made of, from the site file alone: files, command lines, targets, ports."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import bcrypt
import yaml

from provision import packaged
from provision.components.certificates import exports as certificates
from provision.components.exported import Port, Scrape, scrapes
from provision.components.prometheus.settings import Alerts, Federation, MonitoringSettings, RemoteWrite
from provision.engine.deploy import Secret, render
from provision.site.hidden import reveal
from provision.site.models import Node, Site
from provision.site.names import bracketed

SERVER, ALERTMANAGER, GOSSIP, EXPORTER = 9090, 9093, 9094, 9100

PORTS = (
    Port(SERVER, "monitor", "Prometheus"),
    Port(ALERTMANAGER, "monitor", "Alertmanager"),
    Port(GOSSIP, "monitor", "Alertmanager among its peers"),
    Port(EXPORTER, "*", "node exporter"),
)
SCRAPE = (
    Scrape("node", "*", EXPORTER),
    Scrape("prometheus", "monitor", SERVER),
    Scrape("alertmanager", "monitor", ALERTMANAGER),
)

# Beside the packages' own files, which stay as they came: an upgrade then has nothing to ask.
CONFIG = "/etc/prometheus/provision.yml"
RULES = "/etc/prometheus/rules"
RUNBOOKS = "docs/runbooks"  # in this project's documentation
ALERTMANAGER_CONFIG = "/etc/prometheus/provision-alertmanager.yml"
PEERS = "/etc/prometheus/provision-peers.yml"
PASSWORD = "/etc/prometheus/provision-password"
CURL = "/etc/provision/monitoring.curl"  # root's: by it curl knows password and authority

CERTIFICATE_END = "certificate.prom"  # in the node exporter's folder
CERTIFICATE_END_SCRIPT = (
    f"e=$(openssl x509 -in {certificates.CERTIFICATE} -noout -enddate) && "
    'printf \'provision_certificate_end_seconds %s\\n\' "$(date -d "${e#notAfter=}" +%s)"'
)

USER = "provision"
SECRETS = (Secret("monitoring.password", make=lambda: secrets.token_urlsafe(32).encode()),)


def host_port(node: Node, port: int) -> str:
    """Where others reach `port` of `node`: its address in the site file, its name where it has none."""
    return f"{bracketed(node.address or node.name)}:{port}"


def listen(node: Node, port: int) -> str:
    """The address to listen on: the management address alone.

    A node without an address in the site file is known by a name that DNS resolves, and its own hosts file
    may give that name to the loopback: it listens on all addresses, and the firewall closes what is too much.
    """
    return host_port(node, port) if node.address else f":{port}"


def url(node: Node, port: int) -> str:
    """The base URL of a service as it is reached on the node itself."""
    return f"https://{host_port(node, port)}" if node.address else f"https://localhost:{port}"


def web_config(unit: str) -> str:
    """The path of what `web_yml` says for a unit."""
    return f"/etc/prometheus/provision-web-{unit}.yml"


def web_yml(unit: str, password: bytes) -> str:
    """How a service of the Prometheus family is reached: by TLS, by those who have the password."""
    _, key = certificates.credentials(unit)
    document = {
        "tls_server_config": {"cert_file": certificates.CERTIFICATE, "key_file": key, "min_version": "TLS12"},
        "basic_auth_users": {USER: hashed(password)},
    }
    return yaml.safe_dump(document, sort_keys=False)


@cache
def hashed(password: bytes) -> str:
    """bcrypt with a salt that follows from the password, so that the same file comes out again.

    The password is 256 random bits: neither a salt of its own nor more rounds would make it harder to guess.
    """
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    bcrypts = "./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    salt = base64.b64encode(hashlib.sha256(b"salt" + password).digest()[:16]).decode()[:22]
    return bcrypt.hashpw(
        password, f"$2b$04${salt.translate(str.maketrans(alphabet, bcrypts))}".encode()
    ).decode()


def curl_config(password: bytes) -> str:
    """A curl configuration that reaches every service of monitoring."""
    return f'user = "{USER}:{password.decode()}"\ncacert = "{certificates.AUTHORITY}"\n'


def _client() -> dict[str, Any]:
    """How Prometheus reaches services of this site."""
    return {
        "scheme": "https",
        "tls_config": {"ca_file": certificates.AUTHORITY},
        "basic_auth": {"username": USER, "password_file": PASSWORD},
    }


def peers_yml(unit: str) -> str:
    """How Alertmanagers tell each other what they have sent: by TLS, each with its certificate."""
    _, key = certificates.credentials(unit)
    pair = {"cert_file": certificates.CERTIFICATE, "key_file": key}
    document = {
        "tls_server_config": {
            **pair,
            "client_ca_file": certificates.AUTHORITY,
            "client_auth_type": "RequireAndVerifyClientCert",
        },
        "tls_client_config": {**pair, "ca_file": certificates.AUTHORITY},
    }
    return yaml.safe_dump(document, sort_keys=False)


def targets(site: Site) -> dict[str, list[dict[str, Any]]]:
    """Job -> target groups as Prometheus' file discovery reads them, of everything that components export.

    Every node of the site file is a target, whether it is up today or not.
    """
    jobs: dict[str, list[dict[str, Any]]] = {}
    for scrape in scrapes(site):
        jobs.setdefault(scrape.job, []).extend(
            {
                "targets": [host_port(node, scrape.port)],
                "labels": {
                    "instance": f"{node.name}:{scrape.port}",
                    "node": node.name,
                    "group": node.group,
                },
            }
            for node in site.with_role(scrape.role)
        )
    return jobs


def targets_path(job: str) -> str:
    return f"/etc/prometheus/targets/{job}.json"


def targets_json(groups: Sequence[dict[str, Any]]) -> str:
    """The content of `targets_path`."""
    return json.dumps(groups, indent=1) + "\n"


def expected_targets(site: Site) -> set[tuple[str, str]]:
    """(job, instance) of every target that a server of this site must scrape, and no other."""
    return {(job, group["labels"]["instance"]) for job, groups in targets(site).items() for group in groups}


def prometheus_yml(site: Site, node: Node, settings: MonitoringSettings) -> str:
    """The server's configuration on `node`, with its secrets in clear text: write it as a secret.

    Raises SecretMissing when a file or variable that the site file names is not there.
    """
    monitors = site.with_role("monitor")
    paths: dict[str, str] = {}
    for scrape in scrapes(site):
        if paths.setdefault(scrape.job, scrape.path) != scrape.path:
            raise ValueError(f"scrape job {scrape.job}: two paths, {paths[scrape.job]} and {scrape.path}")
    external = {"cluster": site.cluster}
    if len(monitors) > 1:
        external["replica"] = node.name
    document: dict[str, Any] = {
        "global": {
            "scrape_interval": settings.interval,
            "evaluation_interval": settings.interval,
            "external_labels": external,
        },
        "rule_files": ["/etc/prometheus/rules/*.yml"],
        "alerting": {
            # Without this the same alert from two servers would be two alerts.
            "alert_relabel_configs": [{"regex": "replica", "action": "labeldrop"}],
            "alertmanagers": [
                {
                    **_client(),
                    "static_configs": [{"targets": [host_port(each, ALERTMANAGER) for each in monitors]}],
                }
            ],
        },
        "scrape_configs": [
            {
                "job_name": job,
                "metrics_path": path,
                **_client(),
                "file_sd_configs": [{"files": [targets_path(job)]}],
                # What Slurm says on the head is about other nodes.
                "metric_relabel_configs": [
                    {"source_labels": ["slurm_node"], "regex": "(.+)", "target_label": "node"},
                    {"regex": "slurm_node", "action": "labeldrop"},
                ],
            }
            for job, path in sorted(paths.items())
        ]
        + [
            {
                "job_name": f"federate-{other.server}",
                "scheme": other.scheme,
                "honor_labels": True,
                "metrics_path": "/federate",
                "params": {"match[]": other.match},
                "static_configs": [{"targets": [other.server]}],
                **_reached(site, other, f"monitoring.federation.{index}.password"),
            }
            for index, other in enumerate(settings.federation)
        ],
    }
    if settings.remote_write:
        document["remote_write"] = [
            {"url": other.url, **_reached(site, other, f"monitoring.remote_write.{index}.password")}
            for index, other in enumerate(settings.remote_write)
        ]
    return yaml.safe_dump(document, sort_keys=False)


def _reached(site: Site, other: RemoteWrite | Federation, key: str) -> dict[str, Any]:
    """How to trust another server and log in there; nothing where everybody knows it and it takes everybody."""
    trust = {"tls_config": {"ca_file": other.authority}} if other.authority else {}
    if other.user is None:
        return trust
    login = {"username": other.user}
    if other.password:
        login["password"] = reveal(site, other.password, key)
    return {**trust, "basic_auth": login}


def runbook(file: str, alert: str) -> str:
    """Where an alert of a file of rules is explained."""
    return f"{RUNBOOKS}/{file}.md#{alert.lower()}"


_RULES = "provision.components.prometheus.rules"


@cache
def rule_groups() -> dict[str, list[dict[str, Any]]]:
    """Name of a file of rules -> its groups, as Prometheus reads them; every alert says where its runbook is."""
    names = sorted(each.name for each in files(_RULES).iterdir() if each.name.endswith(".yml"))
    found = {name.removesuffix(".yml"): packaged.data(_RULES, name)["groups"] for name in names}
    for name, groups in found.items():
        for rule in alerts(groups):
            rule["annotations"]["runbook"] = runbook(name, rule["alert"])
    return found


def alerts(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules of `groups` that are alerts."""
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@cache
def rules() -> dict[str, str]:
    """Path on a monitor -> text, of every file of rules."""
    return {
        f"{RULES}/provision-{name}.yml": yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)
        for name, groups in rule_groups().items()
    }


def expected_rules() -> dict[str, set[str]]:
    """Group -> names of its alerts, where it has any."""
    return {
        group["name"]: {rule["alert"] for rule in alerts([group])}
        for groups in rule_groups().values()
        for group in groups
    }


def alertmanager_yml(site: Site, settings: MonitoringSettings) -> str:
    """Alertmanager's configuration, with its secrets in clear text: write it as a secret.

    Raises SecretMissing when a file or variable that the site file names is not there.
    """
    receiver = _receiver(site, settings.alerts)
    document: dict[str, Any] = {
        "route": {
            "receiver": receiver["name"],
            "group_by": ["alertname", "cluster"],
            "group_wait": "10s",
            "group_interval": "30s",
            "repeat_interval": settings.alerts.repeat,
            "routes": [{"receiver": "nobody", "matchers": ['severity="none"']}],
        },
        "inhibit_rules": [
            # A node that is down is one alert, not one for each thing on it.
            {
                "source_matchers": ['alertname="NodeDown"'],
                "target_matchers": ['alertname!="NodeDown"'],
                "equal": ["cluster", "node"],
            },
            # A node that this tool works on is silent, as long as it does and no longer.
            {
                "source_matchers": ['alertname="NodeUnderMaintenance"'],
                "target_matchers": ['alertname!="NodeUnderMaintenance"'],
                "equal": ["cluster", "node"],
            },
        ],
        "receivers": [receiver, {"name": "nobody"}],
    }
    return yaml.safe_dump(document, sort_keys=False)


def _receiver(site: Site, alerts: Alerts) -> dict[str, Any]:
    receiver: dict[str, Any] = {"name": "site"}
    if alerts.webhook:
        url = reveal(site, alerts.webhook, "monitoring.alerts.webhook")
        receiver["webhook_configs"] = [{"url": url, "send_resolved": True}]
    if alerts.slack:
        url = reveal(site, alerts.slack.url, "monitoring.alerts.slack.url")
        receiver["slack_configs"] = [{"api_url": url, "channel": alerts.slack.channel, "send_resolved": True}]
    if alerts.mail:
        mail: dict[str, Any] = {
            "to": ", ".join(alerts.mail.to),
            "from": alerts.mail.sender,
            "smarthost": alerts.mail.smarthost,
            "require_tls": alerts.mail.require_tls,
            "send_resolved": True,
        }
        if alerts.mail.user:
            mail["auth_username"] = alerts.mail.user
        if alerts.mail.password:
            mail["auth_password"] = reveal(site, alerts.mail.password, "monitoring.alerts.mail.password")
        receiver["email_configs"] = [mail]
    return receiver


def server_dropin(binary: str, data: str, unit: str, node: Node, settings: MonitoringSettings) -> str:
    """The systemd drop-in that starts the server with this configuration."""
    words = [
        binary,
        f"--config.file={CONFIG}",
        f"--storage.tsdb.path={data}",
        f"--storage.tsdb.retention.time={settings.retention}",
        *([f"--storage.tsdb.retention.size={settings.retention_size}"] if settings.retention_size else []),
        f"--web.config.file={web_config(unit)}",
        f"--web.listen-address={listen(node, SERVER)}",
    ]
    return _dropin(unit, words)


def alertmanager_dropin(binary: str, data: str, unit: str, site: Site, node: Node) -> str:
    """The systemd drop-in of Alertmanager; several monitors tell each other what they have sent."""
    peers = [other for other in site.with_role("monitor") if other.name != node.name]
    words = [
        binary,
        f"--config.file={ALERTMANAGER_CONFIG}",
        f"--storage.path={data}",
        f"--web.config.file={web_config(unit)}",
        f"--web.listen-address={listen(node, ALERTMANAGER)}",
        f"--cluster.listen-address={listen(node, GOSSIP) if peers else ''}",
        *([f"--cluster.tls-config={PEERS}"] if peers else []),
        *(f"--cluster.peer={host_port(peer, GOSSIP)}" for peer in peers),
    ]
    return _dropin(unit, words)


_UNITS = (
    "ssh|sshd|munge|slurmd|slurmctld|slurmdbd|slurmrestd|mariadb|chrony|chronyd|docker|containerd|"
    "nvidia-.+|prometheus.*|grafana-server|systemd-journal-(upload|remote)|loki|alloy|filebeat|elasticsearch|kibana|provision-.+"
)


def exporter_dropin(
    binary: str,
    textfiles: str,
    unit: str,
    option: str,
    node: Node,
    storage: Sequence[str],
    *,
    fabric: bool,
    clock: bool,
) -> str:
    """The systemd drop-in of the node exporter; `option` is how its release spells --web.config.file.

    `storage` are the units of shared file systems; where there is no `fabric`, or no `clock` of its own, the collector
    would only complain.
    """
    units = "|".join([f"({_UNITS})[.](service|timer)", *(re.escape(each) for each in storage)])
    return _dropin(
        unit,
        [
            binary,
            f"{option}={web_config(unit)}",
            f"--web.listen-address={listen(node, EXPORTER)}",
            f"--collector.textfile.directory={textfiles}",
            "--collector.systemd",
            "--collector.systemd.enable-start-time-metrics",
            # systemd wants its own signs written twice
            f"'--collector.systemd.unit-include=^({units})$'".replace("\\", "\\\\").replace("$", "$$"),
            *([] if fabric else ["--no-collector.infiniband"]),
            *([] if clock else ["--no-collector.timex"]),
        ],
    )


def _dropin(unit: str, words: Sequence[str]) -> str:
    credential, _ = certificates.credentials(unit)
    return render("prometheus", "dropin.conf.j2", command=" \\\n  ".join(words), credential=credential)
