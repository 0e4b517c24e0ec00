"""Monitoring: what is rendered from a site file, and how the servers' answers are read."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.components import exported, registry
from provision.components.exported import Port, Scrape, ports, scrapes
from provision.components.prometheus import checks, exports
from provision.components.prometheus.settings import MonitoringSettings
from provision.profiles import distribution
from provision.report.model import Verdict
from provision.site.hidden import SecretMissing
from provision.site.lock import Lock
from provision.site.models import Site, SiteFile
from provision.verify.check import Target

GROUPS: dict[str, Any] = {
    "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head", "monitor"]},
    "gpu": {"hosts": "g[1-2]", "addresses": "192.0.2.[11-12]", "roles": ["worker"]},
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what monitoring itself exports, whatever other components offer."""
    monkeypatch.setattr(exported, "COMPONENTS", {"prometheus": "monitoring"})


def make_site(tmp_path: Path, groups: dict[str, Any] | None = None, **monitoring: Any) -> Site:
    document = {"cluster": "tiny", "groups": groups or GROUPS, "monitoring": monitoring}
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def settings(site: Site) -> MonitoringSettings:
    return site.settings("prometheus", site.head, MonitoringSettings)


def test_every_node_of_the_site_file_is_a_target(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    node = exports.targets(site)["node"]
    assert [group["targets"] for group in node] == [
        ["192.0.2.1:9100"],
        ["192.0.2.11:9100"],
        ["192.0.2.12:9100"],
    ]
    assert node[2]["labels"] == {"instance": "g2:9100", "node": "g2", "group": "gpu"}
    assert exports.expected_targets(site) == {
        ("node", "h1:9100"),
        ("node", "g1:9100"),
        ("node", "g2:9100"),
        ("prometheus", "h1:9090"),
        ("alertmanager", "h1:9093"),
    }
    assert json.loads(exports.targets_json(node)) == node


def test_what_other_components_export_is_scraped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "SCRAPE", (*exports.SCRAPE, Scrape("gpu", "worker", 9400, "/gpu")))
    site = make_site(tmp_path)
    assert {instance for job, instance in exports.expected_targets(site) if job == "gpu"} == {
        "g1:9400",
        "g2:9400",
    }
    document = yaml.safe_load(exports.prometheus_yml(site, site.head, settings(site)))
    job = next(job for job in document["scrape_configs"] if job["job_name"] == "gpu")
    assert job["metrics_path"] == "/gpu"
    assert job["file_sd_configs"] == [{"files": ["/etc/prometheus/targets/gpu.json"]}]


def test_one_job_with_two_paths_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "SCRAPE", (Scrape("x", "*", 1, "/a"), Scrape("x", "*", 2, "/b")))
    site = make_site(tmp_path)
    with pytest.raises(ValueError, match="scrape job x: two paths"):
        exports.prometheus_yml(site, site.head, settings(site))


def test_a_component_that_is_not_named_exports_nothing(tmp_path: Path) -> None:
    document = {"cluster": "tiny", "groups": GROUPS}
    site = Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")
    assert list(ports(site)) == []
    assert list(scrapes(site)) == []
    assert Port(9100, "*", "node exporter") in set(ports(make_site(tmp_path)))


def test_servers_listen_on_the_management_address_alone(tmp_path: Path) -> None:
    site = make_site(tmp_path, retention="90d", retention_size="50GB")
    server = exports.server_dropin("/bin/prometheus", "/data", "prometheus", site.head, settings(site))
    assert "--web.listen-address=192.0.2.1:9090" in server
    assert "--storage.tsdb.retention.time=90d" in server
    assert "--storage.tsdb.retention.size=50GB" in server
    assert "ExecStart=\nExecStart=/bin/prometheus \\\n" in server
    exporter = exports.exporter_dropin(
        "/bin/e",
        "/t",
        "node-exporter",
        "--web.config",
        site.nodes["g1"],
        ["a-b.mount"],
        fabric=False,
        clock=False,
    )
    assert "|a\\\\-b\\\\.mount)$$'" in exporter, "a regular expression, written as systemd reads it"
    assert "--no-collector.infiniband" in exporter, "where there is none it would fail at every scrape"
    assert "--no-collector.timex" in exporter, "so would this one where the clock belongs to somebody else"
    assert "--web.listen-address=192.0.2.11:9100" in exporter
    assert "--web.config=/etc/prometheus/provision-web-node-exporter.yml" in exporter
    assert "LoadCredential=node.key:/etc/provision/tls/node.key" in exporter


def test_addresses_of_both_families_and_none(tmp_path: Path) -> None:
    groups = {
        "head": {"hosts": "h1", "addresses": "2001:db8::1", "roles": ["head", "monitor"]},
        "gpu": {"hosts": "g1", "roles": ["worker"]},
    }
    site = make_site(tmp_path, groups)
    assert exports.host_port(site.head, 9090) == "[2001:db8::1]:9090"
    assert exports.url(site.head, 9090) == "https://[2001:db8::1]:9090"
    assert exports.host_port(site.nodes["g1"], 9100) == "g1:9100"
    assert exports.listen(site.nodes["g1"], 9100) == ":9100"
    assert exports.url(site.nodes["g1"], 9100) == "https://localhost:9100"


def test_one_monitor_has_no_peers_two_know_each_other(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    alone = exports.alertmanager_dropin("/bin/a", "/d", "alertmanager", site, site.head)
    assert "--cluster.listen-address=\n" in alone
    assert "--cluster.peer" not in alone
    pair = {"head": {"hosts": "h[1-2]", "addresses": "192.0.2.[1-2]", "roles": ["head", "monitor"]}}
    site = make_site(tmp_path, pair)
    assert "--cluster.peer=192.0.2.2:9094" in exports.alertmanager_dropin(
        "/bin/a", "/d", "alertmanager", site, site.head
    )
    document = yaml.safe_load(exports.prometheus_yml(site, site.nodes["h2"], settings(site)))
    assert document["global"]["external_labels"] == {"cluster": "tiny", "replica": "h2"}
    receivers = document["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert receivers == ["192.0.2.1:9093", "192.0.2.2:9093"]


def test_a_service_speaks_tls_to_those_who_have_the_password() -> None:
    web = yaml.safe_load(exports.web_yml("prometheus", b"s3cret"))
    assert web["tls_server_config"]["key_file"] == "/run/credentials/prometheus.service/node.key"
    hashed = web["basic_auth_users"]["provision"]
    assert bcrypt.checkpw(b"s3cret", hashed.encode())
    assert not bcrypt.checkpw(b"s3cre", hashed.encode())
    assert exports.web_yml("prometheus", b"s3cret") == exports.web_yml("prometheus", b"s3cret")
    assert "s3cret" not in exports.web_yml("prometheus", b"s3cret")


def test_every_job_is_scraped_by_tls_with_the_password(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    document = yaml.safe_load(exports.prometheus_yml(site, site.head, settings(site)))
    reached = [*document["scrape_configs"], *document["alerting"]["alertmanagers"]]
    assert {each["scheme"] for each in reached} == {"https"}
    assert {each["basic_auth"]["password_file"] for each in reached} == {exports.PASSWORD}


def test_samples_go_to_and_come_from_other_servers(tmp_path: Path) -> None:
    site = make_site(
        tmp_path,
        remote_write=[{"url": "https://store.example/api/v1/write", "user": "lab", "password": "w0rd"}],
        federation=[
            {"server": "other.example:9090", "match": ['{job="node"}'], "authority": "/etc/ssl/other.pem"}
        ],
    )
    document = yaml.safe_load(exports.prometheus_yml(site, site.head, settings(site)))
    assert document["remote_write"] == [
        {"url": "https://store.example/api/v1/write", "basic_auth": {"username": "lab", "password": "w0rd"}}
    ]
    job = document["scrape_configs"][-1]
    assert (job["metrics_path"], job["honor_labels"]) == ("/federate", True)
    assert job["params"] == {"match[]": ['{job="node"}']}
    assert job["tls_config"] == {"ca_file": "/etc/ssl/other.pem"}
    assert "basic_auth" not in job


EVERYTHING: dict[str, Any] = {
    "alerts": {
        "webhook": "https://hook.example/x",
        "slack": {"url": "https://chat.example/T1", "channel": "#gpu"},
        "mail": {
            "to": ["a@example.org"],
            "sender": "cluster@example.org",
            "smarthost": "mail.example.org:587",
            "user": "cluster",
            "password": "pa55",
        },
    },
    "remote_write": [{"url": "https://store.example/api/v1/write", "user": "lab", "password": "w0rd"}],
    "federation": [
        {"server": "other.example:9090", "match": ['{job="node"}'], "authority": "/etc/ssl/ca.pem"}
    ],
}


def configurations(tmp_path: Path) -> dict[str, str]:
    """The command that checks a file -> the file, with every option that a site can name."""
    site = make_site(tmp_path, **EVERYTHING)
    return {
        "promtool check config --syntax-only": exports.prometheus_yml(site, site.head, settings(site)),
        "amtool check-config": exports.alertmanager_yml(site, settings(site)),
    }


@pytest.mark.parametrize("command", ["promtool check config --syntax-only", "amtool check-config"])
def test_the_programs_take_every_option(tmp_path: Path, command: str) -> None:
    program, *words = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here: the lab has it")
    path = tmp_path / "configuration.yml"
    path.write_text(configurations(tmp_path)[command])
    done = subprocess.run([program, *words, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_secrets_of_receivers_come_from_file_environment_or_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mail.secret").write_text("pa55\n")
    monkeypatch.setenv("CHAT_URL", "https://chat.example/T1")
    alerts = {
        "webhook": "https://hook.example/x",
        "slack": {"url": {"env": "CHAT_URL"}, "channel": "#gpu"},
        "mail": {
            "to": ["a@example.org", "b@example.org"],
            "sender": "cluster@example.org",
            "smarthost": "mail.example.org:587",
            "user": "cluster",
            "password": {"file": "mail.secret"},
        },
    }
    site = make_site(tmp_path, alerts=alerts)
    receiver, nobody = yaml.safe_load(exports.alertmanager_yml(site, settings(site)))["receivers"]
    assert nobody == {"name": "nobody"}
    assert receiver["webhook_configs"] == [{"url": "https://hook.example/x", "send_resolved": True}]
    assert receiver["slack_configs"][0]["api_url"] == "https://chat.example/T1"
    (mail,) = receiver["email_configs"]
    assert (mail["to"], mail["auth_password"]) == ("a@example.org, b@example.org", "pa55")
    assert "hook.example" not in repr(site.file)
    assert "hook.example" not in site.file.model_dump_json()


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ({"env": "NOT_SET_ANYWHERE"}, r"monitoring\.alerts\.webhook\.env: .* NOT_SET_ANYWHERE is not set"),
        ({"file": "none.secret"}, r"monitoring\.alerts\.webhook\.file: cannot read .*/none\.secret"),
        ({"file": "empty.secret"}, r"empty\.secret is empty"),
    ],
)
def test_a_secret_that_is_not_there_is_named(tmp_path: Path, hidden: dict[str, str], message: str) -> None:
    (tmp_path / "empty.secret").write_text("\n")
    site = make_site(tmp_path, alerts={"webhook": hidden})
    with pytest.raises(SecretMissing, match=message):
        exports.alertmanager_yml(site, settings(site))


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention": "30"},
        {"retention": "thirty days"},
        {"retention": ""},
        {"retention_size": "50"},
        {"interval": "15"},
        {"alerts": {"webhook": {}}},
        {"alerts": {"webhook": {"env": "A", "value": "b"}}},
        {"alerts": {"mail": {"to": [], "sender": "a@b", "smarthost": "m:25"}}},
        {"alerts": {"mail": {"to": ["a@b"], "sender": "a@b", "smarthost": "m"}}},
        {"alerts": {"pager": "x"}},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MonitoringSettings.model_validate(wrong)


def test_settings_survive_the_merge_with_a_node_s_own(tmp_path: Path) -> None:
    groups = {"head": GROUPS["head"] | {"settings": {"prometheus": {"retention": "7d"}}}}
    site = make_site(tmp_path, groups, retention="90d", alerts={"webhook": "https://hook.example/x"})
    found = settings(site)
    assert found.retention == "7d"
    assert found.alerts.webhook is not None
    assert found.alerts.webhook.value is not None
    assert found.alerts.webhook.value.get_secret_value() == "https://hook.example/x"


def alerts() -> list[dict[str, Any]]:
    groups = [group for text in exports.rules().values() for group in yaml.safe_load(text)["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_has_a_severity_and_a_summary_that_says_where() -> None:
    assert len(alerts()) >= 40
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()), "two alerts of one name"
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "none"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "runbook"}, rule["alert"]


def test_groups_of_rules_are_what_the_check_expects() -> None:
    expected = exports.expected_rules()
    assert {"NodeDown", "ClockSkew"} <= expected["provision-nodes"]
    assert expected["provision-recording"] == set()
    assert sum(len(names) for names in expected.values()) == len(alerts())


def test_a_node_that_this_tool_works_on_is_silent(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    document = yaml.safe_load(exports.alertmanager_yml(site, settings(site)))
    sources = {tuple(rule["source_matchers"]) for rule in document["inhibit_rules"]}
    assert ('alertname="NodeUnderMaintenance"',) in sources
    assert {tuple(rule["equal"]) for rule in document["inhibit_rules"]} == {("cluster", "node")}
    assert document["route"]["routes"] == [{"receiver": "nobody", "matchers": ['severity="none"']}]


METRICS = """\
# HELP node_textfile_scrape_error 1 if there was an error
# TYPE node_textfile_scrape_error gauge
node_textfile_scrape_error 0
node_scrape_collector_success{collector="textfile"} 1
node_exporter_build_info{version="1.9.0",branch="a } b"} 1
prometheus_config_last_reload_success_timestamp_seconds 1.7645256000000000e+09
with_time{a="b"} 3.5 1764525600000
not_a_number{a="b"} x
"""


def test_metrics_are_read_by_name_and_labels() -> None:
    assert checks.parse_metrics(METRICS) == {
        "node_textfile_scrape_error": 0,
        'node_scrape_collector_success{collector="textfile"}': 1,
        'node_exporter_build_info{version="1.9.0",branch="a } b"}': 1,
        "prometheus_config_last_reload_success_timestamp_seconds": 1764525600,
        'with_time{a="b"}': 3.5,
    }


def answer(**data: Any) -> str:
    return json.dumps({"status": "success", "data": data})


def test_targets_are_read_with_health_and_error() -> None:
    text = answer(
        activeTargets=[
            {"labels": {"job": "node", "instance": "g1:9100"}, "health": "up", "lastError": ""},
            {"labels": {"job": "node", "instance": "g2:9100"}, "health": "down", "lastError": "refused"},
        ]
    )
    assert checks.parse_targets(text) == {
        ("node", "g1:9100"): ("up", ""),
        ("node", "g2:9100"): ("down", "refused"),
    }


@pytest.mark.parametrize("name", [check.name for check in registry.checks("prometheus")])
@pytest.mark.parametrize(
    ("rc", "said", "verdict"),
    [
        (7, "curl: (7) Failed to connect", Verdict.FAIL),
        (28, "curl: (28) Operation timed out", Verdict.UNKNOWN),
        (1, "cat: /etc/provision/monitoring.curl: Permission denied", Verdict.UNKNOWN),
    ],
)
def test_where_nothing_listens_that_is_known(
    tmp_path: Path, name: str, rc: int, said: str, verdict: Verdict
) -> None:
    site = make_site(tmp_path)
    host = SimpleNamespace(run=lambda command: SimpleNamespace(rc=rc, stdout="", stderr=said))
    (check,) = (check for check in registry.checks("prometheus") if check.name == name)
    found = check.run(Target(site, site.head, "prometheus", Lock(), distribution("debian", "13"), host))
    assert found.verdict is verdict
    assert (found.why or found.read or "").endswith(said if verdict is Verdict.UNKNOWN else "nothing listens")


FILES = [exports.CONFIG, *exports.rules()]
STATS = [f"100.5 {path}" for path in FILES]


@pytest.mark.parametrize(
    ("accepted", "rc", "stats", "verdict", "read"),
    [
        (1, 0, STATS, Verdict.PASS, "loaded"),
        (0, 0, STATS, Verdict.FAIL, "refused"),
        (1, 0, [*STATS[:-1], f"300 {FILES[-1]}"], Verdict.FAIL, "older than its files"),
        (1, 1, STATS[:-1], Verdict.FAIL, FILES[-1]),  # it goes on with what it has read, until the next start
        (1, 1, [], Verdict.PASS, "loaded"),  # set up by others: it reads other files
        (1, 127, [], Verdict.UNKNOWN, None),
    ],
)
def test_a_configuration_is_loaded_where_its_files_are_there_and_no_younger(
    tmp_path: Path, accepted: int, rc: int, stats: list[str], verdict: Verdict, read: str | None
) -> None:
    metrics = (
        f"prometheus_config_last_reload_successful {accepted}\n"
        "prometheus_config_last_reload_success_timestamp_seconds 200\n"
    )

    def run(command: str) -> SimpleNamespace:
        if "curl" in command:
            return SimpleNamespace(rc=0, stdout=metrics, stderr="")
        return SimpleNamespace(rc=rc, stdout="".join(f"{line}\n" for line in stats), stderr="stat: x")

    site, profile = make_site(tmp_path), distribution("debian", "13")
    at = Target(site, site.head, "prometheus", Lock(), profile, SimpleNamespace(run=run))
    found = checks.config_loaded.run(at)
    assert found.verdict is verdict
    assert (found.read or "").endswith(read or "")


def test_rules_and_alertmanagers_are_read() -> None:
    text = answer(
        groups=[{"name": "a", "rules": [{"name": "X", "health": "err", "lastError": "bad"}, {"name": "Y"}]}]
    )
    assert checks.parse_rules(text) == {"a": {"X": "bad", "Y": ""}}
    text = answer(activeAlertmanagers=[{"url": "http://192.0.2.1:9093/api/v2/alerts"}])
    assert checks.parse_alertmanagers(text) == {"192.0.2.1:9093"}


@pytest.mark.parametrize(
    "text", ["", "<html>", "[]", "{}", '{"status": "error"}', answer(other=[]), answer()]
)
def test_an_answer_of_something_else_is_unreadable_never_empty(text: str) -> None:
    for parse in (checks.parse_targets, checks.parse_rules, checks.parse_alertmanagers):
        with pytest.raises(checks.Unreadable):
            parse(text)


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    assert all(isinstance(value, float) for value in checks.parse_metrics(text).values())
    with pytest.raises(checks.Unreadable):
        checks.parse_targets(text)
