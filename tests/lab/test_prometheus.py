"""Monitoring on real nodes: it comes up, hand edits are seen and mended, and every check can fail and can be unsure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from provision.components.certificates import exports as certificates
from provision.components.prometheus import exports
from provision.components.prometheus.settings import MonitoringSettings
from provision.engine.controller import converge
from provision.engine.remote import connect
from provision.lab import Lab
from provision.report.model import Document, Verdict
from provision.site.load import find, load
from provision.site.lock import load_lock
from provision.site.models import Site
from provision.verify.run import verify

HEAD, WORKER = "lab-head", "lab-gpu-1"
RULE_TESTS = Path(__file__).parents[1] / "rules"


def bring_up(site: Site, *, forecast: bool = False) -> Document:
    verb = "plan" if forecast else "apply"
    return converge(
        site,
        list(site.nodes.values()),
        verb=verb,
        forecast=forecast,
        components=["certificates", "prometheus"],
        reboot=False,
    )


def changed(document: Document) -> dict[str, int]:
    return {name: result.changed for name, result in document.nodes.items() if result.changed}


def output_of(site: Site, node: str, command: str) -> str:
    shell = connect(site, site.nodes[node])
    try:
        output = shell.run(command)
    finally:
        shell.close()
    assert output.ok, f"{node}: {command}: {output.stderr}"
    return output.stdout


def on_node(site: Site, node: str, command: str) -> None:
    output_of(site, node, command)


def verdict_of(site: Site, node: str, check: str) -> tuple[Verdict, str]:
    findings = verify(site, load_lock(site), [site.nodes[node]], components=["prometheus"])
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding.verdict, f"{finding.read} {finding.why}"


def becomes(site: Site, node: str, check: str, wanted: Verdict, within: float = 60) -> None:
    """A server scrapes and evaluates now and then: what was changed shows after a while."""
    deadline = time.monotonic() + within
    while True:
        verdict, words = verdict_of(site, node, check)
        if verdict is wanted:
            return
        assert time.monotonic() < deadline, f"{node}: {check} is {verdict} ({words}), expected {wanted}"
        time.sleep(2)


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[Site]:
    cluster = load(find("inventories/lab.yml"))
    document = bring_up(cluster)
    assert document.verdict is Verdict.PASS, document.findings
    yield cluster
    assert bring_up(cluster).verdict is Verdict.PASS


def test_a_second_apply_changes_nothing(site: Site) -> None:
    assert changed(bring_up(site)) == {}


def test_every_target_of_the_site_is_up_and_all_checks_pass(site: Site) -> None:
    becomes(site, HEAD, "prometheus-targets-up", Verdict.PASS)
    findings = verify(site, load_lock(site), list(site.nodes.values()), components=["prometheus"])
    assert {finding.verdict for finding in findings} == {Verdict.PASS}, findings
    assert {finding.subject for finding in findings} == set(site.nodes)


# node, what a hand does there, what of it plan and apply must name
EDITS = [
    (HEAD, "sed -i 's/15s/16s/' /etc/prometheus/provision.yml", "file /etc/prometheus/provision.yml"),
    (
        HEAD,
        "chmod 666 /etc/prometheus/rules/provision-gpus.yml",
        "file /etc/prometheus/rules/provision-gpus.yml",
    ),
    (HEAD, "chown prometheus /etc/prometheus/targets/node.json", "file /etc/prometheus/targets/node.json"),
    (
        HEAD,
        "chmod 644 /etc/prometheus/provision-alertmanager.yml",
        "file /etc/prometheus/provision-alertmanager.yml",
    ),
    (WORKER, "chmod 644 /etc/provision/monitoring.curl", "file /etc/provision/monitoring.curl"),
    (
        HEAD,
        "sed -i 's/30d/31d/' /etc/systemd/system/prometheus.service.d/provision.conf",
        "file /etc/systemd/system/prometheus.service.d/provision.conf",
    ),
    (HEAD, "systemctl disable prometheus-alertmanager", "unit prometheus-alertmanager.service"),
    (WORKER, "chmod 700 /var/lib/prometheus/node-exporter", "directory /var/lib/prometheus/node-exporter"),
    (
        WORKER,
        "rm /etc/systemd/system/prometheus-node-exporter.service.d/provision.conf",
        "file /etc/systemd/system/prometheus-node-exporter.service.d/provision.conf",
    ),
    ("lab-gpu-2", "systemctl stop prometheus-node-exporter", "unit prometheus-node-exporter.service"),
    (
        "lab-gpu-2",
        "dpkg --remove --force-depends prometheus-node-exporter",
        "install prometheus-node-exporter curl",
    ),
]


def test_hand_edits_are_shown_by_plan_and_mended_by_apply(site: Site) -> None:
    for node, edit, _ in EDITS:
        on_node(site, node, edit)
    edited = {(node, title) for node, _, title in EDITS}
    for forecast in (True, False):
        document = bring_up(site, forecast=forecast)
        assert document.verdict is Verdict.PASS, document.findings
        found = {(operation["node"], operation["title"]) for operation in document.details["operations"]}
        assert edited <= found
    assert changed(bring_up(site)) == {}


@dataclass(frozen=True)
class Broken:
    """How a check's subject and its source are broken, and by what the source is mended."""

    check: str
    node: str
    subject: str
    source: str
    mend: str
    subject_node: str | None = None  # where it is another one than the check's

    def __str__(self) -> str:
        return self.check


NO_CURL = "mv /usr/bin/curl /usr/bin/curl.away"
CURL = "mv /usr/bin/curl.away /usr/bin/curl"
NO_ALERTMANAGER = "systemctl stop prometheus-alertmanager"
RULES, CONFIG = "/etc/prometheus/rules/provision-nodes.yml", "/etc/prometheus/provision.yml"
WEB = "/etc/prometheus/provision-web-prometheus.yml"
EXTRA_TARGET = (
    'printf \'%s\' \'[{"targets": ["10.77.0.99:9100"], "labels": {"instance": "gone:9100"}}]\''
    " >/etc/prometheus/targets/node.json"
)

TABLE = [
    Broken("node-exporter-answers", WORKER, "systemctl stop prometheus-node-exporter", NO_CURL, CURL),
    Broken(
        "monitoring-refuses-strangers",
        HEAD,
        f"sed -i '/^basic_auth_users:/,$d' {WEB}; systemctl restart prometheus",
        NO_CURL,
        CURL,
    ),
    Broken(
        "prometheus-config-loaded",
        HEAD,
        f"echo 'no: such key' >>{CONFIG}; systemctl reload prometheus",
        NO_CURL,
        CURL,
    ),
    Broken(
        "alertmanager-config-loaded",
        HEAD,
        "echo 'no: such key' >>/etc/prometheus/provision-alertmanager.yml; systemctl reload prometheus-alertmanager",
        NO_CURL,
        CURL,
    ),
    Broken("prometheus-targets", HEAD, EXTRA_TARGET, NO_CURL, CURL),
    Broken(
        "prometheus-targets-up",
        HEAD,
        "systemctl stop prometheus-node-exporter",
        NO_CURL,
        CURL,
        subject_node=WORKER,
    ),
    Broken(
        "prometheus-rules",
        HEAD,
        f"echo 'groups: []' >{RULES}; systemctl reload prometheus",
        NO_CURL,
        CURL,
    ),
    Broken("alertmanager-receives", HEAD, NO_ALERTMANAGER, NO_CURL, CURL),
]


def test_every_check_stands_in_the_table() -> None:
    from provision.components import registry

    assert {check.name for check in registry.checks("prometheus")} == {broken.check for broken in TABLE}


@pytest.mark.parametrize("broken", TABLE, ids=str)
def test_a_check_fails_when_its_subject_is_broken_and_is_unsure_when_its_source_is(
    site: Site, broken: Broken
) -> None:
    becomes(site, broken.node, broken.check, Verdict.PASS)
    on_node(site, broken.subject_node or broken.node, broken.subject)
    becomes(site, broken.node, broken.check, Verdict.FAIL)
    assert bring_up(site).verdict is Verdict.PASS
    becomes(site, broken.node, broken.check, Verdict.PASS)
    on_node(site, broken.node, broken.source)
    becomes(site, broken.node, broken.check, Verdict.UNKNOWN)
    on_node(site, broken.node, broken.mend)
    becomes(site, broken.node, broken.check, Verdict.PASS)


def test_a_wrong_password_and_plain_http_are_refused(site: Site) -> None:
    """From another node, as somebody would try it."""
    ask = "curl -sS --noproxy '*' -o /dev/null -w '%{http_code}' --cacert /etc/provision/tls/ca.crt"
    server, exporter, alertmanager = (
        exports.host_port(site.head, port)  # names are base's, which is not here
        for port in (exports.SERVER, exports.EXPORTER, exports.ALERTMANAGER)
    )
    tried = {
        f"{ask} --config /etc/provision/monitoring.curl https://{server}/metrics": "200",
        f"{ask} https://{server}/metrics": "401",
        f"{ask} --user provision:wrong https://{exporter}/metrics": "401",
        f"{ask} http://{alertmanager}/metrics": "400",
    }
    assert {command: output_of(site, WORKER, command) for command in tried} == tried


def as_installed(file: Path) -> str:
    """A test of rules, of the file on a monitor: there every alert also says where its runbook is."""
    document = yaml.safe_load(file.read_text())
    document["rule_files"] = [f"{exports.RULES}/provision-{file.stem}.yml"]
    for group in document["tests"]:
        for expected in group.get("alert_rule_test", ()):
            for alert in expected.get("exp_alerts", ()):
                alert["exp_annotations"]["runbook"] = exports.runbook(file.stem, expected["alertname"])
    return yaml.safe_dump(document, width=1000)


@pytest.mark.parametrize("file", sorted(RULE_TESTS.glob("*.yml")), ids=lambda file: file.stem)
def test_installed_rules_do_what_their_tests_say(site: Site, file: Path) -> None:
    path = f"/tmp/test-{file.name}"
    on_node(
        site,
        HEAD,
        f"cat >{path} <<'EOF'\n{as_installed(file)}EOF\npromtool test rules {path}; rc=$?; rm {path}; exit $rc",
    )


# ---- servers and receivers outside of the cluster, stood in for on the head's loopback

HOOK, MAIL, ALERTMANAGER, FEDERATED, STORE = 19180, 19125, 19193, 19190, 19191
FOLDER = "/tmp/outside"
HEARD = f"{FOLDER}/heard"

LISTENER = f"""import http.server, socketserver, threading
heard = open({HEARD!r}, "ab", buffering=0)
class Hook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        heard.write(self.path.encode() + b" " + self.rfile.read(int(self.headers["Content-Length"])) + b"\\n")
        self.send_response(200)
        self.end_headers()
class Mail(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"220 here\\r\\n")
        text = False
        for line in self.rfile:
            if text and line != b".\\r\\n":
                heard.write(b"/mail " + line)
                continue
            word = line[:4].upper()
            self.wfile.write({{b"DATA": b"354 go on", b"QUIT": b"221 bye"}}.get(word, b"250 well") + b"\\r\\n")
            text = word == b"DATA"
            if word == b"QUIT":
                return
mail = socketserver.ThreadingTCPServer(("127.0.0.1", {MAIL}), Mail)
threading.Thread(target=mail.serve_forever, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", {HOOK}), Hook).serve_forever()
"""


@pytest.fixture
def outside(site: Site) -> Iterator[Callable[[str, str], None]]:
    """Runs a command on the head as a unit of this name, until the test is over."""
    started: list[str] = []

    def run(name: str, command: str) -> None:
        started.append(f"outside-{name}")
        on_node(site, HEAD, f"systemd-run --quiet --collect --unit=outside-{name} {command}")

    on_node(site, HEAD, f"mkdir -p {FOLDER}")
    yield run
    on_node(site, HEAD, f"systemctl stop {' '.join(started)}; rm -r {FOLDER}")


def write(site: Site, name: str, text: str) -> str:
    on_node(site, HEAD, f"umask 077; cat >{FOLDER}/{name} <<'EOF'\n{text}EOF")
    return f"{FOLDER}/{name}"


def says(site: Site, command: str, words: Collection[str], within: float = 60) -> None:
    """What a command prints on the head has all of these words after a while."""
    deadline = time.monotonic() + within
    while missing := [word for word in words if word not in (read := output_of(site, HEAD, command))]:
        assert time.monotonic() < deadline, f"{command}: without {missing}: {read}"
        time.sleep(1)


def test_an_alert_reaches_every_receiver(site: Site, outside: Callable[[str, str], None]) -> None:
    chosen = {
        "webhook": f"http://127.0.0.1:{HOOK}/hook",
        "slack": {"url": f"http://127.0.0.1:{HOOK}/slack", "channel": "#gpu"},
        "mail": {
            "to": ["a@example.org"],
            "sender": "cluster@example.org",
            "smarthost": f"127.0.0.1:{MAIL}",
            "require_tls": False,
        },
    }
    settings = MonitoringSettings.model_validate({"alerts": chosen})
    config = write(site, "alertmanager.yml", exports.alertmanager_yml(site, settings))
    outside("listener", f"/usr/bin/python3 {write(site, 'listener.py', LISTENER)}")
    address = f"127.0.0.1:{ALERTMANAGER}"
    outside(
        "alertmanager",
        f"/usr/bin/prometheus-alertmanager --config.file={config} --storage.path={FOLDER}/alerts "
        f"--web.listen-address={address} --cluster.listen-address=",
    )
    says(site, f"curl -sS --retry 30 --retry-delay 1 --retry-connrefused http://{address}/-/ready", ["OK"])
    on_node(
        site,
        HEAD,
        f"amtool alert add --alertmanager.url=http://{address} alertname=Tried severity=warning node={WORKER}",
    )
    says(site, f"cat {HEARD}", ["/hook {", "/slack {", "#gpu", "/mail To: a@example.org", "Tried"])


def test_samples_come_from_another_cluster_and_go_to_a_store(
    site: Site, outside: Callable[[str, str], None]
) -> None:
    """One server takes samples of the cluster's own over, by TLS and password, and writes them to another."""
    password = output_of(site, HEAD, f"cat {exports.PASSWORD}")
    settings = MonitoringSettings.model_validate(
        {
            "interval": "5s",
            "federation": [
                {
                    "server": exports.host_port(site.head, exports.SERVER),
                    "match": ['up{job="node"}'],
                    "user": exports.USER,
                    "password": password,
                    "authority": certificates.AUTHORITY,
                }
            ],
            "remote_write": [{"url": f"http://127.0.0.1:{STORE}/api/v1/write"}],
        }
    )
    document = yaml.safe_load(exports.prometheus_yml(site, site.head, settings))
    jobs = [job for job in document["scrape_configs"] if job["job_name"].startswith("federate-")]
    federates = {**document, "scrape_configs": jobs, "alerting": {}, "rule_files": []}
    for name, port, config, options in (
        ("store", STORE, "{}\n", "--web.enable-remote-write-receiver"),
        ("federated", FEDERATED, yaml.safe_dump(federates), ""),
    ):
        path = write(site, f"{name}.yml", config)
        outside(
            name,
            f"/usr/bin/prometheus --config.file={path} --storage.tsdb.path={FOLDER}/{name} "
            f"--web.listen-address=127.0.0.1:{port} {options}",
        )
    ask = f"curl -sS --retry 30 --retry-delay 1 --retry-connrefused http://127.0.0.1:{STORE}/api/v1/query"
    nodes = [f'"node":"{node}"' for node in site.nodes]
    says(site, f"{ask} --data-urlencode 'query=up{{job=\"node\"}} == 1'", nodes)
